"""slurmrestd's side of the backend: what is asked, and what is made of its answers."""

import json
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import choice
from hpk_kubelet.slurm.backend import Cancel, Limits, Submission, SubmitError, UnreachableError
from hpk_kubelet.slurm.commands import CommandBackend
from hpk_kubelet.slurm.rest import RestBackend
from hpk_kubelet.slurm.rest_job import Submitter, job_fields
from hpk_kubelet.slurm.rest_service import NotDoneError, Service, SiteService, answer_of
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.spec.resources import JobResources

ME = Submitter("head", 0o77, 0, {"nofile": 1024, "core": None})


def request(*flags, **more):
    resources = JobResources(2, 300)
    return JobRequest(
        "ns/p", "hpk:c:u:ns/p", "main", resources, Path("/p"), Path("/a"), user_flags=flags, **more
    )


def number(value):
    return {"set": True, "infinite": value is None, "number": value or 0}


def test_the_fields_of_a_job():
    assert job_fields(request("--time=1:30:00"), ME) == {
        "name": "ns/p",
        "comment": "hpk:c:u:ns/p",
        "current_working_directory": "/p",
        "standard_output": "/p/slurm.out",
        "rlimits": {"nofile": number(1024), "core": number(None)},
        "requeue": False,
        "open_mode": ["APPEND"],
        "kill_warning_flags": ["BATCH_JOB"],
        "kill_warning_signal": "TERM",
        "kill_warning_delay": number(45),
        "partition": "main",
        "nodes": "1",
        "tasks": 1,
        "cpus_per_task": 2,
        "memory_per_node": number(300),
        "time_limit": number(90),
        "environment": [
            "SLURM_EXPORT_ENV=NIL",
            "SLURM_PRIO_PROCESS=0",
            "SLURM_SUBMIT_DIR=/p",
            "SLURM_SUBMIT_HOST=head",
            "SLURM_UMASK=0077",
            "SLURM_CPUS_PER_TASK=2",
        ],
    }


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("--mem=2G", {"memory_per_node": number(2048)}),
        ("--mem=0", None),  # all of the node's
        ("--mem=100K", None),
        ("--time=UNLIMITED", {"time_limit": number(None)}),
        ("--time=0:30", {"time_limit": number(1)}),
        ("--hold", {"hold": True}),
        ("--nice", None),  # Slurm's own default
        ("--nice=-5", None),
        ("--nice=5", {"nice": 5}),
        ("--exclusive=user", {"shared": ["user"]}),
        ("--exclusive", None),
        ("--nodes=1-3", None),
        ("--gres=gpu:1", None),
        ("--begin=now+1hour", None),
        ("--of-a-spank-plugin=1", None),
    ],
)
def test_what_users_add(flag, fields):
    found = job_fields(request(flag), ME)
    assert found is None if fields is None else found.items() >= fields.items()


def test_arrays_and_ranks():
    assert job_fields(request(tasks=7), ME)["array"] == "0-6"
    assert job_fields(request(mpi=True), ME) is None


def answer(**more):
    return json.dumps({"errors": [], "warnings": [], **more}).encode()


def errors(*numbers):
    return answer(errors=[{"error_number": n, "error": f"e{n}"} for n in numbers])


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (500, errors(2000), NotDoneError),  # invalid partition
        (500, errors(2066), NotDoneError),
        (500, errors(9202), NotDoneError),  # a field it can't read
        (504, errors(5004), UnreachableError),  # socket timed out; slurmctld had taken the job
        (502, errors(1800), UnreachableError),
        (500, errors(2000, 1800), UnreachableError),
        (500, errors(1), UnreachableError),
        (500, answer(errors=[{"description": "?"}]), UnreachableError),
        (401, b"Authentication failure", NotDoneError),
        (404, b"Unable find requested URL.", NotDoneError),
        (502, b"<html>a proxy's", UnreachableError),
    ],
)
def test_what_an_answer_means(status, text, error):
    with pytest.raises(error):
        answer_of(status, text)


def test_a_yes():
    assert answer_of(200, answer(job_id=7))["job_id"] == 7


class Scripted(Service):
    """Answers from a list; an exception is raised."""

    version = "v0.0.42"

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)
        self.asked = []

    async def call(self, method, path, body):
        self.asked.append((method, path, json.loads(body)))
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def sbatch(monkeypatch):
    """Stands for the commands, which answer and note what they are asked for."""
    asked = []

    async def submit(self, submission):
        asked.append(submission.request.name)
        return SubmitError("Slurm's own words", transient=False)

    async def scancel(self, options, ids):
        asked.append((*options, *ids))
        return {}

    monkeypatch.setattr(CommandBackend, "_submit", submit)
    monkeypatch.setattr(CommandBackend, "_scancel", scancel)
    return asked


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script"
    path.write_text("#!/bin/sh\n")
    return path


