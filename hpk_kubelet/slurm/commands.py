"""The backend that runs Slurm's commands: sbatch, squeue, scontrol, sacct, scancel.

Works from Slurm 21.08 on; output is taken in formats without JSON. Each command is one process
and each question is asked once for all jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import parse
from hpk_kubelet.slurm.backend import (
    Cancel,
    Job,
    Label,
    Limits,
    Partition,
    Submission,
    SubmitError,
    UnreachableError,
)
from hpk_kubelet.slurm.script import sbatch_arguments

TIMEOUT_S = 60.0
"""Longer than MessageTimeout of any sane site: Slurm's commands give up by themselves before."""
_PARALLEL_SUBMISSIONS = 4
_IDS_PER_COMMAND = 500
# Slurm's own words (slurm/slurm_errno.c) for: nobody was there to say yes or no.
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|timed out|reset)|"
    r"Transport endpoint|controller in standby|Zero Bytes were transmitted|No route to host|"
    r"[Cc]ommunication connection failure|Unable to establish|Unspecified error|"
    r"Protocol authentication error|Message (send|receive) failure|DNS SRV lookup failed"
)
# … and for: no, but not for ever.
_TRANSIENT = re.compile(
    r"temporarily unable to accept job|job queue full|try again|Resource temporarily unavailable|"
    r"I/O error writing script|SubmitJob|^Job violates accounting/QOS policy"
)
# A limit's name comes before "Job violates…", where Slurm tells it: those of submitted jobs pass.
# sbatch waits up to two minutes for room in the queue; the kubelet has its own back-off, and a pod
# that waits should say why.
_SLEEPS = re.compile(rb"sleeping and retrying")
_OVER = re.compile(r"Invalid job id|already complet", re.I)


class CommandError(HPKError):
    """A command ended with an error; the message is what it printed."""


def environment(own: dict[str, str]) -> dict[str, str]:
    """The kubelet's environment for a command of Slurm's, less what the control job's own Slurm put
    there: sbatch and squeue would obey it."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_")
    kept = {
        name: value
        for name, value in own.items()
        if not name.startswith(prefixes) or name in ("SLURM_CONF", "SLURM_CONF_SERVER")
    }
    return kept | {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}


async def run(*argv: str, stdin: bytes = b"", stderr: bool = False) -> str:
    """The command's output, or with `stderr` what it said beside; CommandError or UnreachableError
    with what it printed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(dict(os.environ)),
        )
    except FileNotFoundError:
        raise HPKError(f"{argv[0]} is not on PATH: is this a node of a Slurm cluster?") from None
    except OSError as e:
        raise HPKError(f"{argv[0]} can't be run: {e.strerror}") from None
    if process.stdin is not None:
        process.stdin.write(stdin)
        process.stdin.close()
    output = asyncio.ensure_future(_output(process))
    try:
        answered, _ = await asyncio.wait([output], timeout=TIMEOUT_S)
    except asyncio.CancelledError:
        # Slurm may have taken a job already; the pod's comment finds it.
        process.kill()
        raise
    if not answered:
        process.kill()
    out, err = await output
    if process.returncode == 0:
        return (err if stderr else out).decode(errors="replace")
    words = parse.error_words(err.decode(errors="replace") or out.decode(errors="replace"))
    if not answered:
        raise UnreachableError(words or f"{argv[0]} gave no answer within {TIMEOUT_S:g} s")
    if _UNREACHABLE.search(words):
        raise UnreachableError(words)
    raise CommandError(words or f"{argv[0]} exited with code {process.returncode}")


