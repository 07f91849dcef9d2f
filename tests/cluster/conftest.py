"""Everything here looks from outside: kubectl, Slurm's commands, as the ordinary user alice."""

from __future__ import annotations

import fcntl
import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SANDBOX = str(ROOT / "bootstrap" / "sandbox")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class User:
    """A user of the sandbox, on its login node unless a node is named."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(
        self, *argv: str, check: bool = True, stdin: str = "", node: str = "", timeout: float = 120
    ) -> Ran:
        where = ["--node", node] if node else []
        command = [SANDBOX, "exec", "--user", self.name, *where, "--", *argv]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(argv)} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return Ran(done.returncode, done.stdout, done.stderr)

    def sh(self, script: str, check: bool = True, timeout: float = 120) -> Ran:
        return self.run("bash", "-c", script, check=check, timeout=timeout)

    def popen(self, *argv: str, node: str = "") -> subprocess.Popen[str]:
        where = ["--node", node] if node else []
        command = [SANDBOX, "exec", "--user", self.name, *where, "--", *argv]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def eventually(what: str, look: Callable[[], Any], timeout: float = 60) -> Any:
    """Looks until `look` returns something true; fails saying what was waited for and last seen."""
    end = time.monotonic() + timeout
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout:g} s: {what}; last seen: {seen!r}")
        time.sleep(0.2)


class Namespace:
    """One test's own namespace in alice's cluster."""

    def __init__(self, user: User, name: str) -> None:
        self.user = user
        self.name = name

    def kubectl(self, *argv: str, check: bool = True, stdin: str = "", timeout: float = 120) -> Ran:
        return self.user.run(
            "kubectl", "-n", self.name, *argv, check=check, stdin=stdin, timeout=timeout
        )

    def create(self, *objects: dict[str, Any]) -> Ran:
        return self.kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        result: dict[str, Any] = self.kubectl("get", kind, name, "-o", "json").json()
        return result

    def pod(self, name: str) -> dict[str, Any]:
        return self.get("pod", name)

    def gone(self, kind: str, name: str) -> bool:
        found = self.kubectl("get", kind, name, "--ignore-not-found", "-o", "name")
        return not found.out.strip()

    def phase(self, name: str) -> str:
        return str(self.pod(name).get("status", {}).get("phase"))

    def wait_phase(self, name: str, *phases: str, timeout: float = 60) -> dict[str, Any]:
        """The pod as soon as it is in one of the phases."""

        def look() -> dict[str, Any] | None:
            pod = self.pod(name)
            return pod if pod.get("status", {}).get("phase") in phases else None

        try:
            return eventually(f"{name} in phase {phases}", look, timeout)
        except BaseException:
            print(self.kubectl("describe", "pod", name, check=False).out)
            raise

    def wait_ready(self, name: str, timeout: float = 60) -> None:
        self.kubectl(
            "wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={timeout:g}s",
            timeout=timeout + 10,
        )  # fmt: skip

    def logs(self, name: str, *argv: str) -> str:
        return self.kubectl("logs", name, *argv).out

    def events(self, name: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.kubectl(
            "get", "events", "--field-selector", f"involvedObject.name={name}", "-o", "json"
        ).json()["items"]
        return items

    def reasons(self, name: str) -> set[str]:
        return {event["reason"] for event in self.events(name)}

    def job(self, name: str) -> str:
        """The Slurm job of a pod, by the comment a user would look for; "" while there is none."""
        uid = self.pod(name)["metadata"]["uid"]
        listing = self.user.run("squeue", "--me", "-h", "-t", "all", "-o", "%i %k").out
        for line in listing.splitlines():
            job, _, comment = line.partition(" ")
            if uid in comment:
                return job
        return ""

    def job_state(self, job: str) -> str:
        return self.user.run(
            "squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False
        ).out.strip()


def pod(name: str, *command: str, image: str, **spec: Any) -> dict[str, Any]:
    """A pod of one container `main` that runs the command once."""
    annotations = spec.pop("annotations", {})
    container = {"name": "main", "image": image, "command": list(command)}
    container |= spec.pop("container", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"restartPolicy": "Never", "containers": [container], **spec},
    }


@pytest.fixture(scope="session")
def alice() -> User:
    """alice, with her cluster up."""
    user = User("alice")
    with Path(tempfile.gettempdir(), "hpk-tests.lock").open("w") as lock:  # of parallel pytests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if user.run("hpk", "status", check=False).code != 0:
            user.run("sbatch", "/opt/hpk/src/hpk.sbatch")
        user.run("hpk", "status", "--wait", "120", timeout=150)
    return user


@pytest.fixture(scope="session")
def bob() -> User:
    """bob, whose cluster on the same nodes has `serviceMode: clusterIP`."""
    user = User("bob")
    with Path(tempfile.gettempdir(), "hpk-tests-bob.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not user.sh("grep -s serviceMode ~/.hpk/config.yaml", check=False).out:
            user.sh("echo 'serviceMode: clusterIP' >> ~/.hpk/config.yaml; hpk down || true")
        if user.run("hpk", "status", check=False).code != 0:
            user.run("sbatch", "/opt/hpk/src/hpk.sbatch")
        user.run("hpk", "status", "--wait", "120", timeout=150)
    return user


@pytest.fixture(scope="session")
def registry() -> str:
    return subprocess.run(
        [SANDBOX, "registry"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="session")
def busybox(registry: str) -> str:
    return f"{registry}/busybox:1"


@pytest.fixture(scope="session")
def agnhost(registry: str) -> str:
    return f"{registry}/agnhost:2.63.0"


@pytest.fixture
def ns(alice: User, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    stem = request.node.originalname.removeprefix("test_").replace("_", "-")[:40].strip("-")
    yield from namespace_of(alice, stem)


def namespace_of(user: User, stem: str) -> Iterator[Namespace]:
    """A namespace in the user's cluster, ready for pods; deleted afterwards."""
    name = f"{stem}-{uuid.uuid4().hex[:5]}"
    user.run("kubectl", "create", "namespace", name)
    namespace = Namespace(user, name)
    eventually(
        "the namespace's default service account",
        lambda: not namespace.gone("serviceaccount", "default"),
    )
    yield namespace
    user.run("kubectl", "delete", "namespace", name, "--wait=false")
