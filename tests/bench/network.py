"""The pod network against the hosts': iperf3 and ping between two nodes, in one run.

alice's pods are measured on the hosts' network (hostNetwork: the yardstick) and on the pod network;
bob's, whose cluster has `serviceMode: clusterIP`, through a Service.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SANDBOX = str(Path(__file__).parents[2] / "bootstrap" / "sandbox")
PORT = 5201
ROUNDS = 3
SECONDS = 3
PING = ("ping", "-q", "-c", "10")


class Cluster:
    """A user's, in the sandbox."""

    def __init__(self, user: str) -> None:
        self.user = user

    def run(self, *argv: str, stdin: str = "") -> str:
        command = [SANDBOX, "exec", "--user", self.user, "--", *argv]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, input=stdin)
        return done.stdout

    def up(self) -> None:
        if subprocess.run(
            [SANDBOX, "exec", "--user", self.user, "--", "hpk", "status"], capture_output=True
        ).returncode:
            self.run("sbatch", "/opt/hpk/src/hpk.sbatch")
        self.run("hpk", "status", "--wait", "120")

    def measure(self, target: str, client: str) -> dict[str, float]:
        """Gb/s with 1 and 8 streams."""
        inside = ("kubectl", "exec", client, "--")

        def gigabits(streams: int) -> float:
            text = self.run(*inside, "iperf3", "-J", "-c", target, "-t", str(SECONDS),
                            "-P", str(streams))  # fmt: skip
            return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 1e9

        return {"1 stream": gigabits(1), "8 streams": gigabits(8)}

    def ping(self, target: str, client: str) -> dict[str, float]:
        return {"ping": round_trip(self.run("kubectl", "exec", client, "--", *PING, target))}


def host_ping(target: str) -> dict[str, float]:
    """From node1 itself, as root: ping needs a raw socket there."""
    command = [SANDBOX, "exec", "--user", "root", "--node", "node1", "--", "busybox", *PING]
    done = subprocess.run([*command, target], check=True, stdout=subprocess.PIPE, text=True)
    return {"ping": round_trip(done.stdout)}


def round_trip(text: str) -> float:
    """The average, in milliseconds, of ping's last line: `… min/avg/max… = a/b/c… ms`."""
    return float(text.rpartition("= ")[2].split("/")[1])


def pods(image: str, prefix: str, host: bool) -> list[dict]:
    """A server on the second node, a client on the first."""
    common = {"hostNetwork": host, "terminationGracePeriodSeconds": 0}

    def pod(name: str, command: list[str]) -> dict:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                **common,
                "containers": [{"name": "c", "image": image, "command": command}],
            },
        }

    server = pod(f"{prefix}-server", ["iperf3", "-s", "-p", str(PORT)])
    client = pod(f"{prefix}-client", ["sleep", "100000"])
    for place, made in (("node2", server), ("node1", client)):
        made["metadata"]["annotations"] = {"slurm-job.hpk.io/flags": f"--nodelist={place}"}
    return [server, client]


def service(name: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": PORT}]},
    }


def prepare(cluster: Cluster, objects: list[dict]) -> None:
    cluster.run("kubectl", "create", "-f", "-", stdin=json.dumps({
        "apiVersion": "v1", "kind": "List", "items": objects}))  # fmt: skip
    names = [f"pod/{o['metadata']['name']}" for o in objects if o["kind"] == "Pod"]
    cluster.run("kubectl", "wait", *names, "--for=condition=Ready", "--timeout=120s")


def field(cluster: Cluster, kind: str, name: str, path: str) -> str:
    return cluster.run("kubectl", "get", kind, name, "-o", f"jsonpath={{{path}}}")


def start_cost(cluster: Cluster) -> str:
    """A sentence: measured on a node where the user has nothing, by tests/bench/joining.py."""
    nodes = set(cluster.run("sinfo", "-h", "-N", "-o", "%N").split())
    deadline = time.monotonic() + 60
    while not (free := nodes - set(cluster.run("squeue", "--me", "-h", "-o", "%N").split())):
        if time.monotonic() > deadline:
            raise SystemExit("bench: the user has jobs on every node")
        time.sleep(1)
    script = Path(__file__).with_name("joining.py").read_text()
    command = [SANDBOX, "exec", "--user", cluster.user, "--node", min(free), "--", "python3", "-"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, input=script)
    times = json.loads(done.stdout)
    first, later = (
        f"{statistics.median(times[kind]):.0f} ms (at worst {max(times[kind]):.0f})"
        for kind in ("first", "later")
    )
    return (
        f"\nWhat a pod's start pays for its network: {later} where the node network is up, {first} "
        "for the first pod of a user on a node; "
        f"medians of {len(times['later'])} and {len(times['first'])}.\n"
    )


def section(registry: str) -> str:
    """The section of docs/benchmarks.md. Rounds are interleaved; each figure is their median."""
    image = f"{registry}/net:1"
    alice, bob = Cluster("alice"), Cluster("bob")
    config = "grep -qs serviceMode ~/.hpk/config.yaml || { echo 'serviceMode: clusterIP' >> "
    bob.run("bash", "-c", config + "~/.hpk/config.yaml; hpk down || true; }")
    ways: dict[str, Callable[[], dict[str, float]]] = {}
    try:
        for cluster in (alice, bob):
            cluster.up()
        cost = start_cost(alice)
        prepare(alice, [*pods(image, "net-host", True), *pods(image, "net-pod", False)])
        prepare(bob, [*pods(image, "net-service", False), service("net-service-server")])
        host, pod = (
            field(alice, "pod", f"net-{kind}-server", ".status.podIP") for kind in ("host", "pod")
        )
        if host == pod or host == field(alice, "pod", "net-host-client", ".status.podIP"):
            raise SystemExit("bench: the pods are not where they should be (network: rootless?)")
        address = field(bob, "service", "net-service-server", ".spec.clusterIP")
        ways = {
            "host to host": lambda: alice.measure(host, "net-host-client") | host_ping(host),
            "pod to pod (rootless)": lambda: (
                alice.measure(pod, "net-pod-client") | alice.ping(pod, "net-pod-client")
            ),
            "pod to pod, through a ClusterIP": lambda: bob.measure(address, "net-service-client"),
        }
        rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS)]
    finally:
        for cluster in (alice, bob):
            cluster.run("kubectl", "delete", "pod,service", "--ignore-not-found", "--wait=false",
                        *[f"net-{kind}-{end}" for kind in ("host", "pod", "service")
                          for end in ("server", "client")])  # fmt: skip
    return table(rounds) + cost


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    names = list(rounds[0])
    median = {
        name: {what: statistics.median(r[name][what] for r in rounds) for what in rounds[0][name]}
        for name in names
    }
    yard = median[names[0]]
    lines = []
    for name in names:
        cells = []
        for what in ("1 stream", "8 streams"):
            value = median[name][what]
            cells.append(f"{value:.2f} Gb/s ({value / yard[what]:.2f}×)")
        rtt = median[name].get("ping")
        cells.append(f"{rtt:.2f} ms" if rtt is not None else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ratio = median[names[1]]["1 stream"] / yard["1 stream"]
    return "\n".join(
        [
            f"## Between two nodes: **{ratio:.2f}×** the hosts' network",
            "",
            f"iperf3, {SECONDS} s a measurement, {len(rounds)} interleaved rounds, medians. Both "
            "nodes share this machine's cores with both ends of every connection, so these are "
            "costs in CPU rather than limits of a wire. A ClusterIP answers no ping.",
            "",
            "| | 1 stream | 8 streams | ping |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )
