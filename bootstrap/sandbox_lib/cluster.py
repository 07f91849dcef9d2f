"""up, down and status of the whole cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from . import nodes, project, rootfs, services, slurmconf
from .base import CHECKOUT, SandboxError, remove, run, run_dir, say
from .slurmconf import HEAD, Options

SYSCTLS = {
    # where a distribution keeps ordinary users from making user namespaces
    "kernel/apparmor_restrict_unprivileged_userns": "0",
    "kernel/unprivileged_userns_clone": "1",
}


HPK_CONFIG = f"""\
# The sandbox's registries speak plain http.
images:
  insecureRegistries: [{slurmconf.REGISTRY}, {slurmconf.PRIVATE_REGISTRY}]
"""
"""~/.hpk/config.yaml of a new home."""


def current() -> Options | None:
    """The options of the cluster that `up` last completed, or None."""
    try:
        data: dict[str, Any] = json.loads((run_dir() / "cluster.json").read_text())
    except FileNotFoundError:
        return None
    lists = {k: tuple(v) for k, v in data["options"].items() if isinstance(v, list)}
    options: dict[str, Any] = data["options"] | lists
    return Options(**options)


def mounted() -> list[str]:
    """The directories of the host that nodes show, as they are now and not as they are called."""
    paths = (CHECKOUT, project.components())
    return [f"{path} {path.stat().st_ino}" for path in paths]


def mounts_this() -> bool:
    """False if the cluster that is up was started from another checkout."""
    data: dict[str, Any] = json.loads((run_dir() / "cluster.json").read_text())
    return bool(data["mounted"] == mounted())


def up(options: Options) -> None:
    """Starts the cluster; of one that is already up, what is missing.

    Without options of its own it takes a running cluster as it is.
    """
    slurmconf.check(options)
    project.check()
    if options.cgroup and not nodes.MEMORY.is_dir():
        raise SandboxError(f"--cgroup: there is no {nodes.MEMORY} (cgroup version 1) here")
    before = current()
    if before and nodes.init_pid(HEAD):
        if options not in (before, Options()):
            raise SandboxError("a cluster with other options is up: `bootstrap/sandbox down` first")
        if mounts_this():
            refresh()
            complete(before)
            return
        say("the cluster that is up was started from another checkout: starting it anew")
        options = before
    start = time.monotonic()
    rootfs.need(("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux"))
    root = rootfs.ensure()
    clear()
    prepare(options, root)
    refresh()
    allow_user_namespaces()
    say(f"starting {HEAD} and {options.nodes} nodes")
    try:
        nodes.create_network(options)
        for node in [HEAD, *options.names()]:
            nodes.start(options, node, root, CHECKOUT, project.components())
        services.head(options)
        services.slurmd(options.names())
    except BaseException:
        say("not started: taking down what was; logs stay in " + str(run_dir() / "log"))
        clear()
        raise
    data = {"options": dataclasses.asdict(options), "mounted": mounted()}
    (run_dir() / "cluster.json").write_text(json.dumps(data))
    say(f"up in {time.monotonic() - start:.1f} s: {summary(options)}")


def complete(options: Options) -> None:
    """Starts slurmctld and nodes that died."""
    services.slurmctld()
    dead = [node for node in options.names() if not nodes.init_pid(node)]
    for node in dead:
        kill(node)
        nodes.add_to_network(options, node)
        nodes.start(options, node, rootfs.ensure(), CHECKOUT, project.components())
    services.slurmd(dead)
    say(f"started {', '.join(dead)}" if dead else "the cluster is already up")


def kill(node: str) -> None:
    """Ends a node as if its power failed; `up` starts it again."""
    options = current()
    if options is None or node not in options.names():
        raise SandboxError(f"no cluster with a compute node {node!r} is up")
    name = nodes.PREFIX + node
    nodes.kill([name] if name in nodes.namespaces() else [])


def summary(options: Options) -> str:
    parts = ", ".join(options.partition_nodes())
    gpus = f", {options.gpus} GPUs" if options.gpus else ""
    return (f"{options.nodes} nodes of {options.cpus} CPUs, {options.memory} MB{gpus}; "
            f"partitions: {parts}; accounting: {'on' if options.accounting else 'off'}; "
            f"registry {slurmconf.REGISTRY}")  # fmt: skip


def prepare(options: Options, root: Path) -> None:
    """Writes configuration and homes into the run directory."""
    state = run_dir()
    ids = system_ids(root)
    for name in ("etc", "home", "opt", "registry", "log", "nodes"):
        (state / name).mkdir(parents=True, exist_ok=True)
    remove(state / "log")
    etc = state / "etc"
    remove(etc)
    etc.mkdir()
    counter = state / "generation"
    generation = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(f"{generation}\n")
    files = {
        "slurm.conf": slurmconf.slurm_conf(options, first_job_id=1 + 10000 * (generation - 1)),
        "gres.conf": slurmconf.gres_conf(options),
        "cgroup.conf": slurmconf.cgroup_conf(options),
        "htpasswd": slurmconf.HTPASSWD,
        "registry-5000.yml": slurmconf.registry_conf(5000),
        "registry-5001.yml": slurmconf.registry_conf(5001),
    }
    for name, text in files.items():
        (etc / name).write_text(text)
    dbd = etc / "slurmdbd.conf"
    dbd.touch(0o600)
    dbd.write_text(slurmconf.SLURMDBD_CONF)
    os.chown(dbd, *ids["slurm"])
    for user in rootfs.USERS:
        home = state / "home" / user
        if not home.exists():
            new = state / "home.new"
            remove(new)
            shutil.copytree(root / "etc" / "skel", new)
            new.chmod(0o700)
            (new / ".hpk").mkdir(0o700)
            (new / ".hpk" / "config.yaml").touch(0o600)
            (new / ".hpk" / "config.yaml").write_text(HPK_CONFIG)
            run(["chown", "-R", "{}:{}".format(*ids[user]), new])
            new.rename(home)


def system_ids(root: Path) -> dict[str, tuple[int, int]]:
    """User name → (uid, gid) in the root file system."""
    lines = (root / "etc" / "passwd").read_text().splitlines()
    rows = [line.split(":") for line in lines]
    return {row[0]: (int(row[2]), int(row[3])) for row in rows}


def refresh() -> None:
    """Installs the checkout as it is now, and links kubectl."""
    start = time.monotonic()
    (run_dir() / "opt").mkdir(parents=True, exist_ok=True)
    project.link_kubectl()
    if project.install():
        say(f"installed HPK from {CHECKOUT} in {time.monotonic() - start:.1f} s")


def clear() -> None:
    """Removes every process, namespace and interface of a cluster, however it ended."""
    remove(run_dir() / "cluster.json")
    nodes.delete_network()
    remove(run_dir() / "nodes")
    restore_sysctls()


def down(purge: bool) -> None:
    """Stops the cluster; homes, the registry and logs stay unless purged."""
    was_there = bool(nodes.namespaces())
    clear()
    if purge:
        remove(run_dir())
    say("down" if was_there else "nothing was up")


def allow_user_namespaces() -> None:
    """Lets the nodes' users make user namespaces, as on a cluster with apptainer; until `down`."""
    changed = {}
    for name, value in SYSCTLS.items():
        path = Path("/proc/sys") / name
        if path.exists() and (old := path.read_text().strip()) != value:
            changed[name] = old
            path.write_text(value)
            say(f"set sysctl {name.replace('/', '.')} to {value} (was {old}) until `down`")
    if changed:
        (run_dir() / "sysctls.json").write_text(json.dumps(changed))


def restore_sysctls() -> None:
    saved = run_dir() / "sysctls.json"
    if saved.exists():
        for name, value in json.loads(saved.read_text()).items():
            (Path("/proc/sys") / name).write_text(value)
        saved.unlink()


def status() -> str:
    """A few lines for a person; raises SandboxError if nothing is up."""
    options = current()
    if options is None or not nodes.init_pid(HEAD):
        left = nodes.namespaces()
        hint = f"; {', '.join(left)} are left of one: `bootstrap/sandbox down`" if left else ""
        raise SandboxError(f"no cluster is up{hint}")
    info = services.call(HEAD, "sinfo", "-o", "%P %D %T %c %m %G").stdout
    dead = [node for node in options.names() if not nodes.init_pid(node)]
    words = f"dead: {', '.join(dead)} (`bootstrap/sandbox up` starts them)\n" if dead else ""
    return f"{summary(options)}\n{words}{info}"
