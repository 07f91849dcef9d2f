"""`make bench`: runs the benchmarks on the sandbox and writes docs/benchmarks.md.

Slurm's own wait (submitted → allocated) is read from slurmctld's log and taken out of both sides
of a start, since a default slurmctld starts batch jobs on whole seconds only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import bulk
import idle
import network
import serving

ROOT = Path(__file__).parents[2]
SANDBOX = str(ROOT / "bootstrap" / "sandbox")


def sandbox(*argv: str, user: str = "alice") -> str:
    return subprocess.run(
        [SANDBOX, "exec", "--user", user, "--", *argv],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def on_nodes(*argv: str) -> list[dict]:
    """What a module prints on each compute node, run there as root."""
    nodes = sandbox("sinfo", "-h", "-N", "-o", "%N").split()
    program = ("/opt/hpk/venv/bin/python", f"/opt/hpk/src/tests/bench/{argv[0]}.py", *argv[1:])
    return [
        json.loads(
            subprocess.run(
                [SANDBOX, "exec", "--user", "root", "--node", node, "--", *program],
                check=True,
                stdout=subprocess.PIPE,
            ).stdout
        )
        for node in sorted(set(nodes))
    ]


def inside(*argv: str, module: str = "inside") -> dict:
    program = f"/opt/hpk/src/tests/bench/{module}.py"
    result: dict = json.loads(sandbox("/opt/hpk/venv/bin/python", program, *argv))
    return result


class Slurmctld:
    """slurmctld's log: when a job was submitted and when it was given its node, in milliseconds."""

    def __init__(self) -> None:
        log = sandbox("cat", "/var/log/slurm/slurmctld.log", user="root")
        stamp = r"^\[([\d:.T-]+)\] "
        self.submitted = self._times(log, stamp + r"_slurm_rpc_submit_batch_job: JobId=(\d+) ")
        self.allocated = self._times(log, stamp + r"sched.*?: (?:Allocate|Started) JobId=(\d+) ")

    @staticmethod
    def _times(log: str, pattern: str) -> dict[str, float]:
        found = re.findall(pattern, log, re.MULTILINE)
        return {
            job: datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
            for stamp, job in found
        }

    def wait(self, job: str) -> float:
        return self.allocated[job] - self.submitted[job]


def row(name: str, values: list[float]) -> str:
    """One line of a table, of times in seconds: median, least and most."""
    cells = [f"{x * 1000:.0f} ms" for x in (statistics.median(values), min(values), max(values))]
    return f"| {name} | " + " | ".join(cells) + " |"


HEAD = "| | median | min | max |\n|---|---|---|---|"


def start(image: str, rootfs: str, count: int) -> str:
    pairs = inside("start", image, rootfs, str(count))["pairs"]
    log = Slurmctld()
    pods = [pair["pod"] for pair in pairs]
    bare = [pair["bare"] for pair in pairs]

    def net(sample: dict) -> float:
        return float(sample["first"] - sample["asked"] - log.wait(sample["job"]))

    ratio = statistics.median(net(p) / net(b) for p, b in zip(pods, bare, strict=True))
    stages = {
        "request → created": [p["accepted"] - p["asked"] for p in pods],
        "created → bound is seen": [p["bound"] - p["accepted"] for p in pods],
        "bound → in Slurm's queue": [log.submitted[p["job"]] - p["bound"] for p in pods],
        "(Slurm's queue, left out)": [log.wait(p["job"]) for p in pods],
        "allocated → agent": [p["agent"] - log.allocated[p["job"]] for p in pods],
        "agent → container's first instruction": [p["first"] - p["agent"] for p in pods],
    }
    return "\n".join(
        [
            f"## Start of a pod: **{ratio:.2f}×** a bare sbatch",
            "",
            f"{count} pairs, interleaved: `kubectl create` of a pod with a present image against "
            "`sbatch` of a script that runs `apptainer exec` on the same image directory; from the "
            "request to the container's first instruction (`date`). The ratio is the median of the "
            "pairs'.",
            "",
            HEAD,
            row("pod", [net(p) for p in pods]),
            row("bare sbatch", [net(b) for b in bare]),
            row("Slurm's queue, pod (left out)", [log.wait(p["job"]) for p in pods]),
            row("Slurm's queue, bare (left out)", [log.wait(b["job"]) for b in bare]),
            "",
            "Where a pod's time goes:",
            "",
            HEAD,
            *[row(name, values) for name, values in stages.items()],
            "",
            "## End of a container → the pod shows Succeeded",
            "",
            HEAD,
            row("`date` ran → seen in a watch", [p["shown"] - p["first"] for p in pods]),
            "",
        ]
    )  # fmt: skip


def ready(image: str, count: int) -> str:
    pairs = inside("ready", image, str(count))["pairs"]
    log = Slurmctld()
    three, one = (
        [pair[i]["shown"] - log.allocated[pair[i]["job"]] for pair in pairs] for i in (0, 1)
    )
    return "\n".join(
        [
            "## Start of a pod with 3 containers and 2 probes",
            "",
            "Allocated by Slurm → Ready is seen in a watch.",
            "",
            HEAD,
            row("3 containers, a readiness and a startup probe (exec)", three),
            row("1 container, no probe", one),
            "",
        ]
    )


def immediate(image: str, rootfs: str, count: int) -> str:
    pairs = inside("start", image, rootfs, str(count), "immediate")["pairs"]
    pods, bare = (
        [pair[what]["first"] - pair[what]["asked"] for pair in pairs] for what in ("pod", "bare")
    )
    ratio = statistics.median(pods) / statistics.median(bare)
    return "\n".join(
        [
            f"## A pod with `start: immediate`, Slurm's queue included: **{ratio:.2f}×** a bare "
            "sbatch",
            "",
            f"{count} pairs as above, each start at a random phase of Slurm's scheduling passes; "
            "the whole time from the request to the first instruction. The ratio is that of the "
            "medians.",
            "",
            HEAD,
            row("pod", pods),
            row("bare sbatch", bare),
            "",
        ]
    )


