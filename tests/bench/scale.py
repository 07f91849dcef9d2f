"""A kubelet with thousands of pods: its memory, what it costs idle, how soon a new one has adopted.

`python scale.py COUNT…` on any machine, without Slurm: the kubelet is the real one, in its own
process; the API server and the agents, each with its TLS connection, are scripted in another, and
Slurm is a listing that is parsed like squeue's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web

ROOT = Path(__file__).parents[2]
NODE = "main"
IDLE_S = 60
CLUSTER_JOB = 1000


def uid_of(number: int) -> str:
    return str(uuid.UUID(int=number + 1))


def pod_of(number: int) -> dict[str, Any]:
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}
    ca = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": f"p-{number}", "namespace": "ns", "uid": uid_of(number),
            "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "x"}, "generation": 1,
        },
        "spec": {
            "nodeName": NODE, "restartPolicy": "Always", "serviceAccountName": "default",
            "terminationGracePeriodSeconds": 30, "enableServiceLinks": True,
            "containers": [{
                "name": "main", "image": "app:1", "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "inf"],
                "volumeMounts": [{"name": "kube-api", "mountPath": account, "readOnly": True}],
                "resources": {"requests": {"cpu": "1", "memory": "64Mi"}},
            }],
            "volumes": [{"name": "kube-api", "projected": {"sources": [token, ca]}}],
        },
        "status": {"phase": "Pending", "qosClass": "Burstable"},
    }  # fmt: skip


def new_token() -> str:
    now = int(time.time())
    claims = base64.urlsafe_b64encode(json.dumps({"iat": now, "exp": now + 3607}).encode())
    return f"{'h' * 100}.{claims.decode().rstrip('=')}.{'s' * 700}"


def state_of(number: int) -> dict[str, Any]:
    began = 1767225600.0
    return {
        "jobId": str(CLUSTER_JOB + number), "node": f"n{number % 100}", "hostIP": "10.1.0.1",
        "podIP": "10.1.0.1", "startedAt": began, "finished": False,
        "containers": {"main": {
            "running": {"startedAt": began}, "restartCount": 0, "started": True, "ready": True,
        }},
    }  # fmt: skip


def comment_of(number: int, cluster: str) -> str:
    return f"hpk:{cluster}:{uid_of(number)}:ns/p-{number}"


# --- the disk as a kubelet leaves it ---------------------------------------------------------


def write_pods(home: Path, count: int, cluster: str) -> None:
    from hpk_kubelet.spec.build import build_plan
    from tests.unit.spec_samples import inputs

    for number in range(count):
        directory = home / "pods" / uid_of(number)
        directory.mkdir(parents=True)
        mounted = {"kube-api": {"kind": "directory", "path": str(directory / "volumes/kube-api")}}
        given = inputs(pod_of(number), volumes=mounted, agent_token=f"token-{number}",
                       pod_dir=directory)  # fmt: skip
        plan = build_plan(pod_of(number), given)
        (directory / "plan.json").write_text(json.dumps(plan))
        (directory / "script.sbatch").write_text("#!/bin/sh\n" + "# a line\n" * 20)
        (directory / "journal.jsonl").write_text(json.dumps({"state": state_of(number)}) + "\n")
        token = directory / "volumes" / "kube-api" / "..data" / "token"
        token.parent.mkdir(parents=True)
        token.write_text(new_token())
        intent = {
            "uid": uid_of(number), "namespace": "ns", "name": f"p-{number}", "node": NODE,
            "partition": NODE, "comment": comment_of(number, cluster),
            "jobId": str(CLUSTER_JOB + number),
        }  # fmt: skip
        (directory / "intent.json").write_text(json.dumps(intent))


# --- the kubelet, and Slurm as it sees it ----------------------------------------------------


class Listing:
    """A backend whose jobs all run. Implements `slurm.backend.Backend`."""

    def __init__(self, count: int, cluster: str) -> None:
        from hpk_kubelet.slurm import parse

        self.text = "".join(
            parse.SEPARATOR.join([
                str(CLUSTER_JOB + n), "RUNNING", "0:0", "None", f"n{n % 100}", NODE, "1767225600",
                "1767225600", "N/A", "cpu=1,mem=256M,node=1", comment_of(n, cluster),
            ]) + "\n"
            for n in range(count)
        )  # fmt: skip

    async def submit(self, submissions: Any) -> list[Any]:
        raise AssertionError("nothing is to be submitted")

    async def jobs(self) -> list[Any]:
        from hpk_kubelet.slurm import parse

        return parse.jobs(self.text)

    async def ended(self, ids: Any) -> list[Any]:
        return []

    async def cancel(self, cancels: Any) -> list[Any]:
        raise AssertionError(f"nothing is to be cancelled: {cancels}")

    async def label(self, labels: Any) -> None:
        raise AssertionError("nothing is to be named")

    async def limits(self) -> Any:
        from hpk_kubelet.slurm.backend import Limits

        return Limits(1001)

    async def partitions(self) -> list[Any]:
        from hpk_kubelet.slurm.model import ComputeNode, Partition

        members = tuple(ComputeNode(f"n{i}", True, 128, 256000) for i in range(100))
        return [Partition(NODE, True, True, 100, 100, 12800, 12800, 25600000, 25600000, 128, 256000,
                          members=members)]  # fmt: skip


async def run_kubelet(count: int, api: str) -> None:
    import gc

    from hpk_kubelet.agent.install import install
    from hpk_kubelet.config import Config, Paths
    from hpk_kubelet.controlplane.pki import Pki, kubelet_server
    from hpk_kubelet.images.store import ImageStore
    from hpk_kubelet.kube.client import Client
    from hpk_kubelet.node.kubelet import Kubelet
    from hpk_kubelet.node.network import NetworkNews
    from hpk_kubelet.node.nodes import Host
    from hpk_kubelet.node.prepare import Site
    from hpk_kubelet.node.virtual_node import VirtualNode
    from hpk_kubelet.server.agents import AgentServer
    from hpk_kubelet.server.api import server_context

    paths, pki = Paths(), Pki(Paths().pki)
    cluster = pki.cluster_id()
    pair = kubelet_server(pki, ("hpk-kubelet",))
    images = ImageStore(paths.home / "images", insecure=())
    site = Site(Config(), paths, images, "127.0.0.1", 1, NetworkNews(paths, cluster))
    host = Host("127.0.0.1", "here", 1, "1.4")

    async def make_node(kubelet: Kubelet, name: str, partition: Any) -> VirtualNode:
        return VirtualNode(
            name, partition, Client(api), host, 20_000, offered=kubelet.offered,
            full=kubelet.disk.pressure, way=lambda: "a script", calm=kubelet.rush.over,
            on_pod=kubelet.pod_changed, on_written=kubelet.status_written,
            on_refused=kubelet.status_refused,
        )  # fmt: skip

    kubelet = Kubelet(site, Listing(count, cluster), cluster, install(paths.agent), make_node)
    kubelet.agents = AgentServer(kubelet, server_context(pair.cert, pair.key))
    port = await kubelet.agents.start("127.0.0.1", 0)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    await kubelet.run({"host": "127.0.0.1", "port": port})


# --- the API server and the agents -----------------------------------------------------------


class World:
    def __init__(self, count: int, home: Path, cluster: str) -> None:
        self.count, self.home, self.cluster = count, home, cluster
        self.pods = {p["metadata"]["name"]: p for p in map(pod_of, range(count))}
        self.version = 1
        self.watchers: set[asyncio.Queue[bytes]] = set()
        self.connected: set[int] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, query = request.path, request.query
        kind = path.rsplit("/", 1)[-1]
        body = await request.json() if request.can_read_body else None
        if query.get("watch"):
            return await self.watch(request, kind)
        if request.method == "GET" and kind in ("pods", "services", "nodes"):
            return web.json_response(self.listing(kind, query))
        if request.method == "GET" and "configmaps" in path:
            return web.json_response({
                "apiVersion": "v1", "kind": "ConfigMap", "data": {"ca.crt": "x" * 1000},
                "metadata": {"name": kind, "namespace": "ns", "uid": "c", "resourceVersion": "1"},
            })  # fmt: skip
        if kind == "token":
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3607))
            status = {"token": new_token(), "expirationTimestamp": stamp}
            return web.json_response({**body, "status": status}, status=201)
        if path.endswith("/status") and "/pods/" in path:
            return web.json_response(self.patched(path.split("/")[-2], body))
        return web.json_response(body or {}, status=201 if request.method == "POST" else 200)

    def listing(self, kind: str, query: Any) -> dict[str, Any]:
        items = list(self.pods.values()) if kind == "pods" else []
        first = int(query.get("continue") or 0)
        size = int(query.get("limit") or len(items) or 1)
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if first + size < len(items):
            metadata["continue"] = str(first + size)
        names = {"pods": "PodList", "services": "ServiceList", "nodes": "NodeList"}
        return {
            "apiVersion": "v1", "kind": names[kind], "metadata": metadata,
            "items": items[first : first + size],
        }  # fmt: skip

    def patched(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        pod = self.pods[name]
        new = {k: v for k, v in {**pod["status"], **body["status"]}.items() if v is not None}
        for address in ("podIPs", "hostIPs"):
            if address in new:
                new[address] = [a for a in new[address] if "$patch" not in a]
        for condition in new.get("conditions", ()):
            for key in [k for k, v in condition.items() if v is None]:
                del condition[key]
        metadata = {**pod["metadata"], "resourceVersion": str(self.version)}
        pod = self.pods[name] = {**pod, "metadata": metadata, "status": new}
        line = json.dumps({"type": "MODIFIED", "object": pod}).encode() + b"\n"
        for queue in self.watchers:
            queue.put_nowait(line)
        return pod

    async def watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        if kind == "pods":
            self.watchers.add(queue)
        try:
            while True:
                await response.write(await queue.get())
        finally:
            self.watchers.discard(queue)

    async def agent(self, number: int, context: ssl.SSLContext, slots: asyncio.Semaphore) -> None:
        """Stays connected; looks for the kubelet again when it goes, as agents do."""
        from hpk_kubelet.agent.connection import hello

        plan = {"uid": uid_of(number), "agent": {"token": f"token-{number}"}}
        first, pause = True, 0.5
        while True:
            try:
                async with slots:
                    where = json.loads((self.home / "run" / "kubelet.json").read_text())
                    reader, writer = await asyncio.open_connection(
                        where["host"], where["port"], ssl=context, server_hostname="hpk-kubelet"
                    )
                writer.write(hello(plan, state_of(number), []))
                await writer.drain()
                self.connected.add(number)
                first, pause = False, 0.5
                while await reader.read(1 << 16):
                    pass
                writer.close()
            except (OSError, ValueError):
                pass
            self.connected.discard(number)
            await asyncio.sleep(0.2 if first else pause)
            pause = min(2 * pause, 5.0)

    async def run(self) -> None:
        server = web.AppRunner(app := web.Application(client_max_size=1 << 24), access_log=None)
        app.router.add_route("*", "/{tail:.*}", self.handle)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", int(os.environ["WORLD_PORT"]), backlog=1024).start()
        context = ssl.create_default_context(cafile=str(self.home / "pki" / "ca.crt"))
        slots = asyncio.Semaphore(64)
        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(self.agent(number, context, slots))
            while True:
                phases = [p["status"]["phase"] for p in self.pods.values()]
                news = {
                    "connected": len(self.connected), "running": phases.count("Running"),
                }  # fmt: skip
                (self.home / "world.json.new").write_text(json.dumps(news))
                (self.home / "world.json.new").rename(self.home / "world.json")
                await asyncio.sleep(0.2)


# --- the measurement -------------------------------------------------------------------------


def used(pid: int) -> tuple[float, float]:
    """CPU seconds and resident MB."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"), int(rss) / 1024


