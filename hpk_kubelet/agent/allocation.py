"""The end of a job that is an allocation.

Slurm ends a batch job with its script, an allocation when somebody says so: salloc does, with its
command's exit code, by slurm_complete_job() of Slurm's library. A process that stays outside of the
pod's namespaces says it here, once the agent, its child, is gone. Where that can't be said, the job
is cancelled: then the accounting has another end than the pod, whose truth is its journal.
"""

import os
import signal
import sys
import time

from .journal import note
from .namespaces import find_program

# What tells an agent to end its pod. In an allocation the first reaches every process of the step;
# only agents listen to the second.
END_SIGNALS = (signal.SIGTERM, signal.SIGURG)
PAUSES = (1.0, 30.0)  # seconds between two tries while slurmctld is away: the first, the longest
OVER = (2017, 2021)  # ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE (slurm_errno.h)


def go_on_attended(scancel: str) -> None:
    """Forks. The child returns and is the agent; its parent waits for it and ends the job."""
    agent = os.fork()
    if agent == 0:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(agent, 0)
    end(scancel, int(os.environ["SLURM_JOB_ID"]), status)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def end(scancel: str, job_id: int, status: int) -> None:
    """Ends the job with a wait status, as soon as slurmctld can be told."""
    pause, longest = PAUSES
    while True:
        # Slurm's library ends the process where its configuration can't be read.
        child = os.fork()
        if child == 0:
            try:
                os._exit(_complete(scancel, job_id, status))
            finally:
                os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 2:
            note("Slurm's library can't end this job: it is cancelled")
            code = os.spawnv(os.P_WAIT, _scancel(scancel), ["scancel", str(job_id)])
        if code == 0:
            return
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _complete(scancel: str, job_id: int, status: int) -> int:
    """0: done; 1: slurmctld is away; 2: it can't be done."""
    import ctypes

    path = library(scancel)
    if not path:
        return 2
    slurm = ctypes.CDLL(path, ctypes.RTLD_GLOBAL, use_errno=True)  # its plugins look into it
    slurm.slurm_init(None)
    if slurm.slurm_complete_job(ctypes.c_uint32(job_id), ctypes.c_uint32(status)) == 0:
        return 0
    return 0 if ctypes.get_errno() in OVER else 1


def library(scancel: str) -> str:
    """The library of Slurm's with which its own commands speak; "" where there is none."""
    import ctypes
    import re
    import subprocess

    trace = {"LD_TRACE_LOADED_OBJECTS": "1"}  # what ldd(1) does
    program = _scancel(scancel)
    try:
        done = subprocess.run(
            [program], env=trace, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
        )
        found = re.search(rb"libslurm\S* => (/\S+)", done.stdout)
        path = os.fsdecode(found[1]) if found else ""
        return path if path and hasattr(ctypes.CDLL(path), "slurm_complete_job") else ""
    except OSError as e:
        sys.stderr.write("hpk: %s: %s\n" % (program, e))
        return ""


def _scancel(path: str) -> str:
    """As the kubelet's node has it, or as this one does."""
    return path if os.access(path, os.X_OK) else find_program("scancel") or path
