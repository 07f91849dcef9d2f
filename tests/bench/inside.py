"""The part of the benchmarks that runs as the user, on the login node: takes times, prints JSON.

Standard library alone, one kept-alive connection to the API server, no kubectl in the way.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import random
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import yaml

NAMESPACE = "bench"
PASS = 3.0  # seconds at most between two scheduling passes (batch_sched_delay)


class Api:
    def __init__(self) -> None:
        config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        address = urlsplit(cluster["server"])
        ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=ca)
        with tempfile.TemporaryDirectory() as scratch:
            for name in ("client-certificate", "client-key"):
                path = Path(scratch, name)
                path.touch(0o600)
                path.write_bytes(base64.b64decode(user[f"{name}-data"]))
            context.load_cert_chain(f"{scratch}/client-certificate", f"{scratch}/client-key")
        self.open = lambda: http.client.HTTPSConnection(
            address.hostname or "", address.port, context=context
        )
        self.connection = self.open()

    def call(
        self, method: str, path: str, body: dict | None = None, ok: tuple = (200, 201)
    ) -> dict:
        self.connection.request(
            method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"}
        )
        response = self.connection.getresponse()
        text = response.read()
        if response.status not in ok:
            raise SystemExit(f"{method} {path}: {response.status} {text.decode()[:500]}")
        return json.loads(text)

    def watch(self, path: str):
        connection = self.open()
        connection.request("GET", path)
        response = connection.getresponse()
        while line := response.readline():
            yield time.time(), json.loads(line)


def pod(name: str, image: str, command: list[str], how: str = "batch") -> dict:
    """`how`: its start, see docs/annotations.md."""
    container = {"name": "main", "image": image, "command": command}
    annotations = {"slurm-job.hpk.io/start": how}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": annotations},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }  # fmt: skip


def followed(api: Api, body: dict, over: Callable[[dict], bool]) -> dict:
    """Creates a pod and watches it until it is `over`: when it was asked for, accepted, bound, and
    seen to be so; its last object and its directory."""
    base = f"/api/v1/namespaces/{NAMESPACE}/pods"
    name = body["metadata"]["name"]
    seen: dict = {}
    listening = threading.Event()

    def look() -> None:
        events = api.watch(f"{base}?watch=1&fieldSelector=metadata.name={name}")
        listening.set()
        for at, event in events:
            whole = event["object"]
            if whole["spec"].get("nodeName"):
                seen.setdefault("bound", at)
            if over(whole):
                seen["shown"], seen["pod"] = at, whole
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    listening.wait()
    time.sleep(0.05)  # the watch's request is on its way before the pod's is
    asked = time.time()
    api.call("POST", base, body)
    accepted = time.time()
    watcher.join(120)
    directory = Path.home() / ".hpk/pods" / seen["pod"]["metadata"]["uid"]
    return {**seen, "asked": asked, "accepted": accepted, "directory": directory}


def states(directory: Path) -> list[dict]:
    """What a pod's agent said of it, oldest first."""
    journal = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    return [line["state"] for line in journal if "state" in line]


def remove(api: Api, name: str) -> None:
    api.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")


def pod_start(api: Api, image: str, name: str, how: str = "batch") -> dict:
    """One pod, from the request that creates it to Succeeded being seen."""
    seen = followed(
        api,
        pod(name, image, ["date", "+%s.%N"], how),
        lambda whole: whole["status"].get("phase") in ("Succeeded", "Failed"),
    )
    if seen["pod"]["status"]["phase"] != "Succeeded":
        raise SystemExit(f"{name} failed: {json.dumps(seen['pod']['status'])}")
    told = states(seen["directory"])
    log = (seen["directory"] / "logs/main/0.log").read_text()
    remove(api, name)
    return {
        "asked": seen["asked"], "accepted": seen["accepted"], "bound": seen["bound"],
        "shown": seen["shown"], "job": told[-1]["jobId"], "agent": told[0]["startedAt"],
        "first": float(log.split()[-1]),
    }  # fmt: skip


def pod_ready(api: Api, image: str, name: str, containers: int) -> dict:
    """One pod that sleeps, to its Ready being seen; of several containers, the second has a
    readiness probe and the third a startup probe."""
    body = pod(name, image, ["sleep", "1000"])
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    kinds: list[dict] = [{}, {"readinessProbe": probe}, {"startupProbe": probe}]
    first = body["spec"]["containers"][0]
    body["spec"].update(
        terminationGracePeriodSeconds=0,
        containers=[{**first, "name": f"c{i}", **kinds[i]} for i in range(containers)],
    )

    def ready(whole: dict) -> bool:
        conditions = whole["status"].get("conditions") or ()
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    seen = followed(api, body, ready)
    remove(api, name)
    return {"shown": seen["shown"], "job": states(seen["directory"])[-1]["jobId"]}


