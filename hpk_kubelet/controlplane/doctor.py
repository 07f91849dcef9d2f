"""`hpk doctor`: what this site offers, found by trying it, and what each answer means."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pwd
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpk_kubelet.config import Config, Paths
from hpk_kubelet.controlplane import components
from hpk_kubelet.controlplane.addresses import node_address, port_range
from hpk_kubelet.controlplane.files import make_private_dir
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import choice

Level = Literal["ok", "warn", "fail"]
SLOW_FSYNC = 0.05  # seconds; etcd warns from 0.1 on, and every write to the API waits for one
PATIENCE = 30  # seconds a compute node may take to be had for the trial job
AGENT_PYTHON = (3, 9)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it."""

    level: Level
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}: {self.text}"


def examine(config: Config, paths: Paths) -> Iterator[Finding]:
    """Every check in turn, so that a slow one doesn't hold back what is known already."""
    yield from slurm_commands()
    yield Finding("ok", "backend", choice.words(config.slurm))
    yield apptainer()
    yield user_namespaces()
    yield subordinate_ids(pwd.getpwuid(os.getuid()).pw_name, os.getuid(), Path("/etc/subuid"))
    yield tun()
    yield from state_file_system(paths)
    yield addresses(config)
    yield from programs()
    yield from compute_node(paths)


def _run(*argv: str, stdin: str = "", timeout: float = 20.0) -> tuple[int, str]:
    """Exit code and all that was said in one line; 127 when there is no such command."""
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
    except FileNotFoundError:
        return 127, f"{argv[0]}: no such command"
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {timeout:.0f} s"
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def slurm_commands() -> Iterator[Finding]:
    needed = ("sbatch", "squeue", "scancel", "scontrol")
    missing = [c for c in needed if shutil.which(c) is None]
    if missing:
        yield Finding(
            "fail",
            "Slurm commands",
            f"{', '.join(missing)} not on PATH; HPK submits pods with them (module load slurm?)",
        )
        return
    code, version = _run("sbatch", "--version")
    yield Finding("ok", "Slurm commands", f"{', '.join(needed)} ({version})")
    code, words = _run("squeue", "--me", "-h")
    if code:
        yield Finding("fail", "slurmctld", f"does not answer: {words}")
    code, words = _run("sacct", "-n", "-X", "-S", "now")
    if code:
        yield Finding(
            "warn",
            "accounting",
            f"sacct does not work ({words}); HPK then reads how jobs ended from slurmctld alone, "
            "which forgets them after MinJobAge",
        )


def apptainer() -> Finding:
    for command in ("apptainer", "singularity"):
        if path := shutil.which(command):
            return Finding("ok", "apptainer", f"{_run(path, '--version')[1]} ({path})")
    return Finding(
        "fail", "apptainer", "not on PATH here; containers run in it (module load apptainer?)"
    )


def user_namespaces() -> Finding:
    code, words = _run("unshare", "--user", "--map-root-user", "--net", "--mount", "true")
    if code == 0:
        return Finding("ok", "user namespace", "one with network and mounts was made")
    return Finding(
        "fail",
        "user namespace",
        f"none can be made ({words}); containers need them. An administrator sets "
        "user.max_user_namespaces, and on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0",
    )


def subordinate_ids(name: str, uid: int, table: Path) -> Finding:
    """From getsubids where the site has it (it asks SSSD too), else from /etc/subuid."""
    count = 0
    code, words = _run("getsubids", name)
    if code == 0:
        fields = words.split()
        count = int(fields[3]) if len(fields) > 3 and fields[3].isdigit() else 0
    else:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines():
                owner, _, rest = line.partition(":")
                size = rest.partition(":")[2]
                if owner in (name, str(uid)) and size.isdigit():
                    count = max(count, int(size))
    mapper = shutil.which("newuidmap")
    if count >= 65535 and mapper:
        return Finding("ok", "subordinate ids", f"{count}, mapped by {mapper}")
    why = f"only {count}" if count else "none for you"
    return Finding(
        "warn",
        "subordinate ids",
        f"{why if count < 65535 else 'newuidmap is missing'}; each container then maps the one "
        "user it runs as onto you, and programs that change users don't work",
    )


