"""The annotations with which a pod speaks to Slurm, checked before anything is submitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hpk_kubelet.errors import HPKError

PREFIXES = ("slurm-job.hpk.io/", "slurm.hpk.io/")
"""The first is the documented one, the second its alias."""

# What HPK itself must say, or what would make the job something else than this pod. By long name;
# a short option stands beside the long one it means (sbatch(1), OPTIONS).
_REFUSED = {
    "array": "a pod is one job",
    "wrap": "the job's script is HPK's",
    "export": "the job's environment is HPK's",
    "export-file": "the job's environment is HPK's",
    "get-user-env": "the job's environment is HPK's",
    "propagate": "the job's limits are HPK's",
    "requeue": "a pod never runs twice",
    "no-requeue": "HPK says so already",
    "comment": "HPK finds the pod's job by it",
    "job-name": "it is the pod's namespace and name",
    "output": "`kubectl logs` has the pod's output",
    "error": "`kubectl logs` has the pod's output",
    "input": "the job's script has no input",
    "open-mode": "`kubectl logs` has the pod's output",
    "signal": "HPK is told of the time limit by it",
    "chdir": "the pod's workingDir says where a container starts",
    "parsable": "HPK reads sbatch's answer",
    "quiet": "HPK reads sbatch's answer",
    "verbose": "HPK reads sbatch's answer",
    "wait": "HPK waits for no job",
    "test-only": "nothing would run",
    "help": "nothing would run",
    "usage": "nothing would run",
    "version": "nothing would run",
    "uid": "the job is the user's",
    "gid": "the job is the user's",
    "ignore-pbs": "the job's script is HPK's",
}
_REFUSED_FOR_RANKS = (
    "output", "error", "input", "chdir", "export", "help", "usage", "version", "uid", "gid",
    "quiet", "job-name", "comment", "propagate",
)  # fmt: skip
_RANKS_ALONE = {
    "jobid": "the ranks run in the pod's own job",
    "pty": "the ranks have no terminal",
}
_SHORT = {
    "a": "array", "J": "job-name", "o": "output", "e": "error", "i": "input", "D": "chdir",
    "Q": "quiet", "v": "verbose", "W": "wait", "h": "help", "V": "version",
}  # fmt: skip
# Long options take a value as `--name value` only where they have no `--name=value`; to keep
# words that are no flags out, the value must be joined for long options, and may follow for short.
_LONG = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
_SHORT_FLAG = re.compile(r"-([A-Za-z])(.*)", re.DOTALL)
_SHORT_WITHOUT_VALUE = frozenset("HIOskQvWhV")


def _words(pod: Mapping[str, Any], name: str) -> tuple[str, list[str]]:
    """The annotation's full key and its words."""
    annotations = pod["metadata"].get("annotations") or {}
    for prefix in PREFIXES:
        key = prefix + name
        if key in annotations:
            text = annotations[key]
            if any((ord(c) < 32 and c not in "\t\n") or ord(c) == 127 for c in text):
                raise HPKError(f"annotation {key}: control characters are not allowed in flags")
            try:
                return key, shlex.split(text)
            except ValueError as e:
                raise HPKError(f"annotation {key}: {str(e).lower()} in {text!r}") from None
    return PREFIXES[0] + name, []


def _check(key: str, words: Sequence[str], refused: Mapping[str, str]) -> list[str]:
    value_may_follow = False
    for word in words:
        if long := _LONG.fullmatch(word):
            name = long[1]
            # getopt_long takes any unambiguous beginning of a long option for the whole.
            for whole, why in refused.items():
                if whole == name or (len(name) > 1 and whole.startswith(name)):
                    raise HPKError(f"annotation {key}: {word.split('=')[0]} is not allowed: {why}")
            value_may_follow = long[2] is None
        elif short := _SHORT_FLAG.fullmatch(word):
            name = _SHORT.get(short[1], "")
            if name in refused:
                raise HPKError(
                    f"annotation {key}: -{short[1]} (--{name}) is not allowed: {refused[name]}"
                )
            value_may_follow = not short[2] and short[1] not in _SHORT_WITHOUT_VALUE
        elif value_may_follow:
            value_may_follow = False
        else:
            raise HPKError(
                f"annotation {key}: {word!r} is not a flag: flags begin with - or --, "
                "such as --time=10"
            )
    return list(words)


def slurm_flags(pod: Mapping[str, Any]) -> list[str]:
    """The words of `…/flags` for sbatch, in the user's order; HPKError for what HPK can't allow."""
    return _check(*_words(pod, "flags"), _REFUSED)


def mpi_words(pod: Mapping[str, Any]) -> list[str] | None:
    """The words of `…/mpi-flag` for srun; None where the pod has no such annotation."""
    annotations = pod["metadata"].get("annotations") or {}
    if not any(prefix + "mpi-flag" in annotations for prefix in PREFIXES):
        return None
    refused = {name: _REFUSED[name] for name in _REFUSED_FOR_RANKS} | _RANKS_ALONE
    return _check(*_words(pod, "mpi-flag"), refused)


def given(flags: Sequence[str], *names: str) -> bool:
    """Whether one of the options (long names, or one letter) is among the user's flags."""
    for flag in flags:
        long = _LONG.fullmatch(flag)
        short = _SHORT_FLAG.fullmatch(flag)
        if (long and long[1] in names) or (not long and short and short[1] in names):
            return True
    return False
