import asyncio
import datetime as dt
import json
import ssl
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest

from hpk_kubelet.agent.logs import parse_time
from hpk_kubelet.agent.wire import ERROR, STDIN, STDOUT
from hpk_kubelet.controlplane.pki import Leaf, Pki, kubelet_server
from hpk_kubelet.errors import HPKError
from hpk_kubelet.server import stats
from hpk_kubelet.server.api import (
    AGGREGATOR,
    API_SERVER,
    KubeletServer,
    common_name,
    server_context,
)
from hpk_kubelet.server.log_files import read_files
from hpk_kubelet.server.log_options import LogOptions, log_state, parse_options
from hpk_kubelet.server.metrics import Metrics
from hpk_kubelet.server.pod_logs import pod_log

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, LogOptions()),
        ({"follow": "true", "previous": "1", "timestamps": "false"},
         LogOptions(follow=True, previous=True)),
        ({"tailLines": "0", "limitBytes": "5"}, LogOptions(tail=0, limit=5)),
        ({"sinceSeconds": "5"}, LogOptions(since=NOW.timestamp() - 5)),
        ({"sinceTime": "2026-01-02T03:04:00Z"}, LogOptions(since=NOW.timestamp() - 5)),
    ],
)  # fmt: skip
def test_log_options(query, expected):
    assert parse_options(query, NOW) == expected


def test_the_agent_gets_a_time_it_can_read():
    wanted = LogOptions(since=NOW.timestamp()).to_stream("c")["sinceTime"]
    assert parse_time(wanted) == NOW.timestamp() * 1e9


@pytest.mark.parametrize(
    "query", [{"tailLines": "-1"}, {"tailLines": "x"}, {"sinceTime": "yesterday"}]
)
def test_wrong_log_options_are_named(query):
    with pytest.raises(HPKError, match=next(iter(query))):
        parse_options(query, NOW)


def status(state, last=None):
    return {"containerStatuses": [{"name": "c", "state": state, "lastState": last or {}}]}


@pytest.mark.parametrize(
    ("seen", "previous", "words"),
    [
        (status({"running": {}}), False, None),
        (status({"terminated": {}}), False, None),
        (
            status({"waiting": {"reason": "CrashLoopBackOff"}}, {"terminated": {"a": 1}}),
            False,
            None,
        ),
        (
            status({"waiting": {"reason": "ContainerCreating"}}),
            False,
            "waiting to start: Con",
        ),
        (status({"waiting": {"reason": "ErrImagePull"}}), False, "image can't be pulled"),
        (status({"waiting": {"reason": "ImagePullBackOff"}}), False, "trying and failing"),
        (status({"running": {}}), True, "previous terminated container"),
        (status({"running": {}}, {"terminated": {"a": 1}}), True, None),
        ({}, False, "is not available"),
    ],
)
def test_whether_there_is_a_log(seen, previous, words):
    if words is None:
        log_state(seen, "p", "c", previous)
    else:
        with pytest.raises(HPKError, match=words):
            log_state(seen, "p", "c", previous)


def test_common_name():
    assert common_name(None) == ""
    assert common_name({"subject": ((("organizationName", "x"),), (("commonName", "y"),))}) == "y"


# --- the server itself


class Stream:
    """Echoes its input until it is closed, then tells an exit code."""

    def __init__(self):
        self.error = ""
        self.queue = asyncio.Queue()
        self.closed = False

    async def send(self, channel, data):
        if channel == STDIN:
            await self.queue.put((STDOUT, data.upper()))
        else:
            await self.queue.put((ERROR, json.dumps({"status": "Success"}).encode()))
            await self.queue.put(None)

    async def receive(self):
        return await self.queue.get()

    def close(self):
        self.closed = True


class Agent:
    stats: ClassVar = {
        "time": 1000.0,
        "containers": {"c": {"cpuSeconds": 5.0, "memoryBytes": 3 << 20, "processes": 2}},
    }

    def __init__(self):
        self.opened = []

    def open(self, kind, **arguments):
        self.stream = Stream()
        self.opened.append((kind, arguments))
        if kind == "logs":
            for text in (b"one\n", b"two\n"):
                self.stream.queue.put_nowait((STDOUT, text))
            self.stream.queue.put_nowait(None)
        if kind == "stats":
            text = json.dumps(self.stats).encode()
            self.stream.queue.put_nowait((STDOUT, text[:5]))
            self.stream.queue.put_nowait((STDOUT, text[5:]))
            self.stream.queue.put_nowait(None)
        return self.stream