def bare_start(rootfs: str, name: str) -> dict:
    """One bare sbatch of the same program in the same image."""
    output = Path.home() / f"{name}.out"
    output.unlink(missing_ok=True)
    script = Path.home() / f"{name}.sbatch"
    script.write_text(
        f"#!/bin/sh\n#SBATCH --output={output} --mem=512\n"
        f"exec apptainer exec --userns {rootfs} date +%s.%N\n"
    )
    asked = time.time()
    job = subprocess.run(
        ["sbatch", "--parsable", script], check=True, capture_output=True, text=True
    ).stdout.strip()
    while True:
        with contextlib.suppress(OSError, IndexError, ValueError):
            first = float(output.read_text().split()[-1])
            break
        time.sleep(0.05)
    output.unlink()
    script.unlink()
    return {"asked": asked, "first": first, "job": job}


def idle() -> None:
    """Returns when none of the benchmark's jobs is in the queue any more."""
    while True:
        names = subprocess.run(
            ["squeue", "--me", "-h", "-t", "PD,R,CG", "-o", "%j"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        if not any(name.startswith((f"{NAMESPACE}/", "bare")) for name in names):
            return
        time.sleep(0.1)


def start(api: Api, image: str, rootfs: str, count: int, how: str = "batch") -> dict:
    """Pairs; `immediate`: each of them begins at another phase of Slurm's passes."""
    pairs = []
    for i in range(-2, count):
        both = {}
        for what in ("pod", "bare"):
            if how == "immediate":
                time.sleep(random.uniform(0, PASS))
            if what == "pod":
                both[what] = pod_start(api, image, f"{how}-{i + 2}", how)
            else:
                both[what] = bare_start(rootfs, "bare")
        idle()
        if i >= 0:  # the first two warm caches on both sides
            pairs.append(both)
    return {"pairs": pairs}


def ready(api: Api, image: str, count: int) -> dict:
    """Pairs, interleaved: a pod of three containers with two probes, and one of one without."""
    pairs = []
    for i in range(-1, count):
        pair = [pod_ready(api, image, f"ready-{n}-{i + 1}", n) for n in (3, 1)]
        idle()
        if i >= 0:
            pairs.append(pair)
    return {"pairs": pairs}


def job_of_pods(api: Api, image: str, count: int) -> dict:
    base = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    spec = pod("x", image, ["true"])["spec"]
    body = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "many"},
        "spec": {"completions": count, "parallelism": count, "template": {"spec": spec}},
    }  # fmt: skip
    events = api.watch(f"{base}?watch=1")
    asked = time.time()
    api.call("POST", base, body)
    for at, event in events:  # noqa: B007
        conditions = event["object"].get("status", {}).get("conditions", [])
        if any(c["type"] == "Failed" and c["status"] == "True" for c in conditions):
            raise SystemExit(f"the Job failed: {conditions}")
        if any(c["type"] == "Complete" and c["status"] == "True" for c in conditions):
            break
    api.call("DELETE", f"{base}/many?propagationPolicy=Foreground")
    return {"seconds": at - asked}


def job_of_batches(rootfs: str, count: int) -> dict:
    script = Path.home() / "bare.sbatch"
    script.write_text(
        "#!/bin/sh\n#SBATCH --output=/dev/null --mem=512\n"
        f"exec apptainer exec --userns {rootfs} true\n"
    )
    asked = time.time()
    for _ in range(count):
        subprocess.run(["sbatch", "--parsable", script], check=True, stdout=subprocess.DEVNULL)
    idle()
    return {"seconds": time.time() - asked}


def main() -> None:
    what, *rest = sys.argv[1:]
    api = Api()
    api.call(
        "POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}}, ok=(200, 201, 409)
    )  # fmt: skip
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
    while api.call("GET", account, ok=(200, 404)).get("kind") != "ServiceAccount":
        time.sleep(0.05)
    if what == "start":
        result = start(api, rest[0], rest[1], int(rest[2]), *rest[3:])
    elif what == "ready":
        result = ready(api, rest[0], int(rest[1]))
    elif what == "many":
        count = int(rest[2])
        result = {"bare": job_of_batches(rest[1], count)}
        result["pods"] = job_of_pods(api, rest[0], count)
        idle()
        result["bare again"] = job_of_batches(rest[1], count)
    else:
        raise SystemExit(f"no benchmark called {what}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
