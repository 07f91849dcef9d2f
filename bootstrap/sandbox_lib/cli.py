"""`bootstrap/sandbox …`: the command line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from . import cluster, images, nodes, rootfs
from .base import NAME, SandboxError, lock, say
from .slurmconf import HEAD, REGISTRY, Options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="bootstrap/sandbox", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a Slurm cluster on this machine")
    default = Options()
    up.add_argument("--nodes", type=int, default=default.nodes, help="compute nodes (%(default)s)")
    up.add_argument("--cpus", type=int, default=default.cpus, help="claimed per node (%(default)s)")
    up.add_argument("--memory", type=int, default=default.memory, help="MB claimed per node")
    up.add_argument("--gpus", type=int, default=0, help="fake GPUs per node")
    up.add_argument("--partitions", default="main", metavar="NAME[=NODE[+NODE…]],…",
                    help="the first is the default; without nodes: all (%(default)s)")  # fmt: skip
    up.add_argument("--accounting", action="store_true", help="slurmdbd on MariaDB")
    up.add_argument("--cgroup", action="store_true",
                    help="memory limits are enforced, by slurmd's cgroup plugin")  # fmt: skip
    up.add_argument("--sched-delay", type=int, metavar="S",
                    help="SchedulerParameters=batch_sched_delay (Slurm's default: 3)")  # fmt: skip
    up.add_argument("--immediate", dest="sched_delay", action="store_const", const=0,
                    help="--sched-delay 0: jobs start as soon as there is room")  # fmt: skip
    up.add_argument("--slurm-conf", action="append", default=[], metavar="LINE",
                    help="a line for slurm.conf; may be repeated")  # fmt: skip
    down = commands.add_parser("down", help="stop it; homes and images stay")
    down.add_argument("--purge", action="store_true", help="remove homes and images, too")
    commands.add_parser("status", help="show what is up")
    commands.add_parser("refresh", help="install the checkout as it is now into the running nodes")
    kill = commands.add_parser("kill", help="end a node as if its power failed; `up` restarts it")
    kill.add_argument("node", metavar="NODE")
    commands.add_parser("registry", help="print the registry's name, as pods write it")
    every = commands.add_parser("images", help="build and load the example images not there yet")
    every.add_argument("--recipes", type=Path, default=images.RECIPES, help="their directory")
    image = commands.add_parser("image", help="put an image into the registry")
    image.add_argument("action", choices=["load"])
    image.add_argument("archive", type=Path, metavar="OCI-ARCHIVE")
    image.add_argument("name", metavar="NAME:TAG")
    run = commands.add_parser("exec", help="run a command in a node (a shell without one)")
    run.add_argument("--user", default="alice", choices=["root", *rootfs.USERS])
    run.add_argument("--node", default=HEAD)
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="[--] CMD…")
    return top


def up(args: argparse.Namespace) -> None:
    options = Options(
        nodes=args.nodes, cpus=args.cpus, memory=args.memory, gpus=args.gpus,
        partitions=tuple(args.partitions.split(",")), accounting=args.accounting,
        cgroup=args.cgroup, sched_delay=args.sched_delay, extra=tuple(args.slurm_conf),
    )  # fmt: skip
    cluster.up(options)


def execute(args: argparse.Namespace) -> None:
    """Becomes the command: its exit code, stdin, stdout and terminal are this process's."""
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    user = None if args.user == "root" else args.user
    words = nodes.inside(args.node, argv or ["/bin/bash", "-l"], user, killed_with_caller=True)
    os.execve(words[0], words, nodes.environment(args.user))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if os.geteuid():
            raise SandboxError(f"the sandbox needs root: sudo bootstrap/sandbox {args.command} …")
        if not re.fullmatch("[a-z]{1,7}", NAME):
            raise SandboxError(f"HPK_SANDBOX is {NAME!r}: it must be one to seven small letters")
        if args.command == "exec":
            execute(args)
        elif args.command == "status":
            print(cluster.status())
        elif args.command == "registry":
            print(REGISTRY)
        else:
            with lock(Path(f"/run/{NAME}-sandbox.lock")):
                if args.command == "up":
                    up(args)
                elif args.command == "down":
                    cluster.down(args.purge)
                elif args.command == "kill":
                    cluster.kill(args.node)
                elif args.command == "refresh":
                    cluster.status()
                    cluster.refresh()
                elif args.command == "images":
                    cluster.status()
                    images.load_all(args.recipes.absolute())
                elif args.command == "image":
                    cluster.status()
                    print(images.load(args.archive, args.name))
    except (SandboxError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0