def measure(count: int) -> dict[str, float]:
    home = Path(tempfile.mkdtemp(prefix="hpk-scale-"))
    env = {**os.environ, "HPK_HOME": str(home), "PYTHONPATH": str(ROOT)}
    env["WORLD_PORT"] = str(20_000 + os.getpid() % 10_000)
    os.environ["HPK_HOME"] = str(home)
    from hpk_kubelet.controlplane.pki import Pki, kubelet_server

    pki = Pki(home / "pki")
    kubelet_server(pki, ("hpk-kubelet",))
    (home / "run").mkdir()
    write_pods(home, count, pki.cluster_id())

    def role(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, f"--{name}", str(count)], env=env)

    def news() -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((home / "world.json").read_text())
        except FileNotFoundError:
            return {"connected": 0, "running": 0}
        return found

    def until(key: str, value: int, process: subprocess.Popen[bytes]) -> float:
        while news()[key] != value:
            if process.poll() is not None:
                raise SystemExit("the kubelet ended")
            time.sleep(0.1)
        return time.monotonic()

    world = role("world")
    kubelet = role("kubelet")
    try:
        until("running", count, kubelet)  # each status was written once
        until("connected", count, kubelet)
        time.sleep(2)
        kubelet.send_signal(signal.SIGKILL)
        kubelet.wait()
        until("connected", 0, world)
        began = time.monotonic()
        kubelet = role("kubelet")
        adopted = until("connected", count, kubelet) - began
        cpu_adopting = used(kubelet.pid)[0]
        time.sleep(10)
        before, _ = used(kubelet.pid)
        time.sleep(IDLE_S)
        after, rss = used(kubelet.pid)
        return {
            "pods": count, "adopted": adopted, "cpu_adopting": cpu_adopting,
            "idle": (after - before) / IDLE_S, "mb": rss,
        }  # fmt: skip
    finally:
        for process in (kubelet, world):
            process.kill()
            process.wait()
        shutil.rmtree(home)


def section(results: list[dict[str, float]]) -> str:
    """For docs/benchmarks.md."""
    rows = [
        f"| {r['pods']:,} | {r['mb']:.0f} MB | {100 * r['idle']:.1f} % | {r['adopted']:.1f} s "
        f"| {r['cpu_adopting']:.1f} s | {1000 * r['cpu_adopting'] / r['pods']:.1f} ms |"
        for r in results
    ]
    return "\n".join([
        "## A kubelet with many pods", "",
        "The real kubelet; API server, agents (a TLS connection each) and Slurm's listing are "
        "scripted, on the same cores. Idle: of one core, over a minute. Adopted: from the start of "
        "a kubelet whose predecessor was killed until every agent is connected to it.", "",
        "| running pods | resident | idle | adopted after | its CPU until then | … per pod |",
        "|---|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    match sys.argv[1:]:
        case ["--world", count]:
            home = Path(os.environ["HPK_HOME"])
            asyncio.run(World(int(count), home, "").run())
        case ["--kubelet", count]:
            asyncio.run(run_kubelet(int(count), f"http://127.0.0.1:{os.environ['WORLD_PORT']}"))
        case counts:
            print(section([measure(int(count)) for count in counts]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