def tun() -> Finding:
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as e:
        return Finding(
            "warn",
            "/dev/net/tun",
            f"{e.strerror}; pods then share their node's network (network: host)",
        )
    return Finding("ok", "/dev/net/tun", "can be opened")


def state_file_system(paths: Paths) -> Iterator[Finding]:
    """flock, shared mmap and fsync where etcd's data will be: done, not looked up."""
    move = "set HPK_STATE to a directory on another file system"
    try:
        directory = make_private_dir(paths.etcd)
    except OSError as e:
        advice = "set HPK_HOME to a directory of yours that all nodes share"
        yield Finding("fail", "state", f"{e.filename or paths.etcd}: {e.strerror}; {advice}")
        return
    probe = directory / f".doctor-{os.uname().nodename}-{os.getpid()}"
    try:
        with probe.open("w+b") as f:
            f.write(b"\0" * 4096)
            f.flush()
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                yield Finding("fail", "file locks", f"none in {directory} ({e.strerror}); {move}")
            else:
                yield Finding("ok", "file locks", f"work in {directory}")
            try:
                with mmap.mmap(f.fileno(), 4096) as shared:
                    shared[0] = 1
                    shared.flush()
            except OSError as e:
                yield Finding("fail", "mmap", f"not in {directory} ({e.strerror}); {move}")
            took = sorted(_fsync_seconds(f.fileno()) for _ in range(20))
            middle = took[10]
            level: Level = "ok" if middle < SLOW_FSYNC else "warn"
            text = f"{middle * 1000:.1f} ms in {directory}"
            if level == "warn":
                text += f"; every change in the API waits for one, so this is slow: {move}"
            yield Finding(level, "fsync", text)
    except OSError as e:
        yield Finding("fail", "state", f"{directory}: {e.strerror}; {move}")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _fsync_seconds(fd: int) -> float:
    began = time.monotonic()
    os.pwrite(fd, secrets.token_bytes(512), 0)
    os.fsync(fd)
    return time.monotonic() - began


def addresses(config: Config) -> Finding:
    try:
        address = node_address(config.address)
        ports = port_range(config.ports)
    except HPKError as e:
        return Finding("fail", "network", str(e))
    return Finding("ok", "network", f"{address}, ports {ports.start}-{ports.stop - 1}")


def programs() -> Iterator[Finding]:
    needed = [r.name for r in components.recipes().values() if not r.optional]
    missing = [name for name in needed if components.find(name) is None]
    if missing:
        yield Finding("fail", "components", f"{', '.join(missing)} not here yet: run hpk fetch")
    else:
        yield Finding("ok", "components", f"{', '.join(needed)}")


# Run by sh on a compute node; answers KEY=VALUE lines. $1 a file of ours, $2 what is in it.
_PROBE = r"""
echo host=$(hostname)
echo home=$(cat "$1" 2>&1)
for p in python3 python3.13 python3.12 python3.11 python3.10 python3.9; do
  v=$("$p" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) && echo python=$v
done
echo apptainer=$(apptainer --version 2>/dev/null || singularity --version 2>/dev/null)
unshare --user --map-root-user --net --mount true 2>/dev/null && echo userns=yes
sh -c ': <>/dev/net/tun' 2>/dev/null && echo tun=yes
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
if said=$(pasta --config-net -q -4 -t none -u none -T none -U none --no-map-gw \
  --map-guest-addr 192.0.2.1 -- sh -c 'nft add table ip hpk && ip link add hpk type vxlan \
  id 1 dstport 4789 dev lo && ip link add hpk0 type veth && echo works' 2>&1); then
  echo network=works; else echo network=$said; fi
if said=$(sbatch --test-only --wrap true 2>&1); then echo sbatch=yes; else echo sbatch=no $said; fi
"""