async def test_what_is_refused_sbatch_is_asked_for(sbatch, script):
    service = Scripted({"job_id": 7}, NotDoneError("no"), UnreachableError("away"), {})
    backend = RestBackend(service)
    answers = [(await backend.submit([Submission(request(), script)]))[0] for _ in range(4)]
    assert [type(a) for a in answers] == [str, SubmitError, UnreachableError, UnreachableError]
    assert (answers[0], str(answers[1]), str(answers[2])) == ("7", "Slurm's own words", "away")
    assert sbatch == ["ns/p"]
    method, path, body = service.asked[0]
    assert (method, path) == ("POST", "job/submit")
    assert body["job"]["script"] == "#!/bin/sh\n" and body["job"]["argv"] == [str(script)]


async def test_what_json_can_not_carry_and_what_it_has_no_field_for(sbatch, script):
    backend = RestBackend(Scripted())
    script.write_bytes(b"#!/bin/sh\n\xff")
    await backend.submit([Submission(request(), script)])
    await backend.submit([Submission(request("--begin=now"), script)])
    assert len(sbatch) == 2


async def test_a_service_that_is_not_up_is_not_asked(sbatch, script):
    service = Scripted()
    service.version, service.trouble = "", "it died"
    backend = RestBackend(service)
    await backend.submit([Submission(request(), script)])
    assert await backend.cancel([Cancel("1")]) == [None]
    assert sbatch == ["ns/p", ("1",)]
    assert backend.way() == "sbatch and scancel (it died)"


async def test_cancelling(sbatch):
    def status(job, code):
        return {"step_id": job, "error": {"code": code, "string": "x"}}

    service = Scripted(
        {"status": [status("2", 2017), status("3_1", 2021), status("4", 2002)]},
        {"status": []},
        {"status": [status("99", 2002)]},  # of what nobody asked for
        UnreachableError("away"),
    )
    backend = RestBackend(service)
    four = [Cancel(job) for job in ("1", "2", "3_1", "4")]
    assert await backend.cancel([*four, Cancel("5", "TERM", True)]) == [None] * 5
    assert service.asked[1][2] == {"jobs": ["5"], "signal": "TERM", "flags": ["BATCH_JOB"]}
    assert sbatch == [("4",)]
    assert await backend.cancel([Cancel("1"), Cancel("2")]) == [None, None]
    assert sbatch[1:] == [("1", "2")]
    (away,) = await backend.cancel([Cancel("1")])
    assert isinstance(away, UnreachableError)


@pytest.fixture
async def site():
    """A slurmrestd of v0.0.41 that takes one token; its address, and what it was asked."""
    asked = []

    async def handle(r):
        asked.append((r.method, r.path, r.headers["X-SLURM-USER-NAME"]))
        if r.headers["X-SLURM-USER-TOKEN"] != "good":
            return web.Response(status=401, text="Authentication failure")
        if "v0.0.41" not in r.path:
            return web.Response(status=404)
        return web.json_response({"errors": [], "job_id": 3})

    server = web.Server(handle)
    runner = web.ServerRunner(server)
    await runner.setup()
    where = web.TCPSite(runner, "127.0.0.1", 0)
    await where.start()
    port = where._server.sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", asked
    await runner.cleanup()


@pytest.mark.parametrize(
    ("token", "way"),
    [
        ("good\n", "slurmrestd v0.0.41"),
        ("bad", "sbatch and scancel (slurmrestd offers none of v0.0.42, v0.0.41, v0.0.40)"),
    ],
)
async def test_the_sites_own_is_asked_with_its_token(site, token, way, tmp_path, script, sbatch):
    url, asked = site
    (tmp_path / "token").write_text(token)
    backend = RestBackend(SiteService(f"{url}/", tmp_path / "token", "alice"))

    async def limits():
        return Limits()

    backend.limits = limits
    await backend.start()
    try:
        assert backend.way() == way
        answers = await backend.submit([Submission(request(), script)])
    finally:
        await backend.close()
    if token == "bad":
        assert sbatch == ["ns/p"]
    else:
        assert answers == ["3"] and not sbatch
        assert asked[-1] == ("POST", "/slurm/v0.0.41/job/submit", "alice")


async def test_a_site_that_checks_what_sbatch_submits(tmp_path):
    service = SiteService("https://x", tmp_path / "none", "alice")

    async def limits():
        return Limits(client_filters="cli_filter/lua")

    await service.run(limits)
    assert service.trouble == "the site's cli_filter/lua checks what sbatch submits"


def test_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "find_slurmrestd", lambda: "/usr/sbin/slurmrestd")
    assert isinstance(choice.make_backend(SlurmConfig(), tmp_path), RestBackend)
    assert type(choice.make_backend(SlurmConfig(backend="commands"), tmp_path)) is CommandBackend
    monkeypatch.setattr(choice, "find_slurmrestd", lambda: None)
    assert type(choice.make_backend(SlurmConfig(), tmp_path)) is CommandBackend
    with pytest.raises(HPKError, match=r"^slurm.backend is slurmrestd, which is not on PATH here"):
        choice.make_backend(SlurmConfig(backend="slurmrestd"), tmp_path)
    own = SlurmConfig(rest_url="http://far:6820", rest_token_file="/t")
    with pytest.raises(HPKError, match="is not https"):
        choice.make_backend(own, tmp_path)


def test_the_address_and_the_token_go_together():
    with pytest.raises(msgspec.ValidationError, match="go together"):
        msgspec.convert({"restUrl": "https://h:1"}, SlurmConfig)
