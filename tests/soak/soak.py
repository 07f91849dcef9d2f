"""Random pods, deletions and killed parts by a seed; then: did every pod run once, and what is
left? Looks from outside, as a user of the sandbox (and its administrator, for the nodes).

Each pod writes a line to a file of its own when it starts, so that a second run shows. What it is
then said to have done must be what it did: Succeeded only with exit code 0, its own exit code
where it ended by itself, and a reason wherever something else ended it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from conftest import SANDBOX, User, eventually, pod
from slurmadmin import ROOT, slurmctld_away

FLAGS = "slurm-job.hpk.io/flags"
NAMESPACE = "soak"
PARTS = (
    "cli kubelet$", "cli controllers$", "kube-apiserver ", "etcd --name", "controller-manager ",
)  # fmt: skip
IMAGE = "registry.hpk.test:5000/busybox:1"


@dataclass
class Made:
    """A pod as it was made, and what was done to it."""

    name: str
    exit_code: int | None  # None: runs until something ends it
    disturbed: set[str] = field(default_factory=set)


class Soak:
    def __init__(self, seed: int, seconds: float) -> None:
        self.random = random.Random(seed)
        self.until = time.monotonic() + seconds
        self.alice = User("alice")
        self.made: dict[str, Made] = {}
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.marks = self.alice.sh("echo $HOME").out.strip() + "/soak-marks"

    # --- what is done

    def create(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 5, 12])):
            name = f"p{len(self.made)}"
            kind = self.random.choice(["short", "short", "fails", "long", "held"])
            code = {"short": 0, "fails": self.random.randint(1, 99), "held": 0}.get(kind)
            nap = "sleep 100000" if code is None else f"sleep {self.random.randint(0, 4)}"
            script = f"echo x >> /marks/{name}; {nap}; exit {code or 0}"
            spec = pod(
                name, "sh", "-c", script, image=IMAGE,
                annotations={FLAGS: "--hold"} if kind == "held" else {},
                terminationGracePeriodSeconds=self.random.choice([0, 1, 3]),
                container={"volumeMounts": [{"name": "m", "mountPath": "/marks"}]},
                volumes=[{"name": "m", "hostPath": {"path": self.marks}}],
            )  # fmt: skip
            self.made[name] = Made(name, code)
            self.kubectl_until("create", "-f", "-", stdin=json.dumps(spec))

    def delete(self) -> None:
        if one := self.one("Running", "Pending", "Failed"):
            one.disturbed.add("deleted")
            force = ["--force", "--grace-period=0"] if self.random.random() < 0.3 else []
            self.kubectl_until("delete", "pod", one.name, "--wait=false", *force)

    def execute(self) -> None:
        if one := self.one("Running"):
            said = self.kubectl("exec", one.name, "--", "echo", one.name)
            if said.code == 0 and said.out != f"{one.name}\n":
                self.faults.append(f"exec in {one.name} answered {said.out!r}")

    def release(self) -> None:
        queued = self.alice.run("squeue", "--me", "-h", "-r", "-t", "PD", "-o", "%i %r").out
        held = [line.split()[0] for line in queued.splitlines() if "JobHeldUser" in line]
        if held:
            self.alice.run("scontrol", "release", *held, check=False)

    def cancel(self) -> None:
        rows = self.alice.run("squeue", "--me", "-h", "-r", "-o", "%i %j").out.splitlines()
        ours = [row.split() for row in rows if f" {NAMESPACE}/" in row]
        if ours:
            job, name = self.random.choice(ours)
            self.made[name.split("/")[1]].disturbed.add("cancelled")
            self.alice.run("scancel", job, check=False)

    def kill_a_part(self) -> None:
        part = self.random.choice(PARTS)
        self.done[f"killed {part.strip('$ ')}"] += 1
        self.in_control_job(f"pkill -KILL -f '[{part[0]}]{part[1:]}'")

    def kill_an_agent(self) -> None:
        if one := self.one("Running"):
            uid = self.pods().get(one.name, {}).get("metadata", {}).get("uid", "")
            if uid:
                one.disturbed.add("agent killed")
                for node in ("node1", "node2"):
                    self.alice.run("pkill", "-KILL", "-f", f"pods/{uid}$", node=node, check=False)

    def kill_the_control_job(self) -> None:
        self.alice.sh("scancel --signal=KILL --full $(squeue --me -h -n hpk -o %i)", check=False)
        eventually("the control job gone", lambda: not self.control_job(), 90)
        self.alice.run("sbatch", "/opt/hpk/src/hpk.sbatch")
        self.up()

    def hand_over(self) -> None:
        before = self.control_job()
        if self.alice.run("hpk", "handover", check=False).code == 0:
            eventually("another control job", lambda: self.control_job() not in ("", before), 120)
            self.up()

    def restart_slurmctld(self) -> None:
        with slurmctld_away():
            time.sleep(self.random.uniform(1, 15))

    # --- how

    def up(self) -> None:
        eventually(
            "the cluster",
            lambda: self.alice.run("hpk", "status", "--wait", "30", check=False).code == 0, 180,
        )  # fmt: skip

    def control_job(self) -> str:
        squeue = ("squeue", "--me", "-h", "-n", "hpk", "-t", "R,PD", "-o", "%i")
        return self.alice.run(*squeue, check=False).out.strip()

    def in_control_job(self, command: str) -> None:
        node = self.alice.sh("squeue --me -h -n hpk -t R -o %N", check=False).out.strip()
        if node:
            self.alice.run("sh", "-c", command, node=node.split()[0], check=False)

    def kubectl(self, *argv: str, stdin: str = "") -> Any:
        return self.alice.run(
            "kubectl", "--request-timeout=20s", "-n", NAMESPACE, *argv, stdin=stdin, check=False,
            timeout=180,
        )  # fmt: skip

    def kubectl_until(self, *argv: str, stdin: str = "") -> None:
        """Again while a part that was killed comes back."""

        def done() -> bool:
            said = self.kubectl(*argv, stdin=stdin)
            return said.code == 0 or "AlreadyExists" in said.err or "NotFound" in said.err

        eventually(f"kubectl {' '.join(argv)}", done, 180)

    def pods(self) -> dict[str, Any]:
        said = self.kubectl("get", "pods", "-o", "json")
        return {p["metadata"]["name"]: p for p in said.json()["items"]} if said.code == 0 else {}

    def one(self, *phases: str) -> Made | None:
        names = [n for n, p in self.pods().items() if p.get("status", {}).get("phase") in phases]
        return self.made[self.random.choice(sorted(names))] if names else None

    # --- the whole

    def run(self) -> bool:
        self.up()
        self.alice.sh(f"rm -rf {self.marks}; mkdir {self.marks}")
        self.alice.run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found")
        self.alice.run("kubectl", "create", "namespace", NAMESPACE)
        steps: list[tuple[float, Callable[[], None]]] = [
            (10, self.create), (4, self.delete), (4, self.execute), (2, self.release),
            (2, self.cancel), (2, self.kill_a_part), (1, self.kill_an_agent),
            (0.4, self.kill_the_control_job), (0.4, self.hand_over), (0.4, self.restart_slurmctld),
        ]  # fmt: skip
        while time.monotonic() < self.until:
            (step,) = self.random.choices([s for _, s in steps], [w for w, _ in steps])
            self.done[step.__name__] += 1
            print(f"{time.strftime('%H:%M:%S')} {step.__name__}", flush=True)
            step()
            time.sleep(self.random.uniform(0, 2))
        self.up()
        self.settle()
        self.judge()
        self.clean()
        self.report()
        return not self.faults

    def settle(self) -> None:
        """Ends everything, and waits until every pod has an end."""
        print("settling", flush=True)

        def quiet() -> bool:
            self.release()
            pods = self.pods()
            return all(
                p["status"].get("phase") in ("Succeeded", "Failed")
                or (self.made[n].exit_code is None and p["status"].get("phase") == "Running")
                for n, p in pods.items()
            )

        eventually("an end of every pod that has one", quiet, 300)

    def judge(self) -> None:
        pods = self.pods()
        marks = dict(
            line.split(" ", 1)
            for line in self.alice.sh(
                f"cd {self.marks}; for f in *; do echo $f $(wc -l < $f); done"
            ).out.splitlines()
        )
        for made in self.made.values():
            ran = int(marks.get(made.name, "0") or 0)
            if ran > 1:
                self.faults.append(f"{made.name} ran {ran} times")
            one = pods.get(made.name)
            if one is None:
                if "deleted" not in made.disturbed:
                    self.faults.append(f"{made.name} is gone, and nobody deleted it")
                continue
            self.judge_one(made, one["status"], ran)

    def judge_one(self, made: Made, status: dict[str, Any], ran: int) -> None:
        phase, reason = status.get("phase"), status.get("reason", "")
        ends = [s["state"].get("terminated") for s in status.get("containerStatuses", [])]
        codes = [end["exitCode"] for end in ends if end]
        said = f"{made.name} ({made.exit_code}, {sorted(made.disturbed)}): {phase} {reason} {codes}"
        if phase == "Succeeded" and (made.exit_code != 0 or not ran):
            self.faults.append(f"untrue: {said}, ran {ran}")
        if phase == "Failed" and not made.disturbed and codes != [made.exit_code]:
            self.faults.append(f"untrue: {said}")
        if phase == "Failed" and made.exit_code in (0, None) and not reason:
            self.faults.append(f"no reason: {said}")
        if phase == "Running" and not ran:
            self.faults.append(f"runs without having begun: {said}")

    def clean(self) -> None:
        """Deletes all, and looks at what is left."""
        self.kubectl_until("delete", "pods", "--all", "--wait=false", "--grace-period=1")
        eventually("no pods", lambda: not self.pods(), 180)

        def jobs() -> str:
            rows = self.alice.run("squeue", "--me", "-h", "-r", "-o", "%i %T %j").out.splitlines()
            return "\n".join(row for row in rows if not row.endswith(" hpk"))

        self.none_left("jobs", jobs)
        find = f'cd ~/.hpk; grep -lr \'"namespace": "{NAMESPACE}"\' pods/*/intent.json arrays'
        self.none_left("directories", lambda: self.alice.sh(find, check=False).out)
        for node in ("node1", "node2"):
            self.none_left(
                f"processes on {node}",
                lambda node=node: self.alice.run(
                    "pgrep", "-a", "-f", "hpk/agent/.*/pods/", node=node, check=False
                ).out,
            )  # fmt: skip
            self.none_left(
                f"scratch on {node}",
                lambda node=node: ROOT.run(
                    "sh", "-c", "ls -d /tmp/hpk-1000-[0-9]* 2>/dev/null", node=node, check=False
                ).out,
            )  # fmt: skip
            self.none_left(
                f"mounts on {node}",
                lambda node=node: ROOT.run(
                    "sh", "-c", "grep hpk-1000 /proc/mounts", node=node, check=False
                ).out,
            )  # fmt: skip

    def none_left(self, what: str, look: Callable[[], str], patience: float = 60) -> None:
        deadline = time.monotonic() + patience
        while (seen := look().strip()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if seen:
            self.faults.append(f"{what} left over: {seen}")

    def report(self) -> None:
        print(f"\n{len(self.made)} pods; " + ", ".join(f"{n} {w}" for w, n in self.done.items()))
        for fault in self.faults:
            print(f"FAULT {fault}")
        print("no faults" if not self.faults else f"{len(self.faults)} faults")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes, sandbox {SANDBOX}", flush=True)
    return 0 if Soak(options.seed, options.minutes * 60).run() else 1


if __name__ == "__main__":
    sys.exit(main())
