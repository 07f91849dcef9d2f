"""A pod's network namespace where the site has a network for pods (`network: site`).

An administrator's program gives it an interface. It is called like a CNI plugin
(https://www.cni.dev/docs/spec/): CNI_COMMAND is ADD or DEL, CNI_CONTAINERID the pod's uid,
CNI_NETNS a path of the namespace, CNI_IFNAME eth0; on stdin there is a configuration with nothing
but a name; what ADD prints has the address in `ips`, and on failure the reason in `msg`. It runs as
the user, on the node and outside of the pod: what rights it has beyond that (setuid, a daemon's
socket) is the administrator's affair. DEL comes when the pod is over, or its agent dead.
"""

import json
import os
import select
import signal
import socket
from typing import Any, Dict, Optional

from .journal import note
from .keeper import Gone, receive, send
from .namespaces import Mapper, Mapping, NamespaceError
from .podnet import DEVICE, NetworkNotReady, Place

_CONFIG = {"cniVersion": "1.0.0", "name": "hpk"}
_RETRY = 1.0  # seconds until a failed ADD is tried again


class SiteNetwork:
    """As podnet.PodNetwork."""

    resolver = ""

    def __init__(self, program: str, uid: str, host_ip: str) -> None:
        """In the node's namespaces."""
        self._host_ip = host_ip
        self._mapper = Mapper.prepare(os.getuid(), os.getgid())
        self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._helper = os.fork()
        if self._helper == 0:
            try:
                self._talk.close()
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                _serve(theirs, program, uid)
            finally:
                os._exit(0)
        theirs.close()

    def enter_users(self) -> None:
        """The pod's user namespace is made in the node's own."""

    def map_users(self) -> Optional[Mapping]:
        return self._mapper.run() if self._mapper else None

    def join(self, netns: int) -> None:
        send(self._talk, {}, [netns])

    def place(self, patience: Optional[float]) -> Place:
        """The pod's address. NetworkNotReady if there is none within `patience` seconds (None: as
        long as it takes) or the program failed; it can be asked again."""
        if not select.select([self._talk], [], [], patience)[0]:
            raise NetworkNotReady("the site's program has not answered yet")
        try:
            answer, _ = receive(self._talk)
        except Gone:
            raise NamespaceError("the helper that calls the site's network ended") from None
        if "error" in answer:
            raise NetworkNotReady(answer["error"])
        return Place(answer["ip"], self._host_ip)

    def tell(self, facts: Dict[str, Any]) -> None:
        """There is nothing to tell."""

    def fileno(self) -> int:
        return self._talk.fileno()

    def hear(self) -> bool:
        """Only the helper's end makes it readable."""
        return False

    def close(self) -> None:
        self._talk.close()
        os.waitpid(self._helper, 0)


def _serve(orders: socket.socket, program: str, uid: str) -> None:
    """Until the agent is gone."""
    try:
        _, (netns,) = receive(orders)
    except Gone:
        return  # no pod came of it
    path = "/proc/%d/fd/%d" % (os.getpid(), netns)
    try:
        while True:
            try:
                send(orders, {"ip": address(call(program, "ADD", uid, path))})
                break
            except (OSError, ValueError) as e:
                words = "%s on node %s: %s" % (program, socket.gethostname(), e)
                send(orders, {"error": words[:1000]})
            if select.select([orders], [], [], _RETRY)[0]:
                break  # the agent is gone
        receive(orders)
    except Gone:
        pass
    try:
        call(program, "DEL", uid, path)
    except OSError as e:
        note("the pod's place in the site's network may not be free again: %s" % e)


def call(program: str, command: str, uid: str, netns: str) -> Dict[str, Any]:
    """What it prints. OSError with its words if it fails."""
    import subprocess

    env = {**os.environ, "CNI_COMMAND": command, "CNI_CONTAINERID": uid, "CNI_NETNS": netns,
           "CNI_IFNAME": DEVICE}  # fmt: skip
    done = subprocess.run(
        [program], env=env, input=json.dumps(_CONFIG), capture_output=True, text=True
    )
    try:
        said = json.loads(done.stdout or "{}")
    except ValueError:
        said = {}
    if done.returncode:
        words = said.get("msg") or done.stderr.strip() or "exit code %d" % done.returncode
        raise OSError(words)
    return dict(said)


def address(result: Dict[str, Any]) -> str:
    """The IPv4 address of a CNI result. ValueError if it has none."""
    for one in result.get("ips") or []:
        ip = str(one.get("address", "")).partition("/")[0]
        if "." in ip:
            return ip
    raise ValueError("its answer to ADD has no IPv4 address")
