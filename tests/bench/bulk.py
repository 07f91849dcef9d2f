"""Many pods that only wait in the queue: how fast they get there, and leave it again.

Two halves. On the host, `section` stops the kubelet, so that all pods are there and bound when it
goes on, and makes the text; `python bulk.py COUNT IMAGE` is run as the user, on the login node.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

_KUBELET = "'[c]li kubelet$'"


def queued(prefix: str) -> int:
    names = subprocess.run(
        ["squeue", "--me", "-h", "-r", "-t", "PD", "-o", "%j"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    # a task has its array's name until there is time to name it
    return sum(name.startswith((prefix, "hpk/array-")) for name in names)


def until(prefix: str, count: int) -> float:
    while queued(prefix) != count:
        time.sleep(0.05)
    return time.time()


def signal_kubelet(name: str) -> None:
    job = subprocess.run(
        ["squeue", "--me", "-h", "-n", "hpk", "-t", "R", "-o", "%i"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    subprocess.run(
        ["srun", "--overlap", f"--jobid={job}", "sh", "-c", f"pkill -{name} -f {_KUBELET}"],
        check=True,
    )


def held(count: int, image: str) -> dict:
    from inside import NAMESPACE, Api, pod

    api = Api()
    base = f"/api/v1/namespaces/{NAMESPACE}/pods"
    body = pod("", image, ["true"])
    body["metadata"] = {
        "generateName": "bulk-",
        "annotations": {"slurm-job.hpk.io/flags": "--hold"},
    }
    warm = api.call("POST", base, body)  # pulls the image, wherever it is not
    until("bench/bulk-", 1)
    api.call("DELETE", f"{base}/{warm['metadata']['name']}")
    until("bench/bulk-", 0)
    signal_kubelet("STOP")
    for _ in range(count):
        api.call("POST", base, body)
    while not all(p["spec"].get("nodeName") for p in api.call("GET", base)["items"]):
        time.sleep(0.2)
    signal_kubelet("CONT")
    began = time.time()
    there = until("bench/bulk-", count)
    jobs = subprocess.run(
        ["squeue", "--me", "-h", "-r", "-t", "PD", "-o", "%i"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    deleted = time.time()
    api.call("DELETE", base)
    gone = until("bench/bulk-", 0)
    while api.call("GET", base)["items"]:
        time.sleep(0.2)
    return {
        "in": there - began,
        "out": gone - deleted,
        "arrays": len({job.partition("_")[0] for job in jobs if "_" in job}),
    }


def loop(count: int) -> dict:
    script = Path.home() / "bulk.sbatch"
    script.write_text("#!/bin/sh\n#SBATCH --hold --output=/dev/null --job-name=bulk\nexec true\n")
    began = time.time()
    jobs = [
        subprocess.run(
            ["sbatch", "--parsable", script], check=True, capture_output=True, text=True
        ).stdout.strip()
        for _ in range(count)
    ]
    there = time.time()
    for job in jobs:
        subprocess.run(["scancel", job], check=True)
    return {"in": there - began, "out": time.time() - there}


def section(result: dict, count: int) -> str:
    """For docs/benchmarks.md."""
    pods = result["pods"]
    bare = {key: (result["bare"][key] + result["bare again"][key]) / 2 for key in ("in", "out")}
    return "\n".join(
        [
            f"## {count} pods into the queue: **{pods['in'] / bare['in']:.2f}×** a loop of sbatch",
            "",
            f"{count} held pods, bound while the kubelet was stopped (SIGSTOP); from SIGCONT until "
            f"`squeue` lists all of them, in {pods['arrays']} job arrays; then from the deletion "
            "of all until `squeue` lists none. The loops call `sbatch` and `scancel` once per job, "
            "before and after.",
            "",
            "| | into the queue | out of it |\n|---|---|---|",
            f"| pods | {pods['in']:.1f} s | {pods['out']:.1f} s |",
            f"| loop, before | {result['bare']['in']:.1f} s | {result['bare']['out']:.1f} s |",
            f"| loop, after | {result['bare again']['in']:.1f} s "
            f"| {result['bare again']['out']:.1f} s |",
            "",
        ]
    )


if __name__ == "__main__":
    number = int(sys.argv[1])
    before = loop(number)
    pods = held(number, sys.argv[2])
    print(json.dumps({"pods": pods, "bare": before, "bare again": loop(number)}))