class Pod:
    def __init__(self, directory):
        self.object = {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [{"name": "c"}, {"name": "waits"}]},
        }
        waiting = {"name": "waits", "state": {"waiting": {"reason": "ContainerCreating"}}}
        self.status = {"phase": "Running", **status({"running": {}})}
        self.status["containerStatuses"].append(waiting)
        self.agent = None
        self.directory = directory
        self.running = False


class Pods:
    def __init__(self, pod):
        self.pod = pod

    def find(self, namespace, name):
        return self.pod if (namespace, name) == ("ns", "p") else None

    def served(self):
        return [self.pod]


@pytest.fixture
async def kubelet(tmp_path):
    """(pod, what makes a session with the certificate of a common name, base URL)"""
    pki = Pki(tmp_path / "pki")
    pair = kubelet_server(pki, ["127.0.0.1"])
    pod = Pod(tmp_path / "pod")
    pki.leaf("front-proxy-client", Leaf("front-proxy-client"), pki.front_proxy_ca)
    context = server_context(pair.cert, pair.key, pki.ca.cert, pki.front_proxy_ca.cert)
    pods = Pods(pod)
    metrics = Metrics(pods.served, lambda: {"main": {"cpu": "4", "memory": "1Gi"}})
    server = KubeletServer(pods, context, read_files, metrics, {"maxPods": 7})
    port = await server.start("127.0.0.1", 0)
    sessions = []

    def session(name=API_SERVER[0], authority=pki.ca):
        context = ssl.create_default_context(cafile=pki.ca.cert)
        if name:
            authority = pki.front_proxy_ca if name == AGGREGATOR[0] else authority
            client = pki.leaf(f"{name}-{authority.cert.stem}", Leaf(name), authority)
            context.load_cert_chain(client.cert, client.key)
        made = aiohttp.ClientSession(
            f"https://127.0.0.1:{port}", connector=aiohttp.TCPConnector(ssl=context)
        )
        sessions.append(made)
        return made

    yield pod, session
    for made in sessions:
        await made.close()
    await server.close()


async def test_only_the_api_server_is_let_in(kubelet):
    _, session = kubelet
    async with session().get("/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok")
    async with session("system:node:main").get("/pods") as answer:
        assert answer.status == 403
        assert "system:node:main" in await answer.text()
    with pytest.raises(aiohttp.ClientError):
        await session("").get("/healthz")


async def test_what_does_not_exist_is_said(kubelet):
    _, session = kubelet
    api = session()
    for path, code, words in (
        ("/containerLogs/ns/other/c", 404, "does not exist"),
        ("/containerLogs/ns/p/none", 404, 'container "none" not found'),
        ("/containerLogs/ns/p/waits", 400, "waiting to start"),
        ("/containerLogs/ns/p/c?tailLines=x", 400, "tailLines"),
        ("/exec/ns/p/waits?command=x", 500, "container not found"),
        ("/exec/ns/p/c?command=x", 503, "not connected"),
        ("/exec/ns/p/otheruid/c?command=x", 404, "does not exist"),
        ("/portForward/ns/p", 503, "not connected"),
    ):
        async with api.get(path) as answer:
            assert (answer.status, words in await answer.text()) == (code, True), path


async def test_logs_come_from_the_agent_while_it_lives(kubelet):
    pod, session = kubelet
    pod.agent = Agent()
    async with session().get("/containerLogs/ns/p/c?follow=true&tailLines=2") as answer:
        assert await answer.text() == "one\ntwo\n"
    kind, arguments = pod.agent.opened[0]
    assert kind == "logs" and arguments["follow"] and arguments["tailLines"] == 2
    assert pod.agent.stream.closed


