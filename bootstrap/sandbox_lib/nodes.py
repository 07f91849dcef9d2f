"""Nodes: a network namespace, a veth into the bridge, and a process tree of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .base import CLEAN_ENV, NAME, SandboxError, run, run_dir, wait_for
from .rootfs import enter_command
from .slurmconf import HEAD, NETWORK, Options, hosts

BRIDGE = f"{NAME}0"
PREFIX = f"{NAME}-"
"""Of every network namespace and veth of ours: how leftovers of a crash are found."""


MEMORY = Path("/sys/fs/cgroup/memory")
"""With --cgroup, each node has a directory of its own in it."""


PROFILE = """\
export KUBECONFIG="$HOME/.hpk/kubeconfig" HPK_COMPONENTS=/opt/hpk/components
"""
"""For every login shell; `environment` says the same."""


def namespaces() -> list[str]:
    """Our network namespaces, whoever left them."""
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.glob(f"{PREFIX}*")) if folder.is_dir() else []


def processes(namespace: str) -> list[int]:
    """Host pids of everything in one of our network namespaces."""
    done = run(["ip", "netns", "pids", namespace], check=False)
    return [int(word) for word in done.stdout.split()]


def init_pid(node: str) -> int | None:
    """Host pid of a node's PID 1, or None if the node does not run."""
    try:
        text = (run_dir() / "nodes" / node / "pid").read_text()
        pid, started = (int(word) for word in text.split())
    except (FileNotFoundError, ValueError):
        return None
    return pid if start_time(pid) == started else None


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot: tells it from a later one of the same pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if fields[0] != "Z" else None


