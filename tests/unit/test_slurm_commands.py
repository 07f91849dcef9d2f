"""What the backend makes of Slurm's words, from stand-ins that print what Slurm 24.11.5 did.

That the words are the right ones is for the tests on a real Slurm to say.
"""

from pathlib import Path

import pytest

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import commands, parse
from hpk_kubelet.slurm.backend import Cancel, Job, Submission, SubmitError, UnreachableError
from hpk_kubelet.slurm.commands import CommandBackend, environment
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.spec.resources import JobResources

GONE = "Unable to contact slurm controller (connect failure)"
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Makes a command of that name, a shell script's body, and the only one there is."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("T", str(tmp_path))

    def make(name, body):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return make


def submission(name="ns/p"):
    return Submission(
        JobRequest(name, "hpk:c:u:ns/p", "main", JobResources(1, 300), Path("/p"), Path("/a")),
        Path("/p/script.sbatch"),
    )


async def submitted(*names):
    answers = await CommandBackend().submit([submission(name) for name in names or ("ns/p",)])
    return [
        (type(a).__name__, str(a), getattr(a, "transient", None)) if isinstance(a, HPKError) else a
        for a in answers
    ]


def refuses(*lines):
    return "\n".join(f'echo "sbatch: error: {line}" >&2' for line in lines) + "\nexit 1"


async def test_each_submission_has_its_own_answer(command, tmp_path):
    command("sbatch", 'case "$*" in *=b*) exec "$T"/bin/no;; *=c*) echo 9\\;two;; *) echo 8;; esac')
    command("no", refuses("Batch job submission failed: Invalid qos specification"))
    assert await submitted("a", "b", "c") == [
        "8",
        ("SubmitError", "Invalid qos specification", False),
        "9",
    ]


async def test_what_a_sites_plugin_prints_is_no_job_id(command):
    command("sbatch", "echo You have used 90 % of your hours; echo 12")
    assert await submitted() == ["12"]
    command("sbatch", "echo Thanks")
    assert await submitted() == [("UnreachableError", "sbatch answered 'Thanks'", None)]


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (
            ["Batch job submission failed: Socket timed out on send/recv operation"],
            ("UnreachableError", "Socket timed out on send/recv operation", None),
        ),
        ([f"Batch job submission failed: {GONE}"], ("UnreachableError", GONE, None)),
        (
            ["AssocMaxSubmitJobLimit", f"Batch job submission failed: {POLICY}"],
            ("SubmitError", f"AssocMaxSubmitJobLimit; {POLICY}", True),
        ),
        (
            ["QOSMaxCpuPerJobLimit", f"Batch job submission failed: {POLICY}"],
            ("SubmitError", f"QOSMaxCpuPerJobLimit; {POLICY}", False),
        ),
        ([f"Batch job submission failed: {POLICY}"], ("SubmitError", POLICY, True)),
        (
            ["invalid partition specified: nope", "Batch job submission failed: Invalid partition"],
            ("SubmitError", "invalid partition specified: nope; Invalid partition", False),
        ),
        ([], ("SubmitError", "sbatch exited with code 1", False)),
    ],
)
async def test_words_of_refusal(command, lines, want):
    command("sbatch", refuses(*lines))
    assert await submitted() == [want]


async def test_nobody_waits_for_a_full_queue(command):
    words = "Slurm temporarily unable to accept job, sleeping and retrying"
    command("sbatch", f'echo "sbatch: error: {words}" >&2; exec sleep 60')
    assert await submitted() == [("SubmitError", words, True)]


async def test_a_command_that_hangs(command, monkeypatch):
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.2)
    command("sbatch", "exec sleep 60")
    assert await submitted() == [("UnreachableError", "sbatch gave no answer within 0.2 s", None)]
    command("squeue", "exec sleep 60")
    with pytest.raises(UnreachableError, match="squeue gave no answer"):
        await CommandBackend().jobs()


async def test_no_slurm_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HPKError, match=r"^squeue is not on PATH: is this a node of"):
        await CommandBackend().jobs()


async def test_jobs(command):
    row = parse.SEPARATOR.join(
        ["8", "RUNNING", "0:0", "None", "n1", "main", "1", "2", "N/A", "cpu=1", "hpk:c:u:ns/p"]
    )
    command("squeue", f"printf '%s\\n' '{row}'")
    assert await CommandBackend().jobs() == [
        Job("8", "RUNNING", "None", 0, 0, "n1", "main", 1, 2, 0, "hpk:c:u:ns/p", "cpu=1")
    ]
    command("squeue", "echo whatever >&2; exit 1")
    with pytest.raises(UnreachableError, match=r"^squeue: whatever"):
        await CommandBackend().jobs()


async def test_without_accounting_nobody_asks_twice(command, tmp_path):
    command("sacct", 'echo >> "$T"/asked; echo Slurm accounting storage is disabled >&2; exit 1')
    backend = CommandBackend()
    assert [await backend.ended(["1"]), await backend.ended(["1"])] == [[], []]
    assert (tmp_path / "asked").read_text() == "\n"
    assert await backend.ended([]) == []


async def test_an_accounting_that_is_away(command):
    command("sacct", "echo Problem talking to the database: Connection refused >&2; exit 1")
    with pytest.raises(UnreachableError, match="Problem talking to the database"):
        await CommandBackend().ended(["1"])


async def test_cancelling(command, tmp_path):
    command(
        "scancel",
        'echo "$*" >> "$T"/asked\n'
        'case "$*" in *TERM*)\n'
        'echo "scancel: error: Kill job error on job id 1: Invalid job id specified" >&2\n'
        'echo "scancel: error: Kill job error on job id 3: Access/permission denied" >&2\n'
        "exit 228;; esac",
    )
    term = [Cancel(job, "TERM", True) for job in ("1", "2", "3")]
    answers = await CommandBackend().cancel([term[0], Cancel("4"), *term[1:], Cancel("5")])
    assert [type(a) for a in answers] == [type(None)] * 3 + [SubmitError, type(None)]
    assert str(answers[3]) == "Access/permission denied"
    assert (tmp_path / "asked").read_text() == "--signal=TERM --batch 1 2 3\n4 5\n"


async def test_cancelling_while_nobody_is_there(command):
    command("scancel", f'echo "scancel: error: Kill job error on job id 1: {GONE}" >&2; exit 1')
    answers = await CommandBackend().cancel([Cancel("1"), Cancel("2")])
    assert [type(a) for a in answers] == [UnreachableError, UnreachableError]


def test_the_control_jobs_slurm_does_not_reach_the_pods():
    own = {
        "SLURM_JOB_ID": "1", "SBATCH_PARTITION": "x", "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/c",
        "SLURM_TIME_FORMAT": "relative", "PATH": "/bin", "LC_ALL": "de_DE", "SLURMD_NODENAME": "n",
    }  # fmt: skip
    assert environment(own) == {
        "SLURM_CONF": "/c",
        "PATH": "/bin",
        "LC_ALL": "C.UTF-8",
        "SLURM_TIME_FORMAT": "%s",
    }
