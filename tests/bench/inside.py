"""The part of the benchmarks that runs as the user, on the login node: takes times, prints JSON.

Standard library alone, one kept-alive connection to the API server, no kubectl in the way.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import yaml

NAMESPACE = "bench"


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


def pod(name: str, image: str, command: list[str]) -> dict:
    container = {"name": "main", "image": image, "command": command}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }  # fmt: skip


def pod_start(api: Api, image: str, name: str) -> dict:
    """One pod, from the request that creates it to Succeeded being seen."""
    base = f"/api/v1/namespaces/{NAMESPACE}/pods"
    seen: dict = {}
    listening = threading.Event()

    def look() -> None:
        query = f"?watch=1&fieldSelector=metadata.name={name}&sendInitialEvents=false"
        events = api.watch(base + query.split("&send")[0])
        listening.set()
        for at, event in events:
            whole = event["object"]
            if whole["spec"].get("nodeName"):
                seen.setdefault("bound", at)
            if whole["status"].get("phase") in ("Succeeded", "Failed"):
                seen["shown"], seen["pod"] = at, whole
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    listening.wait()
    time.sleep(0.05)  # the watch's request is on its way before the pod's is
    asked = time.time()
    api.call("POST", base, pod(name, image, ["date", "+%s.%N"]))
    accepted = time.time()
    watcher.join(120)
    whole = seen["pod"]
    if whole["status"]["phase"] != "Succeeded":
        raise SystemExit(f"{name} failed: {json.dumps(whole['status'])}")
    directory = Path.home() / ".hpk/pods" / whole["metadata"]["uid"]
    journal = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    states = [line["state"] for line in journal if "state" in line]
    log = (directory / "logs/main/0.log").read_text()
    api.call("DELETE", f"{base}/{name}")
    return {
        "asked": asked, "accepted": accepted, "bound": seen["bound"], "shown": seen["shown"],
        "job": states[-1]["jobId"], "agent": states[0]["startedAt"],
        "first": float(log.split()[-1]),
    }  # fmt: skip


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


def start(api: Api, image: str, rootfs: str, count: int) -> dict:
    pairs = []
    for i in range(-2, count):
        both = {"pod": pod_start(api, image, f"start-{i + 2}"), "bare": bare_start(rootfs, "bare")}
        idle()
        if i >= 0:  # the first two warm caches on both sides
            pairs.append(both)
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
        result = start(api, rest[0], rest[1], int(rest[2]))
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