def create_network(options: Options) -> None:
    """The bridge, and per node a namespace `hpk-NODE` whose eth0 leads there."""
    run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    run(["ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])
    for node in [HEAD, *options.names()]:
        add_to_network(options, node)


def add_to_network(options: Options, node: str) -> None:
    name = PREFIX + node
    run(["ip", "netns", "add", name])
    run(["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name])
    run(["ip", "link", "set", name, "master", BRIDGE, "up"])
    lines = [
        "link set lo up",
        f"addr add {options.address(node)}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {NETWORK}.1",
    ]
    run(["ip", "-netns", name, "-batch", "-"], input="\n".join(lines))


def start(options: Options, node: str, root: Path, checkout: Path, components: Path) -> None:
    """Starts a node's PID 1 (tini) with its mounts; daemons come after it."""
    state = run_dir()
    folder = state / "nodes" / node
    scratch, new, log = folder / "mnt", folder / "mnt" / "root", state / "log" / node
    scratch.mkdir(parents=True, exist_ok=True)
    log.mkdir(parents=True, exist_ok=True)
    log.chmod(0o777)  # slurm and munge write there as themselves
    at = f"{new}"
    steps: list[Sequence[str | int]] = [
        ["overlay", str(root), str(scratch), at],
        ["bind", str(state / "home"), f"{at}/home"],
        ["bind", str(state / "opt"), f"{at}/opt/hpk"],
        ["ro-bind", str(checkout), f"{at}/opt/hpk/src"],
        ["ro-bind", str(components), f"{at}/opt/hpk/components"],
        ["ro-bind", str(state / "etc"), f"{at}/etc/slurm"],
        ["bind", str(log), f"{at}/var/log/slurm"],
        ["mount", "proc", f"{at}/proc", ""],
        ["mount", "sysfs", f"{at}/sys", ""],
        ["mount", "tmpfs", f"{at}/run", "mode=0755"],
        ["mount", "tmpfs", f"{at}/tmp", "mode=1777"],
        *device_steps(f"{at}/dev", options.gpus if node != HEAD else 0),
        ["mkdir", f"{at}/run/lock", 0o1777],
        ["mkdir", f"{at}/run/user", 0o755],
        ["write", f"{at}/etc/hosts", hosts(options)],
        ["write", f"{at}/etc/profile.d/hpk.sh", PROFILE],
        ["write", f"{at}/etc/hostname", f"{node}\n"],
        ["write", f"{at}/etc/resolv.conf", f"nameserver {NETWORK}.2\n"],
    ]
    if options.cgroup and node != HEAD:
        steps += [
            ["mkdir", str(MEMORY / f"{PREFIX}{node}"), 0o755],
            ["mount", "tmpfs", f"{at}/sys/fs/cgroup", "mode=0755"],
            ["cgroup", str(MEMORY / f"{PREFIX}{node}"), f"{at}/sys/fs/cgroup/memory"],
        ]
    if node == HEAD:
        steps.append(["bind", str(state / "registry"), f"{at}/var/lib/registry"])
    inner = enter_command(
        folder / "spec.json", steps, new, ["/usr/bin/tini", "--", "/usr/bin/sleep", "infinity"],
        CLEAN_ENV, hostname=node,
    )  # fmt: skip
    command = [
        "nsenter", f"--net=/run/netns/{PREFIX}{node}",
        "unshare", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child", *inner,
    ]  # fmt: skip
    with (log / "init.log").open("ab") as out:
        outer = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    pid = 0

    def is_init() -> bool:
        nonlocal pid
        if outer.poll() is not None:
            raise SandboxError(f"node {node} did not start; see {log / 'init.log'}")
        words = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        pid = int(words[0]) if words else 0
        try:
            return pid > 0 and Path(f"/proc/{pid}/comm").read_text() == "tini\n"
        except (FileNotFoundError, ProcessLookupError):
            return False

    wait_for(f"node {node}", is_init, 20, 0.005)
    (folder / "pid").write_text(f"{pid} {start_time(pid)}\n")


def device_steps(dev: str, gpus: int) -> list[Sequence[str | int]]:
    """A /dev of the node's own, so that the host's stays as it is; ttys are the host's.

    A fake GPU is a second /dev/null.
    """
    nodes = [
        ("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9),
        ("tty", 5, 0), ("ptmx", 5, 2), ("fuse", 10, 229), ("net/tun", 10, 200),
        *((f"nvidia{i}", 1, 3) for i in range(gpus)),
    ]  # fmt: skip
    links = [("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr")]
    steps: list[Sequence[str | int]] = [
        ["mount", "tmpfs", dev, "mode=0755"],
        ["mkdir", f"{dev}/net", 0o755],
        ["bind", "/dev/pts", f"{dev}/pts"],
        ["mount", "tmpfs", f"{dev}/shm", "mode=1777"],
        ["mount", "mqueue", f"{dev}/mqueue", ""],
    ]
    steps += [["node", f"{dev}/{name}", 0o666, major, minor] for name, major, minor in nodes]
    steps += [["link", target, f"{dev}/{name}"] for target, name in links]
    return steps


def inside(
    node: str, argv: Sequence[str], user: str | None = None, *, killed_with_caller: bool = False
) -> list[str]:
    """The command that runs argv in a node, as root or as a user from their home.

    The environment is the caller's to give (see `environment`). With killed_with_caller, the
    command gets SIGTERM when the process that started it dies.
    """
    pid = init_pid(node)
    if pid is None:
        raise SandboxError(f"node {node} does not run: `bootstrap/sandbox up` starts the cluster")
    words = ["/usr/bin/nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid",
             "--cgroup"]  # fmt: skip
    who = ["--pdeathsig=TERM"] if killed_with_caller else []
    if user:
        who += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
    words += ["/usr/bin/setpriv", *who, "--"] if who else []
    if user:  # cd needs the user's rights
        words += ["/bin/sh", "-c", 'cd && exec "$@"', "sh"]
    return [*words, *argv]


def environment(user: str) -> dict[str, str]:
    """What a login shell of this user starts with."""
    home = "/root" if user == "root" else f"/home/{user}"
    env = {
        **CLEAN_ENV, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash",
        "KUBECONFIG": f"{home}/.hpk/kubeconfig", "HPK_COMPONENTS": "/opt/hpk/components",
    }  # fmt: skip
    if "TERM" in os.environ:
        env["TERM"] = os.environ["TERM"]
    return env


def kill(names: Sequence[str]) -> None:
    """Ends every process in these network namespaces, then the namespaces and the veths.

    A node's processes all descend from its PID 1, which sits in its network namespace: when
    that dies the kernel kills the rest, whichever namespaces they made.
    """
    for name in names:
        ended: set[int] = set()

        def gone(name: str = name, ended: set[int] = ended) -> bool:
            pids = processes(name)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended.update(pids)
            # A PID 1 leaves its network namespace before its last children are dead.
            return not pids and all(start_time(pid) is None for pid in ended)

        wait_for(f"the end of the processes in network namespace {name}", gone, 20, 0.01)
        run(["ip", "link", "del", name], check=False)  # gone with its peer, or never made
        run(["ip", "netns", "del", name])
        remove_cgroups(MEMORY / name)


def remove_cgroups(top: Path) -> None:
    """A tree of cgroups that no process is in; without --cgroup there is none."""
    for folder, _, _ in os.walk(top, topdown=False):
        Path(folder).rmdir()


def delete_network() -> None:
    kill(namespaces())
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        run(["ip", "link", "del", BRIDGE])