def many(image: str, rootfs: str, count: int) -> str:
    result = inside("many", image, rootfs, str(count))
    pods = result["pods"]["seconds"]
    bare = statistics.mean([result["bare"]["seconds"], result["bare again"]["seconds"]])
    return "\n".join(
        [
            f"## {count} pods of one Job: **{pods / bare:.2f}×** {count} bare jobs in a loop",
            "",
            f"| | seconds | per second |\n|---|---|---|\n"
            f"| Job, parallelism {count}, created → Complete | {pods:.1f} | {count / pods:.1f} |\n"
            f"| `sbatch` loop, before the Job → queue empty | {result['bare']['seconds']:.1f} "
            f"| {count / result['bare']['seconds']:.1f} |\n"
            f"| `sbatch` loop, after it | {result['bare again']['seconds']:.1f} "
            f"| {count / result['bare again']['seconds']:.1f} |",
            "",
        ]
    )


def control() -> str:
    """The control job, stopped and started on warm caches: time to readiness, then memory."""
    seconds = []
    for _ in range(5):
        sandbox("hpk", "down")
        job = sandbox("sbatch", "--parsable", "/opt/hpk/src/hpk.sbatch").strip()
        while True:
            done = subprocess.run(
                [SANDBOX, "exec", "--", "kubectl", "get", "--raw", "/readyz"], capture_output=True
            )
            if done.returncode == 0:
                break
        ready = time.time()
        seconds.append(ready - Slurmctld().allocated[job])
        sandbox("hpk", "status", "--wait", "120")
    time.sleep(20)  # let start-up work end: what is shown is the memory of an idle cluster
    listing = sandbox(
        "srun", "--overlap", f"--jobid={job}", "ps", "-u", "alice", "-o", "rss=,args="
    )
    memory: dict[str, float] = {}
    for line in listing.splitlines():
        rss, _, command = line.strip().partition(" ")
        words = command.split()
        name = Path(words[0]).name if words else ""
        if name.startswith("python"):  # `python hpk serve`, `python -m hpk_kubelet.cli kubelet`
            name = f"hpk {words[-1]}"
        if name not in ("ps", "srun", "bash", "sh"):
            memory[name] = memory.get(name, 0) + int(rss) / 1024
    return "\n".join(
        [
            "## The control job",
            "",
            HEAD,
            row("allocated → API ready (as `kubectl` sees it), warm", seconds),
            "",
            "| resident memory, idle | MB |\n|---|---|",
            *[f"| {name} | {size:.0f} |" for name, size in sorted(memory.items())],
            f"| **together** | **{sum(memory.values()):.0f}** |",
            "",
        ]
    )


def idle_pods(count: int, image: str) -> str:
    inside("up", str(count), image, module="idle")
    time.sleep(20)  # the last of the starts' work is over
    before, began = on_nodes("idle", "look"), time.monotonic()
    time.sleep(idle.SECONDS)
    after, seconds = on_nodes("idle", "look"), time.monotonic() - began
    inside("down", module="idle")
    return idle.section(before, after, seconds, count)


def many_pods(count: int) -> str:
    """Without the sandbox; a process of its own, since it moves HPK's home."""
    program = (sys.executable, ROOT / "tests" / "bench" / "scale.py", str(count // 10), str(count))
    return subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--bulk", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--scale", type=int, default=10_000)
    parser.add_argument("--only", default="", help="parts, by comma; prints and writes nothing")
    options = parser.parse_args()
    registry = subprocess.run(
        [SANDBOX, "registry"], check=True, capture_output=True, text=True
    ).stdout.strip()
    image = f"{registry}/mpi:1"
    if subprocess.run([SANDBOX, "exec", "--", "hpk", "status"], capture_output=True).returncode:
        sandbox("sbatch", "/opt/hpk/src/hpk.sbatch")
    sandbox("hpk", "status", "--wait", "120")
    sandbox("hpk", "image", "pull", image)
    listed = json.loads(sandbox("hpk", "image", "list", "-o", "json"))
    rootfs = next(found["rootfs"] for found in listed if image in found["references"])
    version = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    parts = {
        "start": lambda: start(image, rootfs, options.pairs),
        "ready": lambda: ready(f"{registry}/busybox:1", options.pairs),
        "immediate": lambda: immediate(image, rootfs, options.pairs),
        "many": lambda: many(image, rootfs, options.pods),
        "bulk": lambda: bulk.section(inside(str(options.bulk), image, module="bulk"), options.bulk),
        "serving": lambda: serving.section(inside(f"{registry}/busybox:1", module="serving")),
        "idle": lambda: idle_pods(options.idle, f"{registry}/busybox:1"),
        "network": lambda: network.section(registry),
        "control": control,
        "scale": lambda: many_pods(options.scale),
    }
    if options.only:
        for name in options.only.split(","):
            print(parts[name]())
        return
    head = (
        "# Benchmarks\n\n"
        "Made by `make bench` on a fresh sandbox (two compute nodes, Slurm 24.11 with its "
        f"default scheduling settings), revision {version}, on {os.cpu_count()} cores shared "
        "by the controller, both nodes and everything measured. Ratios are to the yardstick in "
        "the same run.\n"
    )
    text = "\n".join([head, *(part() for part in parts.values())])
    (ROOT / "docs" / "benchmarks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