async def _output(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """What the process writes until it ends; it is ended when it goes to sleep."""
    assert process.stdout is not None
    assert process.stderr is not None
    out = asyncio.ensure_future(process.stdout.read())
    err = bytearray()
    while chunk := await process.stderr.read(65536):
        err += chunk
        if _SLEEPS.search(err) and process.returncode is None:
            process.kill()
    await process.wait()
    return await out, bytes(err)


async def ask(*argv: str) -> str:
    """A question to which there is an answer whenever slurmctld is well: any error is weather."""
    try:
        return await run(*argv)
    except CommandError as e:
        raise UnreachableError(f"{argv[0]}: {e}") from None


class CommandBackend:
    """Implements `backend.Backend`."""

    def __init__(self) -> None:
        self._submitting = asyncio.Semaphore(_PARALLEL_SUBMISSIONS)
        self._accounting = True

    async def start(self) -> None:
        """Of what has to run beside; the commands need nothing."""

    async def close(self) -> None:
        pass

    def way(self) -> str:
        """Through what jobs are submitted and cancelled at the moment, for people to read."""
        return "sbatch and scancel"

    async def submit(
        self, submissions: Sequence[Submission]
    ) -> list[str | SubmitError | UnreachableError]:
        return await asyncio.gather(*map(self._submit, submissions))

    async def _submit(self, submission: Submission) -> str | SubmitError | UnreachableError:
        arguments = sbatch_arguments(submission.request)
        async with self._submitting:
            try:
                out = await run("sbatch", *arguments, "--", str(submission.script))
            except UnreachableError as e:
                return e
            except CommandError as e:
                return SubmitError(str(e), transient=bool(_TRANSIENT.search(str(e))))
        # `--parsable`: JOBID or JOBID;CLUSTER, after whatever a site's job_submit plugin says.
        last = (out.strip().splitlines() or [""])[-1]
        job_id = last.partition(";")[0]
        return job_id if job_id.isdigit() else UnreachableError(f"sbatch answered {last!r}")

    async def jobs(self) -> list[Job]:
        shown = ("-O", parse.SQUEUE_FORMAT)
        return parse.jobs(await ask("squeue", "--me", "-h", "-a", "-r", "-t", "all", *shown))

    async def ended(self, ids: Sequence[str]) -> list[Job]:
        found: list[Job] = []
        for chunk in _chunks(ids) if self._accounting else ():
            try:
                out = await run(
                    "sacct", "-X", "-n", "-P", f"--delimiter={parse.SEPARATOR}",
                    "-j", ",".join(chunk), "-o", parse.SACCT_FORMAT,
                )  # fmt: skip
            except CommandError as e:
                if "accounting storage is disabled" in str(e):
                    self._accounting = False
                    break
                raise UnreachableError(f"sacct: {e}") from None
            found += parse.jobs(out)
        return found

    async def cancel(
        self, cancels: Sequence[Cancel]
    ) -> list[SubmitError | UnreachableError | None]:
        kinds: dict[tuple[str, bool], list[str]] = {}
        for cancel in cancels:
            kinds.setdefault((cancel.signal, cancel.batch_only), []).append(cancel.job_id)
        answers: dict[str, SubmitError | UnreachableError] = {}
        for (signal, batch_only), ids in kinds.items():
            answers |= await self._signal(signal, batch_only, ids)
        return [answers.get(cancel.job_id) for cancel in cancels]

    async def _signal(
        self, signal: str, batch_only: bool, ids: Sequence[str]
    ) -> dict[str, SubmitError | UnreachableError]:
        """Why not, for those jobs that were neither signalled nor over."""
        options = [f"--signal={signal}"] * bool(signal) + ["--batch"] * batch_only
        answers: dict[str, SubmitError | UnreachableError] = {}
        for chunk in _chunks(ids):
            answers |= await self._scancel(options, chunk)
        return answers

    async def _scancel(
        self, options: Sequence[str], ids: Sequence[str]
    ) -> dict[str, SubmitError | UnreachableError]:
        try:
            await run("scancel", *options, *ids)
        except UnreachableError as e:
            return dict.fromkeys(ids, e)
        except CommandError as e:
            failed = parse.failed_ids(str(e)) or dict.fromkeys(ids, str(e))
            return {
                job: SubmitError(why, transient=bool(_TRANSIENT.search(why)))
                for job, why in failed.items()
                if not _OVER.search(why)
            }
        return {}

    async def label(self, labels: Sequence[Label]) -> None:
        for start in range(0, len(labels), _IDS_PER_COMMAND):
            lines = [
                f"update JobId={label.job_id} JobName={_word(label.name)} "
                f"Comment={_word(label.comment)}\n"
                for label in labels[start : start + _IDS_PER_COMMAND]
            ]
            with contextlib.suppress(CommandError):  # a job that has ended keeps the array's name
                await run("scontrol", stdin="".join(lines).encode())

    async def limits(self) -> Limits:
        return parse.limits(await ask("scontrol", "show", "config"))

    async def partitions(self) -> list[Partition]:
        partitions, nodes = await asyncio.gather(
            ask("scontrol", "-o", "-a", "show", "partition"),
            ask("scontrol", "-o", "-a", "show", "node"),
        )
        return parse.partitions(partitions, nodes)


def _word(text: str) -> str:
    """As one of scontrol's words; the API's names hold no quotes, and nothing else may hide any."""
    return re.sub(r"[^-.\w/:]", "", text)


def _chunks(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[i : i + _IDS_PER_COMMAND] for i in range(0, len(ids), _IDS_PER_COMMAND)]