def compute_node(paths: Paths) -> Iterator[Finding]:
    """One small job that tries on a compute node what pods and the control job need there."""
    if shutil.which("srun") is None:
        yield Finding("warn", "compute node", "no srun here, so none was tried")
        return
    token = secrets.token_hex(8)
    try:
        mark = make_private_dir(paths.run) / f"doctor-{os.getpid()}"
        mark.write_text(token)
    except OSError as e:
        text = f"none was tried, since {e.filename or paths.run} can't be written: {e.strerror}"
        yield Finding("fail", "compute node", text)
        return
    try:
        code, out, err = _trial(mark)
    finally:
        mark.unlink(missing_ok=True)
    if code or "host=" not in out:
        yield Finding(
            "warn",
            "compute node",
            f"no job ran there within {PATIENCE} s ({' '.join(err.split()) or 'all are busy'}), "
            "so Python, the shared home and sbatch from there are not known; try again later",
        )
        return
    yield from judge_probe(out, token)


def _trial(mark: Path) -> tuple[int, str, str]:
    argv = ["srun", "--quiet", f"--immediate={PATIENCE}", "--nodes=1", "--ntasks=1"]
    argv += ["--job-name=hpk-doctor", "--time=2", "--mem=100M", "--chdir=/"]
    try:
        done = subprocess.run(
            [*argv, "sh", "-s", str(mark)],
            input=_PROBE,
            capture_output=True,
            text=True,
            timeout=PATIENCE + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "", ""
    return done.returncode, done.stdout, done.stderr


def judge_probe(output: str, token: str) -> Iterator[Finding]:
    """What the trial job's KEY=VALUE lines mean. A key may come several times (python)."""
    answers: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition("=")
        answers.setdefault(key, []).append(value)

    def first(key: str) -> str:
        return answers.get(key, [""])[0]

    node = first("host")
    checks: list[tuple[bool, Level, str, str, str]] = [
        (
            first("home") == token,
            "fail",
            "shared home",
            f"{node} sees this node's files in $HPK_HOME",
            f"{node} does not see $HPK_HOME ({first('home')}); set HPK_HOME to a shared directory",
        ),
        (
            any(_version(v) >= AGENT_PYTHON for v in answers.get("python", [])),
            "fail",
            "Python on compute nodes",
            f"{', '.join(dict.fromkeys(answers.get('python', [])))} on {node}",
            f"none from {'.'.join(map(str, AGENT_PYTHON))} on at {node} "
            f"(found: {first('python') or 'none'}); the agent in each job needs one",
        ),
        (
            bool(first("apptainer")),
            "fail",
            "apptainer on compute nodes",
            first("apptainer"),
            f"not found on {node}",
        ),
        (
            bool(first("userns")),
            "fail",
            "user namespace on compute nodes",
            f"made on {node}",
            f"none can be made on {node}; containers need them",
        ),
        (
            bool(first("tun")),
            "warn",
            "/dev/net/tun on compute nodes",
            f"can be opened on {node}",
            f"cannot be opened on {node}; pods then share their node's network",
        ),
        (
            first("network") == "works",
            "warn",
            "pod network on compute nodes",
            f"pasta, nft, VXLAN and veth work for you on {node} (network: rootless)",
            f"can't be made on {node} ({first('network') or 'it was not tried'}); pods then share "
            "their node's network (network: host). It needs pasta (package passt, from 2024_08 "
            "on), nft (nftables), ip (iproute2) and the kernel's vxlan, veth and nf_tables",
        ),
        (
            first("sbatch") == "yes",
            "fail",
            "sbatch from compute nodes",
            f"works on {node}",
            f"refused on {node} ({first('sbatch').removeprefix('no ')}); run `hpk serve` where "
            "sbatch works",
        ),
    ]
    for good, otherwise, what, fine, bad in checks:
        yield Finding("ok" if good else otherwise, what, fine if good else bad)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def run(config: Config, paths: Paths, say: Callable[[str], None]) -> bool:
    """Prints every finding as it is made; True when nothing failed."""
    good = True
    for finding in examine(config, paths):
        say(str(finding))
        good = good and finding.level != "fail"
    return good
