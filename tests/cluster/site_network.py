"""What an administrator may install for `network: site`, as small as can be: a daemon of root's on
every node that gives a user's network namespace a routed device, and the program that asks it.

    site_network.py NUMBER OTHER_NUMBER=OTHER_ADDRESS…     the daemon of node NUMBER
    site_network.py                                        the program: called like a CNI plugin

Pods of node N have the addresses 172.30.N.0/24."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SOCKET = "\0site-network"
GATEWAY = "169.254.1.1"


def ip(*words: str, inside: int = -1) -> None:
    enter = ["nsenter", f"--net=/proc/self/fd/{inside}"] if inside >= 0 else []
    fds = [inside] if inside >= 0 else []
    subprocess.run([*enter, "ip", *words], check=True, pass_fds=fds)


def add(node: str, number: int, netns: int) -> str:
    address, name = f"172.30.{node}.{number}", f"site{number}"
    peer = ["peer", "name", "eth0", "netns", f"/proc/self/fd/{netns}"]
    subprocess.run(["ip", "link", "add", name, "type", "veth", *peer], check=True, pass_fds=[netns])
    Path(f"/proc/sys/net/ipv4/conf/{name}/proxy_arp").write_text("1")
    ip("link", "set", name, "up")
    ip("route", "add", address, "dev", name)
    ip("address", "add", f"{address}/32", "dev", "eth0", inside=netns)
    ip("link", "set", "eth0", "up", inside=netns)
    ip("route", "add", GATEWAY, "dev", "eth0", inside=netns)
    ip("route", "add", "default", "via", GATEWAY, inside=netns)
    return address


def serve(node: str, others: list[str]) -> None:
    for other in others:
        number, _, address = other.partition("=")
        ip("route", "replace", f"172.30.{number}.0/24", "via", address)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(SOCKET)
    listener.listen(64)
    print("ready", flush=True)
    numbers: dict[str, int] = {}
    while True:
        asking, _ = listener.accept()
        with asking:
            data, fds, _, _ = socket.recv_fds(asking, 4096, 1)
            command, _, pod = data.decode().partition(" ")
            if command == "ADD":
                number = numbers[pod] = max(numbers.values(), default=1) + 1
                asking.send(add(node, number, fds[0]).encode())
            else:
                subprocess.run(["ip", "link", "del", f"site{numbers.pop(pod)}"], check=True)
                asking.send(b"gone")
            for fd in fds:
                os.close(fd)


def ask() -> None:
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon.connect(SOCKET)
    netns = os.open(os.environ["CNI_NETNS"], os.O_RDONLY)
    words = f"{os.environ['CNI_COMMAND']} {os.environ['CNI_CONTAINERID']}"
    socket.send_fds(daemon, [words.encode()], [netns])
    answer = daemon.recv(100).decode()
    if os.environ["CNI_COMMAND"] == "ADD":
        print(json.dumps({"cniVersion": "1.0.0", "ips": [{"address": f"{answer}/32"}]}))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else ask()
