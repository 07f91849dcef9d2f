"""kubectl port-forward, as someone with a program on the login node uses it."""

import hashlib
import random
import re
import subprocess
from collections.abc import Iterator

import pytest
from conftest import Namespace, eventually, pod

# Run on the login node: many clients at once, each with an answer of its own.
MANY = r"""
import sys, urllib.request
from concurrent.futures import ThreadPoolExecutor

def ask(word):
    url = f"http://127.0.0.1:{sys.argv[1]}/echo?msg={word}"
    return urllib.request.urlopen(url, timeout=60).read().decode() == word

with ThreadPoolExecutor(50) as pool:
    print(sum(pool.map(ask, [str(n) * 100 for n in range(200)])))
"""
# Sends and receives at once, and half-closes before everything is back.
LARGE = r"""
import hashlib, os, socket, sys, threading
payload = os.urandom(64 << 20)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as s:
    def send():
        s.sendall(payload)
        s.shutdown(socket.SHUT_WR)
    threading.Thread(target=send).start()
    received = hashlib.sha256()
    while data := s.recv(1 << 16):
        received.update(data)
print(received.digest() == hashlib.sha256(payload).digest())
"""


@pytest.fixture
def forward(ns: Namespace) -> Iterator[object]:
    """forward(target, port) → the local port that leads there."""
    running: list[subprocess.Popen[str]] = []

    def start(target: str, port: int, **env: str) -> int:
        words = ["env", *(f"{k}={v}" for k, v in env.items()), "kubectl", "-n", ns.name]
        process = ns.user.popen(*words, "port-forward", "--address=127.0.0.1", target, f":{port}")
        running.append(process)
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+) ->", process.stdout.readline())
        assert found, "kubectl says which port it took"
        return int(found[1])

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host_network", [False, True])
def test_many_connections_and_a_large_one_lose_nothing(
    ns: Namespace, registry: str, busybox: str, forward, host_network: bool
) -> None:
    port = random.randrange(20000, 30000)  # of the node's, where pods have no network of their own
    ns.create(
        {
            **(echo := pod("echo", "nc", "-ll", "-p", str(port + 1), "-e", "cat", image=busybox)),
            "spec": {
                **echo["spec"],
                "hostNetwork": host_network,
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    *echo["spec"]["containers"],
                    {
                        "name": "http",
                        "image": f"{registry}/agnhost:2.63.0",
                        "args": ["netexec", f"--http-port={port}", f"--udp-port={port}"],
                    },
                ],
            },
        }
    )
    ns.wait_ready("echo")
    assert ns.user.run("python3", "-c", MANY, str(forward("pod/echo", port))).out == "200\n"
    assert ns.user.run("python3", "-c", LARGE, str(forward("pod/echo", port + 1))).out == "True\n"


def test_an_answer_after_the_end_of_input_arrives(ns: Namespace, busybox: str, forward) -> None:
    """Half-closed: what the pod says once it has read everything still comes; both through a
    WebSocket and by the older upgrade to SPDY."""
    port = random.randrange(20000, 30000)
    ns.create(
        pod(
            "sums",
            "nc",
            "-ll",
            "-p",
            str(port),
            "-e",
            "sha256sum",
            image=busybox,
            terminationGracePeriodSeconds=0,
        )
    )
    ns.wait_ready("sums")
    text = "x" * 100_000
    talk = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "s.sendall(sys.stdin.buffer.read()); s.shutdown(socket.SHUT_WR); print(s.recv(64).decode())"
    )
    for websockets in ("true", "false"):
        local = forward("pod/sums", port, KUBECTL_PORT_FORWARD_WEBSOCKETS=websockets)
        done = ns.user.run("python3", "-c", talk, str(local), stdin=text)
        assert done.out.split()[0] == hashlib.sha256(text.encode()).hexdigest()


def test_a_port_nobody_listens_at_is_named(ns: Namespace, busybox: str, forward) -> None:
    ns.create(pod("quiet", "sleep", "1000", image=busybox, terminationGracePeriodSeconds=0))
    ns.wait_ready("quiet")
    process = ns.user.popen("kubectl", "-n", ns.name, "port-forward", "pod/quiet", ":17")
    assert process.stdout is not None
    local = re.search(r":(\d+) ->", process.stdout.readline())
    assert local
    ns.user.sh(f"curl -s -m 10 http://127.0.0.1:{local[1]}/ || true")
    try:
        _, words = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "failed to connect to localhost:17" in words and "refused" in words


def test_exec_and_attach_by_clients_that_know_only_spdy(ns: Namespace, busybox: str) -> None:
    reader = "while read line; do echo got $line; done"
    ns.create(
        pod("old", "sh", "-c", reader, image=busybox, terminationGracePeriodSeconds=0,
            container={"stdin": True})
    )  # fmt: skip
    ns.wait_ready("old")
    spdy = ("env", "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false", "kubectl", "-n", ns.name)
    done = ns.user.run(
        *spdy, "exec", "-i", "old", "--", "sh", "-c", "cat; echo err >&2; exit 3",
        check=False, stdin="in\n" * 100_000,
    )  # fmt: skip
    assert (done.code, done.out) == (3, "in\n" * 100_000)
    assert done.err.startswith("err\n")
    attached = ns.user.popen(*spdy, "attach", "-i", "-q", "old")
    assert attached.stdin is not None and attached.stdout is not None
    try:
        attached.stdin.write("hello\n")
        attached.stdin.flush()
        assert attached.stdout.readline() == "got hello\n"
    finally:
        attached.kill()
        attached.communicate()
    eventually("the log has it too", lambda: "got hello" in ns.logs("old"))


def test_a_tunnel_leads_to_the_api_through_the_job(ns: Namespace, busybox: str) -> None:
    ns.create(pod("far", "sleep", "1000", image=busybox, terminationGracePeriodSeconds=0))
    ns.wait_ready("far")
    tunnel = ns.user.popen("hpk", "tunnel")
    assert tunnel.stdout is not None
    try:
        said = tunnel.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+ until .*KUBECONFIG=(\S+)", said)
        assert found, said
        script = f"KUBECONFIG={found[1]} kubectl -n {ns.name} exec -i far -- sha256sum"
        text = "x" * 1_000_000
        done = ns.user.run("sh", "-c", script, stdin=text)
        assert done.out.split()[0] == hashlib.sha256(text.encode()).hexdigest()
        assert ns.user.sh(f"grep -c 127.0.0.1 {found[1]}; stat -c %a {found[1]}").out == "1\n600\n"
    finally:
        tunnel.terminate()
        tunnel.communicate()


def test_a_quick_command_of_kubectl_run_is_printed_once(ns: Namespace, busybox: str) -> None:
    """Whether kubectl attached in time, or came when the container had ended."""
    run = ("run", "--restart=Never", "-i", "--rm", "-q", f"--image={busybox}")
    for name, command in (("quick", "echo once"), ("reads", "cat; echo once")):
        done = ns.kubectl(*run, name, "--", "sh", "-c", command, stdin="given\n")
        assert done.out.count("once") == 1 and done.out.count("given") == (name == "reads")
