"""Slurm's command-line options, read as sbatch and srun read them but without running them.

Names and arity from sbatch(1) and srun(1), Slurm 21.08 to 25.11. Options that are not in the tables
(a newer Slurm's, a site's SPANK plugin's) pass as `--name` or `--name=value`: Slurm decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpk_kubelet.errors import HPKError


@dataclass(frozen=True)
class Command:
    """What a command's options look like; every name is a long one."""

    name: str
    short: Mapping[str, str]  # letter → long name
    valued: frozenset[str]  # take a value, joined or as the next word
    optional: frozenset[str]  # may have a joined value
    bare: frozenset[str]  # take none
    refused: Mapping[str, str]  # what HPK can't allow, and why


_BOTH_VALUED = """
    account acctg-freq batch bb bbf begin cluster-constraint clusters comment constraint container
    container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency chdir distribution error exclude export export-file extra extra-node-info gid
    gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
    job-name licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
    network nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
    open-mode output partition power prefer priority profile qos reservation segment signal
    sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind
    tres-per-task uid wckey
"""
_BOTH_OPTIONAL = "exclusive nice no-kill oom-kill-step propagate resv-ports"
_BOTH_BARE = """
    contiguous help hold overcommit oversubscribe quiet reboot spread-job test-only usage
    use-min-nodes verbose version
"""
_BOTH_SHORT = {
    "A": "account", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "h": "help",
    "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output",
    "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec", "s": "oversubscribe",
    "t": "time", "V": "version", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_BOTH_REFUSED = {
    "export": "the environment is the pod's own",
    "export-file": "the environment is the pod's own",
    "output": "kubectl logs has the pod's output",
    "error": "kubectl logs has the pod's output",
    "open-mode": "kubectl logs has the pod's output",
    "input": "a pod's standard input comes from kubectl attach",
    "chdir": "a container starts in its workingDir",
    "container": "the pod's image says what runs",
    "container-id": "the pod's image says what runs",
    "clusters": "HPK follows the jobs of one cluster, the one it runs in",
    "uid": "the job is the user's own",
    "gid": "the job is the user's own",
    "test-only": "nothing would run",
    "help": "nothing would run",
    "usage": "nothing would run",
    "version": "nothing would run",
    "quiet": "HPK reads what Slurm says",
    "verbose": "HPK reads what Slurm says",
}

SBATCH = Command(
    "sbatch",
    short=_BOTH_SHORT | {"a": "array", "F": "nodefile", "W": "wait"},
    valued=frozenset(
        (_BOTH_VALUED + "array kill-on-invalid-dep nodefile wait-all-nodes wrap").split()
    ),
    optional=frozenset((_BOTH_OPTIONAL + " get-user-env").split()),
    bare=frozenset((_BOTH_BARE + "ignore-pbs no-requeue parsable requeue stepmgr wait").split()),
    refused=_BOTH_REFUSED
    | {
        "array": "a pod is one job",
        "comment": "HPK finds the pod's job by it",
        "job-name": "it is the pod's namespace and name",
        "get-user-env": "the environment is the pod's own",
        "ignore-pbs": "the job's script is HPK's",
        "parsable": "HPK reads what Slurm says",
        "requeue": "a pod never runs twice; its controller makes a new one",
        "signal": "HPK is told of the time limit by it",
        "wait": "HPK waits for no job",
        "wrap": "the job's script is HPK's",
    },
)

SRUN = Command(
    "srun",
    short=_BOTH_SHORT
    | {
        "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "l": "label",
        "r": "relative", "T": "threads", "u": "unbuffered", "W": "wait", "X": "disable-status",
        "Z": "no-allocate",
    },
    valued=frozenset(
        (
            _BOTH_VALUED
            + """accel-bind bcast-exclude cpu-bind epilog het-group jobid mpi prolog relative
            slurmd-debug task-epilog task-prolog threads wait"""
        ).split()
    ),
    optional=frozenset(
        (_BOTH_OPTIONAL + " bcast compress immediate kill-on-bad-exit pty send-libs x11").split()
    ),
    bare=frozenset(
        (
            _BOTH_BARE
            + """disable-status exact external external-launcher interactive label multi-prog
            no-allocate overlap preserve-env quit-on-interrupt unbuffered whole"""
        ).split()
    ),
    refused=_BOTH_REFUSED
    | {
        "jobid": "the ranks run in the pod's own job",
        "multi-prog": "every rank runs the container's command",
        "no-allocate": "the ranks run in the pod's own job",
        "pty": "the ranks have no terminal",
    },
)  # fmt: skip

_LONG = re.compile(r"--([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def read_flags(words: Sequence[str], command: Command, where: str) -> list[str]:
    """The options in `words`, each as `--long-name` or `--long-name=value`, in the same order.

    Raises HPKError, which begins with `where`, for anything that is no option of the command's, or
    one that HPK can't allow.
    """
    for word in words:
        if _CONTROL.search(word):
            raise HPKError(f"{where}: control characters are not allowed in a flag: {word!r}")
    flags: list[str] = []
    rest = list(reversed(words))

    def take(name: str, written: str) -> str:
        if not rest or rest[-1].startswith("-"):
            raise HPKError(f"{where}: {written} needs a value, as in --{name}=VALUE")
        return rest.pop()

    while rest:
        word = rest.pop()
        if long := _LONG.fullmatch(word):
            name, value = _whole(long[1], command, where), long[2]
            written = f"--{long[1]}"
            if value is not None and name in command.bare:
                raise HPKError(f"{where}: {written} takes no value")
            if value is None and name in command.valued and name not in command.refused:
                value = take(name, written)
            flags.append(_allowed(name, value, written, command, where))
        elif word[:1] == "-" and word[1:2] not in ("", "-"):
            flags += _short(word, take, command, where)
        else:
            raise HPKError(f"{where}: {word!r} is not a flag; flags look like --time=10 or -n 4")
    return flags


def _whole(name: str, command: Command, where: str) -> str:
    """The option that getopt_long(3) takes an unambiguous beginning for; others as they are."""
    known = command.valued | command.optional | command.bare
    if name in known:
        return name
    candidates = sorted(option for option in known if option.startswith(name))
    if len(candidates) > 1:
        raise HPKError(f"{where}: --{name} may mean --{' or --'.join(candidates)}")
    return candidates[0] if candidates else name


def _short(word: str, take: Callable[[str, str], str], command: Command, where: str) -> list[str]:
    """The options in a word such as `-n4`, `-n` or `-Hn4`."""
    flags = []
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = command.short.get(letter)
        if name is None:
            raise HPKError(f"{where}: {command.name} has no option -{letter} (in {word!r})")
        value = None
        if name in command.valued:
            value, letters = letters or None, ""
            if value is None and name not in command.refused:
                value = take(name, f"-{letter}")
        flags.append(_allowed(name, value, f"-{letter} (--{name})", command, where))
    return flags


def _allowed(name: str, value: str | None, written: str, command: Command, where: str) -> str:
    if name in command.refused:
        raise HPKError(f"{where}: {written} is not allowed: {command.refused[name]}")
    return f"--{name}" if value is None else f"--{name}={value}"


def value_of(flags: Sequence[str], *names: str) -> str | None:
    """The value of the last of the options `names` among flags that were read; "" for a bare one,
    None where none of them is given."""
    for flag in reversed(flags):
        name, _, value = flag.removeprefix("--").partition("=")
        if name in names:
            return value
    return None