async def test_logs_come_from_files_after_it(kubelet):
    pod, session = kubelet
    folder = pod.directory / "logs" / "c"
    folder.mkdir(parents=True)
    (folder / "0.log").write_text("2026-01-02T03:04:05.000000000Z stdout F old\n")
    (folder / "1.log").write_text(
        "".join(f"2026-01-02T03:04:0{i}.000000000Z stdout F line {i}\n" for i in range(3))
    )
    api = session()
    async with api.get("/containerLogs/ns/p/c?tailLines=2&timestamps=true") as answer:
        assert await answer.text() == (
            "2026-01-02T03:04:01.000000000Z line 1\n2026-01-02T03:04:02.000000000Z line 2\n"
        )
    pod.status["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1}}
    async with api.get("/containerLogs/ns/p/c?previous=true") as answer:
        assert await answer.text() == "old\n"


async def test_follow_in_files_ends_with_the_pod(tmp_path):
    path = tmp_path / "logs" / "c" / "0.log"
    path.parent.mkdir(parents=True)
    path.write_text("2026-01-02T03:04:05.000000000Z stdout F one\n")
    asked = iter([True, False])

    def running():
        more = next(asked)
        if not more:
            append(path, "2026-01-02T03:04:06.000000000Z stdout F two\n")
        return more

    parts = [p async for p in read_files(tmp_path, "c", LogOptions(follow=True), running)]
    assert b"".join(parts) == b"one\ntwo\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as f:
        f.write(text)


async def test_exec_passes_bytes_and_the_exit_through(kubelet):
    pod, session = kubelet
    pod.agent = Agent()
    path = "/exec/ns/p/u/c?command=cat&command=-&input=1&output=1"
    async with session().ws_connect(path, protocols=["v5.channel.k8s.io"]) as ws:
        assert ws.protocol == "v5.channel.k8s.io"
        assert await ws.receive_bytes() == b"\x01"
        await ws.send_bytes(b"\x00abc")
        assert await ws.receive_bytes() == b"\x01ABC"
        await ws.send_bytes(b"\xff\x00")
        final = await ws.receive_bytes()
        assert final[0] == ERROR and json.loads(final[1:]) == {"status": "Success"}
        assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE
    assert pod.agent.opened == [
        ("exec", {"container": "c", "tty": False, "stdin": True, "command": ["cat", "-"]})
    ]
    assert pod.agent.stream.closed


async def test_a_stream_that_breaks_is_a_failure_with_words(kubelet):
    pod, session = kubelet
    pod.agent = Agent()
    async with session().ws_connect(
        "/attach/ns/p/c?output=1", protocols=["v5.channel.k8s.io"]
    ) as ws:
        await ws.receive_bytes()
        pod.agent.stream.error = "the connection to the pod's agent was lost"
        pod.agent.stream.queue.put_nowait(None)
        final = await ws.receive_bytes()
        assert final[0] == ERROR
        assert json.loads(final[1:])["message"] == pod.agent.stream.error


async def test_pods_are_listed(kubelet):
    _, session = kubelet
    async with session().get("/runningpods/") as answer:
        listed = await answer.json()
    assert [p["metadata"]["name"] for p in listed["items"]] == ["p"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LogOptions(follow=True), "line 0\nline 1\nline 2\nline 3\n"),
        (LogOptions(follow=True, tail=1), "line 1\nline 2\nline 3\n"),
        (LogOptions(limit=16), "line 0\nline 1\nli"),
        (LogOptions(limit=14), "line 0\nline 1\n"),
    ],
)
async def test_the_files_go_on_where_a_lost_agent_stopped(tmp_path, options, expected):
    pod = Pod(tmp_path)
    pod.agent = Agent()
    told = [f"line {i}\n".encode() for i in range(2)][-(options.tail or 2) :]
    folder = tmp_path / "logs" / "c"
    folder.mkdir(parents=True)
    (folder / "0.log").write_text(
        "".join(f"2026-01-02T03:04:0{i}.000000000Z stdout F line {i}\n" for i in range(4))
    )

    def lose(kind, **arguments):
        stream = Stream()
        stream.error = "lost"
        for text in told:
            stream.queue.put_nowait((STDOUT, text))
        stream.queue.put_nowait(None)
        return stream

    pod.agent.open = lose
    parts = [part async for part in pod_log(pod, "c", options, read_files)]
    assert b"".join(parts).decode() == expected


@pytest.mark.parametrize("rotations", [1, 2, 5])
async def test_nor_does_a_rotation_meanwhile_lose_any(tmp_path, rotations):
    pod = Pod(tmp_path)
    pod.agent = Agent()
    folder = tmp_path / "logs" / "c"
    folder.mkdir(parents=True)
    (folder / "0.log.20260101-000000-000000000").write_text(line(99))
    (folder / "0.log").write_text(line(0) + line(1))

    def lose(kind, **arguments):
        for number in range(rotations):
            (folder / "0.log").rename(folder / f"0.log.2026010{2 + number}-000000-000000000")
            (folder / "0.log").write_text(line(2 + number))
        stream = Stream()
        stream.error = "lost"
        stream.queue.put_nowait((STDOUT, b"line 0\n"))
        stream.queue.put_nowait(None)
        return stream

    pod.agent.open = lose
    options = LogOptions(follow=True)
    parts = [part async for part in pod_log(pod, "c", options, read_files)]
    assert b"".join(parts).decode() == "".join(f"line {i}\n" for i in range(2 + rotations))


