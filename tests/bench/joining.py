"""What a pod's start pays for its network: run as the user, with standard input closed, on a node
where the user has no job. Prints {"first": [ms…], "later": [ms…]}.

Each time is of a process of its own, as agents are, from before it imports what is the network's
until it has an address.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROUNDS, LATER = 5, 5
JOIN = """
import ctypes, json, os, socket, struct, sys, time
sys.path.insert(0, sys.argv[1])
from hpk_agent import syscalls
from hpk_agent.namespaces import NamespaceError
with open(sys.argv[2]) as f:
    plan = json.load(f)
began = time.monotonic()
from hpk_agent.podnet import NetworkNotReady, PodNetwork, make_netns
pod = PodNetwork(plan)
pod.enter_users()
syscalls.unshare(syscalls.CLONE_NEWUSER)
pod.map_users()
netns = make_netns()
pod.join(netns)
os.close(netns)
pod.place(60)
print(1000 * (time.monotonic() - began), flush=True)
sys.stdin.read()
pod.close()
"""


def join(agent: Path, plan: Path) -> tuple[subprocess.Popen[str], float]:
    """A process that is in the pod network until its standard input ends, and its milliseconds."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", JOIN, str(agent), str(plan)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, float(process.stdout.readline())


def main() -> None:
    home = Path.home() / ".hpk"
    agent = max((home / "agent").iterdir(), key=lambda path: path.stat().st_mtime)
    times: dict[str, list[float]] = {"first": [], "later": []}
    for _ in range(ROUNDS):
        joined = [join(agent, home / "run" / "member.json") for _ in range(1 + LATER)]
        times["first"].append(joined[0][1])
        times["later"] += [milliseconds for _, milliseconds in joined[1:]]
        for process, _ in reversed(joined):  # the owner last
            process.communicate("")
    print(json.dumps(times))


if __name__ == "__main__":
    main()
