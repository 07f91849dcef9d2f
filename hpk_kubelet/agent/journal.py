"""The append-only record of everything the agent did, in the pod's directory."""

import errno
import json
import os
import sys
from typing import Any, Dict, List, Mapping, Optional

Line = Dict[str, Any]


class AlreadyStarted(Exception):
    """Another agent has run (or runs) this pod."""


class Journal:
    """Lines `{"seq", "state"?, "event"?}`, whole and fsynced before anybody else hears of them."""

    def __init__(self, path: str) -> None:
        """Creates the file; AlreadyStarted if it exists."""
        try:
            self._fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except FileExistsError:
            raise AlreadyStarted(path) from None
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._seq = 0
        self._unwritten = b""
        self.events: List[Dict[str, Any]] = []

    def write(self, state: Optional[Dict[str, Any]], events: List[Dict[str, Any]]) -> None:
        """Events get their `seq` here. A full disk is waited out: what could not be written goes
        before the next lines, and the pod runs on."""
        lines = []
        for event in events:
            event["seq"] = self._seq
            lines.append({"seq": self._seq, "event": event})
            self._seq += 1
        self.events += events
        if state is not None:
            lines.append({"seq": self._seq, "state": state})
            self._seq += 1
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        self._unwritten += text.encode()
        self.flush()

    def flush(self) -> bool:
        """False while something could not be written."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
            os.fsync(self._fd)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EINTR):
                raise
            note("the journal can't be written: %s" % e.strerror)
            return False
        return True


def own_job(environ: Mapping[str, str]) -> str:
    """This job as the kubelet knows it: `ARRAY_TASK` for a task of an array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return "%s_%s" % (array, task) if array and task else environ.get("SLURM_JOB_ID", "0")


def note(sentence: str) -> None:
    """A line for slurm.out."""
    try:
        sys.stderr.write("hpk: %s\n" % sentence)
        sys.stderr.flush()
    except OSError:
        pass  # there is nowhere left to say it
