"""The sandbox's pure parts: configuration, recipes, archives, and what an interruption leaves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bootstrap"))

from sandbox_lib import base, cli, cluster, enter, images, nodes, oci, rootfs, slurmconf
from sandbox_lib.base import SandboxError
from sandbox_lib.slurmconf import Options


def settings(conf: str, key: str) -> list[str]:
    return [line for line in conf.splitlines() if line.startswith(f"{key}=")]


def test_slurm_conf_leaves_the_scheduler_alone_unless_told() -> None:
    assert settings(slurmconf.slurm_conf(Options(), 1), "SchedulerParameters") == []
    conf = slurmconf.slurm_conf(Options(sched_delay=0), 1)
    assert settings(conf, "SchedulerParameters") == ["SchedulerParameters=batch_sched_delay=0"]


def test_slurm_conf_describes_nodes_and_partitions() -> None:
    options = Options(
        nodes=3, cpus=4, memory=8000, gpus=2, partitions=("main", "debug=node2+node3")
    )
    slurmconf.check(options)
    conf = slurmconf.slurm_conf(options, 10001)
    assert settings(conf, "NodeName")[2] == (
        f"NodeName=node3 NodeAddr={slurmconf.NETWORK}.13 CPUs=4 Sockets=1 "
        "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 TmpDisk=0 State=UNKNOWN Gres=gpu:2"
    )
    assert settings(conf, "PartitionName") == [
        "PartitionName=main Nodes=node1,node2,node3 Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=debug Nodes=node2,node3 MaxTime=INFINITE State=UP",
    ]
    assert settings(conf, "FirstJobId") == ["FirstJobId=10001"]
    assert slurmconf.gres_conf(options).endswith("Name=gpu File=/dev/nvidia[0-1]\n")


def test_slurm_conf_extra_lines_come_last_and_accounting_is_off_by_default() -> None:
    conf = slurmconf.slurm_conf(Options(extra=("KillWait=5",)), 1)
    assert conf.endswith("\nKillWait=5\n")
    assert settings(conf, "AccountingStorageType") == []
    assert settings(slurmconf.slurm_conf(Options(accounting=True), 1), "AccountingStorageType")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(nodes=0), "--nodes is 0"),
        (Options(cpus=0), "--cpus"),
        (Options(partitions=("main", "debug=node9")), "debug names node9"),
        (Options(partitions=("ma in",)), "no partition name"),
    ],
)
def test_an_impossible_cluster_is_one_sentence(options: Options, words: str) -> None:
    with pytest.raises(SandboxError, match=words):
        slurmconf.check(options)


def test_every_node_and_the_registry_have_an_address() -> None:
    text = slurmconf.hosts(Options(nodes=2))
    assert f"{slurmconf.NETWORK}.2 head registry.hpk.test\n" in text
    assert text.endswith(f"{slurmconf.NETWORK}.11 node1\n{slurmconf.NETWORK}.12 node2\n")


def test_a_cluster_is_remembered_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPK_SANDBOX_DIR", str(tmp_path))
    assert cluster.current() is None
    (tmp_path / "cluster.json").write_text(
        '{"options": {"nodes": 3, "partitions": ["a", "b"], "extra": ["KillWait=5"], '
        '"sched_delay": 0}, "mounted": []}'
    )
    wanted = Options(nodes=3, partitions=("a", "b"), extra=("KillWait=5",), sched_delay=0)
    assert cluster.current() == wanted


def test_exec_passes_the_command_through() -> None:
    args = cli.parser().parse_args(["exec", "--user", "bob", "--node", "node2", "--", "ls", "-l"])
    assert (args.user, args.node, args.argv) == ("bob", "node2", ["--", "ls", "-l"])
    args = cli.parser().parse_args(["exec", "sbatch", "--wrap", "id", "--user"])
    assert args.argv == ["sbatch", "--wrap", "id", "--user"]


def test_exec_gives_a_login_environment_and_nothing_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    env = nodes.environment("alice")
    assert env["HOME"] == "/home/alice"
    assert env["KUBECONFIG"] == "/home/alice/.hpk/kubeconfig"
    assert "SECRET_TOKEN" not in env


def test_exec_without_a_cluster_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPK_SANDBOX_DIR", str(tmp_path))
    with pytest.raises(SandboxError, match=r"node1 does not run.*sandbox up"):
        nodes.inside("node1", ["true"])


def test_a_pid_used_again_is_not_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPK_SANDBOX_DIR", str(tmp_path))
    folder = tmp_path / "nodes" / "head"
    folder.mkdir(parents=True)
    (folder / "pid").write_text(f"{os.getpid()} {nodes.start_time(os.getpid())}\n")
    assert nodes.init_pid("head") == os.getpid()
    (folder / "pid").write_text(f"{os.getpid()} 1\n")
    assert nodes.init_pid("head") is None


def test_a_zombie_does_not_count_as_alive() -> None:
    child = subprocess.Popen(["true"])
    base.wait_for("the end of true", lambda: nodes.start_time(child.pid) is None, 5)
    child.wait()


def test_interrupted_building_leaves_nothing_to_use(tmp_path: Path) -> None:
    target = tmp_path / "rootfs"
    with pytest.raises(KeyboardInterrupt), base.building(target) as temporary:
        temporary.mkdir()
        (temporary / "half").touch()
        raise KeyboardInterrupt
    assert not target.exists()
    with base.building(target) as temporary:
        assert not temporary.exists()
        temporary.mkdir()
        (temporary / "whole").touch()
    assert [p.name for p in target.iterdir()] == ["whole"]
    assert not temporary.exists()


def test_a_failing_command_is_told_with_its_last_words() -> None:
    with pytest.raises(SandboxError, match=r"failed \(3\): no such thing"):
        base.run(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(SandboxError, match="no-such-tool is not installed"):
        base.run(["no-such-tool"])


def test_enter_writes_into_the_root_not_through_its_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("host")
    (tmp_path / "hosts").symlink_to(outside)
    enter.step("write", str(tmp_path / "hosts"), "node")
    assert (tmp_path / "hosts").read_text() == "node"
    assert outside.read_text() == "host"


def test_root_file_system_changes_its_name_with_its_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = rootfs.key()
    monkeypatch.setattr(rootfs, "PACKAGES", (*rootfs.PACKAGES, "hello"))
    assert rootfs.key() != before


def test_only_network_settings_reach_the_root_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/etc/ssl/certs/ca.crt")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    env = rootfs.python_env()
    assert env["PIP_CERT"] == "/etc/ssl/certs/ca.crt"
    assert env["HTTPS_PROXY"] == "http://proxy:3128"
    assert "SECRET_TOKEN" not in env


CONFORMANCE = images.CHECKOUT / "bootstrap" / "conformance_lib" / "images"
RECIPES = [*sorted(images.RECIPES.glob("*.toml")), *sorted(CONFORMANCE.glob("*.toml"))]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_recipes_are_complete(path: Path) -> None:
    recipe = tomllib.loads(path.read_text())
    keys = {"tag", "names", "busybox", "files", "texts", "modes", "links", "debian", "config"}
    assert set(recipe) <= keys
    assert all(re.fullmatch(r"[a-z0-9/-]+:[\w.-]+", n) for n in images.image_names(path, recipe))
    assert "Entrypoint" in recipe["config"] or "Cmd" in recipe["config"]
    for target, source in recipe.get("files", {}).items():
        assert target.startswith("/")
        assert source.partition(":")[0] in ("rootfs", "component", "go")
    assert set(recipe.get("modes", {})) <= set(recipe.get("files", {}))
    if "debian" in recipe:
        assert (path.parent / recipe["debian"]["trim"]).is_file()


def test_a_missing_component_leaves_its_image_out_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(images.MissingComponent, match=r"image x is left out.*no agnhost"):
        images.sources("x", {"files": {"/agnhost": "component:agnhost"}})


def layer(path: Path) -> Path:
    with path.open("wb") as out, oci.Layer(out) as made:
        made.directory("/tmp", 0o1777)
        made.file("/usr/bin/tool", b"#!", 0o755)
        made.link("/bin/sh", "tool")
    return path


def test_an_archive_holds_together_and_is_reproducible(tmp_path: Path) -> None:
    config = {"Cmd": ["sh"]}
    first, second = tmp_path / "first", tmp_path / "second"
    oci.write_archive(layer(tmp_path / "a.tar"), config, first)
    oci.write_archive(layer(tmp_path / "b.tar"), config, second)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:

        def blob(descriptor: dict[str, object]) -> bytes:
            digest = str(descriptor["digest"]).removeprefix("sha256:")
            file = archive.extractfile(f"blobs/sha256/{digest}")
            assert file is not None
            data = file.read()
            assert hashlib.sha256(data).hexdigest() == digest
            assert len(data) == descriptor["size"]
            return data

        index = archive.extractfile("index.json")
        assert index is not None
        manifest = json.loads(blob(json.loads(index.read())["manifests"][0]))
        image = json.loads(blob(manifest["config"]))
        packed = blob(manifest["layers"][0])
    assert image["config"] == config
    with tarfile.open(fileobj=io.BytesIO(packed)) as inner:
        modes = {m.name: (m.mode, m.uid, m.mtime) for m in inner.getmembers()}
    assert modes["tmp"] == (0o1777, 0, 0)
    assert modes["usr/bin/tool"] == (0o755, 0, 0)
    assert list(modes) == ["tmp", "usr", "usr/bin", "usr/bin/tool", "bin", "bin/sh"]
    diff = hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()
    assert image["rootfs"]["diff_ids"] == [f"sha256:{diff}"]
