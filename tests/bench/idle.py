"""What many idle pods cost: each serves HTTP and is asked by a readiness probe every 10 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SECONDS = 60


def processes() -> list[dict]:
    """On a node: the user's processes, with CPU milliseconds used so far and resident kB."""
    tick = 1000 / os.sysconf("SC_CLK_TCK")
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_text().split("\0")
            stat = (directory / "stat").read_text().rpartition(")")[2].split()
            rollup = (directory / "smaps_rollup").read_text()
        except OSError:
            continue  # it ended
        sizes = dict(line.split()[:2] for line in rollup.splitlines()[1:])
        if not words[0]:
            continue
        found.append(
            {
                "pid": int(directory.name), "words": words,
                "cpu": (int(stat[11]) + int(stat[12])) * tick,
                "rss": int(sizes["Rss:"]), "pss": int(sizes["Pss:"]),
            }
        )  # fmt: skip
    return found


def pods(count: int, image: str) -> list[dict]:
    probe = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 10}
    container = {
        "name": "main", "image": image, "readinessProbe": probe,
        "command": ["sh", "-c", "mkdir /w; echo ok >/w/index.html; exec httpd -f -p 8080 -h /w"],
        "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}},
    }  # fmt: skip
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    return [
        {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": f"idle-{i}", "labels": {"bench": "idle"}}, "spec": spec,
        }
        for i in range(count)
    ]  # fmt: skip


def kubectl(*argv: str, stdin: str = "") -> None:
    subprocess.run(
        ["kubectl", "-n", "bench", *argv], input=stdin, text=True, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> None:
    """`up COUNT IMAGE`, `down`: as the user; `look`: on each node, as root."""
    match sys.argv[1:]:
        case ["up", count, image]:
            items = pods(int(count), image)
            kubectl(
                "create", "-f", "-",
                stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
            )  # fmt: skip
            kubectl("wait", "pod", "-l", "bench=idle", "--for=condition=Ready", "--timeout=600s")
        case ["down"]:
            kubectl("delete", "pod", "-l", "bench=idle")
        case ["look"]:
            print(json.dumps(processes()))
            return
        case other:
            raise SystemExit(f"no such part: {other}")
    print("{}")


def kind(words: list[str]) -> str:
    if words[-2:-1] == ["kubelet"]:
        return "kubelet"
    is_agent = any("/.hpk/agent/" in word for word in words) and "member" not in words
    return "agent" if is_agent else ""


def section(before: list[list[dict]], after: list[list[dict]], seconds: float, count: int) -> str:
    """`before`, `after`: `look` on every node, that many seconds apart."""
    cpu = {"kubelet": 0.0, "agent": 0.0}
    rss: dict[str, list[int]] = {"kubelet": [], "agent": []}
    pss = 0
    for old, new in zip(before, after, strict=True):
        used = {process["pid"]: process["cpu"] for process in old}
        for process in new:
            name = kind(process["words"])
            if not name:
                continue
            cpu[name] += process["cpu"] - used.get(process["pid"], 0.0)
            rss[name].append(process["rss"])
            pss += process["pss"] if name == "agent" else 0
    agents = sorted(rss["agent"])

    def percent(name: str) -> str:
        return f"{cpu[name] / 10 / seconds:.1f} %"

    return "\n".join(
        [
            f"## {count} idle pods, each with a probe every 10 s",
            "",
            f"Over {seconds:.0f} s, once all are ready.",
            "",
            "| | CPU, of one core | resident |\n|---|---|---|",
            f"| kubelet | {percent('kubelet')} | {max(rss['kubelet'], default=0) / 1024:.0f} MB |",
            f"| the agents' {len(agents)} processes | {percent('agent')} "
            f"| median {agents[len(agents) // 2] / 1024:.0f} MB, most {agents[-1] / 1024:.0f} MB "
            f"(shared pages counted in each; in all {pss / 1024 / count:.0f} MB a pod without) |",
            "",
        ]
    )


if __name__ == "__main__":
    main()