def line(number):
    return f"2026-01-02T03:04:05.{number:09}Z stdout F line {number}\n"


# --- what pods use


async def test_metrics_as_kubectl_top_asks_for_them(kubelet):
    pod, session = kubelet
    pod.agent = Agent()
    pod.object["spec"]["nodeName"] = "main"
    pod.object["metadata"]["labels"] = {"app": "x"}
    pod.status = status({"running": {"startedAt": "1970-01-01T00:15:00Z"}}) | {"phase": "Running"}
    base = "/apis/metrics.k8s.io/v1beta1"
    aggregator = session(AGGREGATOR[0])
    async with aggregator.get(f"{base}/namespaces/ns/pods/p") as answer:
        whole = await answer.json()
    # five seconds in the hundred since it started
    assert whole["containers"] == [{"name": "c", "usage": {"cpu": "50000000n", "memory": "3072Ki"}}]
    assert whole["window"] == "100.000s"
    async with aggregator.get(f"{base}/nodes") as answer:
        nodes = (await answer.json())["items"]
    assert [(n["metadata"]["name"], n["usage"]["memory"]) for n in nodes] == [("main", "3072Ki")]
    for query, count in (("app=x", 1), ("app!=x", 0), ("app in (y, x),!other", 1), ("", 1)):
        async with aggregator.get(f"{base}/pods", params={"labelSelector": query}) as answer:
            assert len((await answer.json())["items"]) == count, query
    async with aggregator.get(f"{base}/pods", params={"labelSelector": "a b"}) as answer:
        assert answer.status == 400
    async with aggregator.get(f"{base}/namespaces/ns/pods/other") as answer:
        assert (await answer.json())["reason"] == "NotFound"
    async with aggregator.get(base) as answer:
        kinds = [r["kind"] for r in (await answer.json())["resources"]]
    assert kinds == ["NodeMetrics", "PodMetrics"]


async def test_the_kubelets_own_metrics(kubelet):
    pod, session = kubelet
    pod.agent = Agent()
    pod.status = status({"running": {"startedAt": "1970-01-01T00:15:00Z"}}) | {"phase": "Running"}
    async with session().get("/stats/summary") as answer:
        whole = await answer.json()
    assert whole["node"]["memory"]["availableBytes"] == (1 << 30) - (3 << 20)
    assert whole["pods"][0]["podRef"] == {"name": "p", "namespace": "ns", "uid": "u"}
    assert whole["pods"][0]["containers"][0]["cpu"]["usageCoreNanoSeconds"] == 5_000_000_000
    async with session().get("/metrics/resource") as answer:
        text = await answer.text()
    labels = '{container="c",namespace="ns",pod="p"}'
    assert f"container_cpu_usage_seconds_total{labels} 5\n" in text
    assert f"container_start_time_seconds{labels} 900\n" in text
    assert "resource_scrape_error 0\n" in text
    async with session().get("/metrics") as answer:
        text = await answer.text()
    assert "kubelet_running_pods 1\n" in text and 'kubelet_node_name{node="main"} 1\n' in text
    async with session().get("/configz") as answer:
        assert (await answer.json())["kubeletconfig"]["maxPods"] == 7


async def test_each_of_the_api_servers_certificates_opens_its_own_part_alone(kubelet):
    _, session = kubelet
    base = "/apis/metrics.k8s.io/v1beta1"
    for name, path, allowed in (
        (API_SERVER[0], "/pods", True),
        (API_SERVER[0], base, False),
        (AGGREGATOR[0], base, True),
        (AGGREGATOR[0], "/pods", False),
    ):
        async with session(name).get(path) as answer:
            assert answer.status == (200 if allowed else 403), (name, path)


def test_a_rate_is_of_the_time_between_two_samples():
    then = {"time": 100.0, "containers": {"c": {"cpuSeconds": 5.0}}}
    now = {
        "time": 110.0,
        "containers": {"c": {"cpuSeconds": 10.0, "memoryBytes": 1, "processes": 1}},
    }
    assert stats.usage(now, then, {"c": 50.0})["c"].cpu_cores == 0.5
    # it was restarted between them
    assert stats.usage(now, then, {"c": 105.0})["c"].cpu_cores == 2.0
    assert stats.usage(now, None, {"c": 90.0})["c"].window == 20.0


def test_labels_are_escaped():
    line = stats.metric("m", "gauge", "t", [({"a": 'x"\n\\'}, 1.0)]).splitlines()[-1]
    assert line == 'm{a="x\\"\\n\\\\"} 1'
