"""The agent's pure parts."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpk_kubelet.agent import devices, setup
from hpk_kubelet.agent.container import (
    Mount,
    StartError,
    apptainer_argv,
    complete,
    container_argv,
    container_env,
    csv_field,
)
from hpk_kubelet.agent.etc import hosts_file, resolver_file
from hpk_kubelet.agent.fds import within
from hpk_kubelet.agent.install import install
from hpk_kubelet.agent.journal import AlreadyStarted, Journal
from hpk_kubelet.agent.namespaces import subordinate_range
from hpk_kubelet.agent.nodenet import rules
from hpk_kubelet.agent.podnet import candidates
from hpk_kubelet.agent.probes import Threshold
from hpk_kubelet.agent.restart import BackOff, duration, should_restart
from hpk_kubelet.agent.streams import failure, internal_error
from hpk_kubelet.agent.volumes import (
    VolumeError,
    container_mounts,
    prepare_volume,
    resolve_sub_path,
)
from hpk_kubelet.spec.plan import PLAN_VERSION, REFRESH_AFTER

FIELDS = {"podIP": "10.0.0.1", "podIPs": "10.0.0.1", "hostIP": "10.0.0.1", "hostIPs": "10.0.0.1",
          "hostname": "node7", "podHostname": "web"}  # fmt: skip


def container(**more: Any) -> dict[str, Any]:
    return {
        "name": "main", "argv": ["run", ""], "env": {"A": "1"}, "tty": False, "mounts": [],
        "restartPolicy": "Always", "sidecar": False, **more,
    }  # fmt: skip


# --- apptainer's command line and the environment ---


def test_the_command_line_carries_mounts_and_nothing_secret() -> None:
    argv = apptainer_argv(
        "/usr/bin/apptainer", "/images/x/rootfs", writable_layer="/tmp/layer",
        mounts=[Mount("/v/a,b", "/data/in", True), Mount("/v", "/data", False)],
    )  # fmt: skip
    assert argv[:3] == ["/usr/bin/apptainer", "--quiet", "exec"]
    assert argv[-2:] == ["/images/x/rootfs", "/proc/self/fd/251"]
    assert argv[argv.index("--overlay") + 1] == "/tmp/layer"
    mounts = [argv[i + 1] for i, word in enumerate(argv) if word == "--mount"]
    # the outer mount first
    assert mounts == [
        "type=bind,source=/v,destination=/data",
        'type=bind,"source=/v/a,b",destination=/data/in,ro',
    ]
    assert "--pid" in argv


def test_a_read_only_root_has_no_layer_and_a_shared_pid_namespace_no_own() -> None:
    argv = apptainer_argv(
        "apptainer", "/r", writable_layer=None, mounts=[], gpus="nvidia", own_pid_namespace=False
    )
    assert not {"--overlay", "--pid"} & set(argv)
    assert "--nv" in argv


def test_csv_fields() -> None:
    assert csv_field("source=/a b") == "source=/a b"
    assert csv_field('source=/a"b') == '"source=/a""b"'


def test_late_values() -> None:
    assert complete(["http://", "podIP", ":80/", "hostname"], FIELDS) == "http://10.0.0.1:80/node7"
    late = container(lateArgv={"1": ["ip=", "podIP"]}, lateEnv={"NODE": ["", "hostname"]})
    assert container_argv(late, FIELDS) == ["run", "ip=10.0.0.1"]
    env = container_env(late, FIELDS, None, {"SLURM_JOB_ID": "1", "HOME": "/home/x"})
    assert env.pop("PATH").startswith("/usr/local/sbin")
    assert env == {"HOSTNAME": "web", "A": "1", "NODE": "node7"}


def test_only_ranks_and_gpus_see_the_job() -> None:
    job = {"SLURM_NTASKS": "4", "PMIX_RANK": "2", "CUDA_VISIBLE_DEVICES": "1", "SECRET": "x"}
    rank = container_env(container(mpi=["--mpi=pmix"]), FIELDS, None, job)
    assert (rank["SLURM_NTASKS"], rank["PMIX_RANK"]) == ("4", "2")
    assert not {"SECRET", "CUDA_VISIBLE_DEVICES"} & set(rank)
    gpu = container_env(container(), FIELDS, "nvidia", job)
    assert gpu["CUDA_VISIBLE_DEVICES"] == "1"
    assert gpu["LD_LIBRARY_PATH"] == "/.singularity.d/libs"
    assert "SLURM_NTASKS" not in gpu


def test_srun_is_told_what_sbatch_was() -> None:
    job = {"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2"}
    assert setup.srun_argv("srun", ["--mpi=pmix"], job) == [
        "srun", "--input=none", "--mpi=pmix", "--ntasks=4", "--cpus-per-task=2",
    ]  # fmt: skip
    assert "--ntasks=4" not in setup.srun_argv("srun", ["--ntasks=2"], job)
    assert "--ntasks=4" not in setup.srun_argv("srun", ["-n", "2"], job)


def test_numbers_of_granted_devices() -> None:
    assert devices.expand("0,2-4") == [0, 2, 3, 4]
    assert devices.expand("MIG-x,1") == [1]


def test_subordinate_ranges() -> None:
    text = "bob:1:2\nalice:100000:65536\nalice:5:6\n"
    assert subordinate_range(text, "alice", 1000) == (100000, 65536)
    assert subordinate_range("1000:7:8\n", "alice", 1000) == (7, 8)
    assert subordinate_range("alice:x:y\n", "alice", 1000) is None
    assert subordinate_range("", "alice", 1000) is None


# --- volumes ---


def test_empty_dirs(tmp_path: Path) -> None:
    folder, home, masked = str(tmp_path / "v"), str(tmp_path / "home"), str(tmp_path / "m")
    path = prepare_volume("w", {"kind": "emptyDir"}, folder, home, None, masked)
    assert path == folder + "/w" and Path(path).stat().st_mode & 0o7777 == 0o777
    path = prepare_volume("g", {"kind": "emptyDir"}, folder, home, os.getgid(), masked)
    assert Path(path).stat().st_mode & 0o7777 == 0o2777


def test_host_paths(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "pki").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(home / "pki")

    def host(path: Path, kind: str) -> str:
        volume = {"kind": "hostPath", "path": str(path), "type": kind}
        return prepare_volume("h", volume, str(tmp_path), str(home), None, str(tmp_path / "m"))

    assert host(tmp_path / "file", "File") == str(tmp_path / "file")
    assert host(tmp_path / "new" / "dir", "DirectoryOrCreate")
    assert (tmp_path / "new" / "dir").is_dir()
    assert host(tmp_path / "newfile", "FileOrCreate") and (tmp_path / "newfile").is_file()
    with pytest.raises(
        VolumeError, match=r"hostPath type check failed: .*/file is not a directory"
    ):
        host(tmp_path / "file", "Directory")
    with pytest.raises(VolumeError, match="is not a socket"):
        host(tmp_path / "file", "Socket")
    with pytest.raises(VolumeError, match=r'SetUp failed for volume "h" .*not a file'):
        host(tmp_path / "nothing", "File")
    (tmp_path / "loop").symlink_to("loop")  # as good as any error but "not there"
    with pytest.raises(VolumeError, match="loop: too many levels of symbolic links"):
        host(tmp_path / "loop", "")
    for inside in (home, home / "pki", tmp_path / "link"):
        with pytest.raises(VolumeError, match=r"HPK's own state"):
            host(inside, "")


def test_claims(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "data"
    volume = home / "volumes" / "ns_c_pvc-1"
    (volume / "sub").mkdir(parents=True)
    (volume / "sub" / "file").write_text("")
    (home / "pki").mkdir()
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(home / "pki")

    def claim(path: Path, group: int | None = None) -> str:
        plan = {"kind": "claim", "path": str(path)}
        return prepare_volume("c", plan, str(tmp_path), str(home), group, str(tmp_path / "m"))

    assert claim(volume) == str(volume) and claim(elsewhere) == str(elsewhere)
    for wrong in (home, home / "pki", home / "volumes", tmp_path / "link"):
        with pytest.raises(VolumeError, match="HPK's own state"):
            claim(wrong)
    with pytest.raises(VolumeError, match=r"/nothing does not exist"):
        claim(tmp_path / "nothing")
    claim(volume, os.getgid())
    modes = [oct(p.stat().st_mode & 0o7777) for p in (volume, volume / "sub", volume / "sub/file")]
    assert modes == ["0o2775", "0o2775", "0o664"]
    (volume / "sub" / "file").chmod(0o600)
    claim(volume, os.getgid())  # once is enough
    assert (volume / "sub" / "file").stat().st_mode & 0o777 == 0o600


def test_sub_paths_stay_inside(tmp_path: Path) -> None:
    volume, outside = tmp_path / "v", tmp_path / "outside"
    volume.mkdir()
    outside.mkdir()
    (volume / "in").mkdir()
    (volume / "to-in").symlink_to("in")
    (volume / "to-out").symlink_to(outside)
    (volume / "up").symlink_to("../outside")
    root = os.path.realpath(volume)
    assert resolve_sub_path(str(volume), "to-in") == root + "/in"
    assert resolve_sub_path(str(volume), "made/by/us") == root + "/made/by/us"
    assert (volume / "made/by/us").is_dir()
    for wrong in ("to-out", "to-out/x", "up", "../outside", "/etc", "in/../../outside"):
        with pytest.raises(ValueError, match="leads out of the volume"):
            resolve_sub_path(str(volume), wrong)
    assert list(outside.iterdir()) == []


def test_a_sub_path_that_escapes_is_the_containers_error(tmp_path: Path) -> None:
    mount = {"volume": "w", "subPath": "../x", "target": "/x", "readOnly": True}
    with pytest.raises(StartError) as e:
        container_mounts(container(mounts=[mount]), {"w": str(tmp_path)}, FIELDS, str(tmp_path))
    assert e.value.reason == "CreateContainerConfigError"
    plain = {**mount, "subPath": ""}
    assert container_mounts(
        container(mounts=[plain]), {"w": "/v"}, FIELDS, str(tmp_path)
    ) == [Mount("/v", "/x", True)]  # fmt: skip


def test_hosts_file() -> None:
    hosts = {"header": "# HPK\n", "node": True, "names": ["web.x", "web"],
             "aliases": "1.2.3.4\tdb\n"}  # fmt: skip
    assert hosts_file(hosts, "node\n", "10.0.0.1") == (
        "# HPK\nnode\n\n10.0.0.1\tweb.x\tweb\n1.2.3.4\tdb\n"
    )
    assert hosts_file({**hosts, "node": False}, "node\n", "10.0.0.1") == (
        "# HPK\n10.0.0.1\tweb.x\tweb\n1.2.3.4\tdb\n"
    )


def test_resolver_file() -> None:
    node = "domain old\nsearch site.org\nnameserver 127.0.0.53 # stub\noptions edns0 ndots:2\n"
    none: dict[str, list[str]] = {"nameservers": [], "searches": [], "options": []}
    cluster = {"nameservers": ["10.96.0.10"], "searches": ["svc"], "options": ["ndots:5"],
               "node": "searches", "config": none}  # fmt: skip
    assert resolver_file(cluster, node, "192.0.2.53") == (
        "search svc site.org\nnameserver 10.96.0.10\noptions ndots:5\n"
    )
    own = {"nameservers": ["1.1.1.1"], "searches": ["a"], "options": ["ndots:1"]}
    everything = {**none, "node": "everything", "config": own}
    assert resolver_file(everything, node, "192.0.2.53") == (
        "search site.org a\nnameserver 192.0.2.53\nnameserver 1.1.1.1\noptions edns0 ndots:1\n"
    )
    assert "nameserver 127.0.0.53\n" in resolver_file(everything, node, "")
    nothing = {**none, "node": "nothing", "config": own}
    assert resolver_file(nothing, node, "") == "search a\nnameserver 1.1.1.1\noptions ndots:1\n"


def test_an_address_is_used_again_as_late_as_can_be() -> None:
    found = candidates("10.244.3.1/24", 7)
    assert (found[0], found[-1], len(found)) == ("10.244.3.9", "10.244.3.8", 253)
    assert {"10.244.3.0", "10.244.3.1", "10.244.3.255"}.isdisjoint(found)
    assert candidates("10.244.3.1/24", 253)[0] == "10.244.3.2"


def test_the_rules_of_a_node_network() -> None:
    facts = {"podCIDR": "10.244.0.0/16", "dns": {"address": "10.96.0.10", "target": "10.244.1.2"}}
    text = rules(facts, "10.0.0.1")
    assert "ip daddr 10.96.0.10 tcp dport 53 dnat to 10.244.1.2" in text
    assert "ip daddr 10.0.0.1 dnat to 192.0.2.1" in text
    facts["dns"] = {"address": "10.96.0.10", "target": ""}
    assert "10.96.0.10" not in rules(facts, "10.0.0.1")


def test_remove_tree_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_text("")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "link").symlink_to(tmp_path / "keep")
    setup.remove_tree(str(tree))
    assert not tree.exists() and (tmp_path / "keep" / "file").exists()


def test_scratch_is_locked_and_stale_ones_are_swept(tmp_path: Path) -> None:
    mine, dead, alive = (str(tmp_path / f"hpk-5-{n}") for n in (1, 2, 3))
    lock = setup.make_scratch(mine)
    os.close(setup.make_scratch(dead))
    other = setup.make_scratch(alive)
    (tmp_path / "hpk-5-2" / "file").write_text("")
    (tmp_path / "hpk-55-9").mkdir()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    setup.sweep(mine)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hpk-5-1", "hpk-5-3", "hpk-55-9"]
    os.close(lock)
    os.close(other)


# --- the journal ---


def test_the_journal_has_no_gaps_and_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(str(path))
    event: dict[str, Any] = {"reason": "Started"}
    journal.write({"finished": False}, [event, {"reason": "x"}])
    journal.write({"finished": True}, [])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seq"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["event"]["seq"] == 0 and lines[1]["event"]["seq"] == 1
    assert lines[3]["state"] == {"finished": True}
    assert len(journal.events) == 2
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AlreadyStarted):
        Journal(str(path))


def test_a_full_disk_delays_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(str(path))
    good, journal._fd = journal._fd, os.open("/dev/full", os.O_WRONLY)
    journal.write({"n": 1}, [])
    assert "No space left" in capsys.readouterr().err and path.read_text() == ""
    journal._fd = good
    journal.write({"n": 2}, [])
    assert [json.loads(line)["state"]["n"] for line in path.read_text().splitlines()] == [1, 2]


# --- restarts and probes ---


@pytest.mark.parametrize(
    ("policy", "code", "init", "again"),
    [
        ("Always", 0, False, True), ("Always", 1, False, True), ("OnFailure", 0, False, False),
        ("OnFailure", 1, False, True), ("Never", 1, False, False), ("Always", 0, True, False),
        ("OnFailure", 3, True, True),
    ],
)  # fmt: skip
def test_restart_policies(policy: str, code: int, init: bool, again: bool) -> None:
    assert should_restart(container(restartPolicy=policy), code, init) is again


def test_restart_rules_come_first() -> None:
    rules = [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]
    ruled = container(restartPolicy="Never", restartPolicyRules=rules)
    assert should_restart(ruled, 42, False) and not should_restart(ruled, 1, False)
    rules[0]["exitCodes"]["operator"] = "NotIn"  # type: ignore[index]
    assert should_restart(ruled, 1, False) and not should_restart(ruled, 42, False)


def test_sidecars_come_back_from_success() -> None:
    assert should_restart(container(sidecar=True), 0, init=True)


def test_back_off_is_kubelets() -> None:
    back_off, now, waits = BackOff(), 1000.0, []
    for _ in range(8):
        wait = back_off.wait(finished=now, now=now)
        waits.append(wait)
        now += wait
        back_off.next(now)
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]
    assert back_off.wait(finished=now + 601, now=now + 601) == 0  # it ran long enough
    back_off.next(now + 601)
    assert back_off.step == 10
    assert [duration(s) for s in (10, 80, 300)] == ["10s", "1m20s", "5m0s"]


def test_thresholds_count_in_a_row() -> None:
    threshold = Threshold(success=1, failure=3)
    results = [False, False, True, False, False, False, False]
    assert [threshold.add(r) for r in results] == [None, None, True, None, None, False, False]
    assert [Threshold(2, 1).add(True)] == [None]


def test_status_objects_of_exec() -> None:
    status = json.loads(failure(3))
    assert (status["reason"], status["details"]["causes"][0]["message"]) == ("NonZeroExitCode", "3")
    assert json.loads(internal_error("x"))["message"] == "Internal error occurred: x"


# --- what is shipped ---


def test_the_installed_agent_stands_alone(tmp_path: Path) -> None:
    target = install(tmp_path / "agent")
    assert install(tmp_path / "agent") == target
    assert [p.name for p in (tmp_path / "agent").iterdir()] == [target.name]
    assert not (target / "hpk_agent" / "install.py").exists()
    run = subprocess.run(
        [sys.executable, "-I", "-S", str(target), str(tmp_path / "nothing")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.startswith("hpk: the pod's plan ") and "Traceback" not in run.stderr


def test_nothing_heavy_is_imported_before_the_first_container(tmp_path: Path) -> None:
    target = install(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import hpk_agent.main; "
        "print([m for m in ('asyncio', 'ssl', 'subprocess', 'inspect', 'logging') "
        "if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_it_knows_the_kubelets_plan() -> None:
    from hpk_kubelet.agent import main

    assert (main.PLAN_VERSION, main.REFRESH_AFTER) == (PLAN_VERSION, REFRESH_AFTER)


def test_another_version_of_the_plan_is_refused_in_words(tmp_path: Path) -> None:
    from hpk_kubelet.agent.main import read_plan

    (tmp_path / "plan.json").write_text('{"version": 99}')
    assert "has version 99, this agent knows only 2" in read_plan(str(tmp_path))
    (tmp_path / "plan.json").write_text("{")
    assert "can't be read" in read_plan(str(tmp_path))


def test_every_module_compiles_on_the_oldest_python() -> None:
    import ast

    folder = Path(setup.__file__).parent
    for path in folder.glob("*.py"):
        if path.name != "install.py":
            ast.parse(path.read_text(), str(path), feature_version=(3, 9))


async def test_work_ends_within_its_time_or_with_its_waiter() -> None:
    async def late(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    assert await within(5.0, late(0.0)) == "done"
    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, late(60.0))
    # cancelled in the moment in which what it waits for is done
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiter = asyncio.ensure_future(within(60.0, ready))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ready.set_result("done")
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
