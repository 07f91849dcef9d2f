"""The process beside each agent that holds the node network open, and runs it when it is its turn.

It stays in the node's own namespaces. All keepers of a user's cluster on a node know each other by
an abstract Unix socket (unix(7)): who could bind its name is the owner, runs the daemons and hands
the namespaces as descriptors to the others, who keep them open and their connections to the owner.
When those connections end, one of them is the next owner, in the same namespaces: pods' addresses
and the connections between pods live on. When the last keeper ends, nothing is left.

Messages are JSON objects, one per packet:
    member → owner   {"facts": NetworkFacts}          at first, and when they change; with the two
                                                      descriptors if it has them already
    owner → member   {"namespaces": true}             with the two descriptors
                     {"ready": {subnet, network, mtu, hostIP, subnetFile, base}}
                     {"error": sentence}              it is not ready, or not whole, because …
The agent has the same conversation with its keeper, whoever the owner is.

Pods outlive an upgrade, so keepers of different releases share a node. Therefore these messages are
only ever extended: no key changes its meaning or goes away, a reader ignores what it does not know
and does without what is not there. tests/unit/test_agent_releases.py has the first release's.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from array import array
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

from .journal import note
from .namespaces import NamespaceError
from .nodenet import Namespaces, make_namespaces
from .syscalls import peer_uid

_NAMES = 8  # other users can take a name before us; then the next one is tried
_PACKET = 1 << 18
_RETRY = 0.5  # seconds until an owner's failed start is tried again


class Gone(Exception):
    """The other end of a connection is closed."""


def send(to: socket.socket, message: Dict[str, Any], fds: Optional[Sequence[int]] = None) -> None:
    """Gone if nobody receives any more, or has not for long: a keeper never waits for another."""
    try:
        # not send_fds: before Python 3.13 it does not pass flags on
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        to.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)
    except OSError as e:
        raise Gone(str(e)) from None


def receive(peer: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    """(message, descriptors); Gone at the end."""
    try:
        data, fds, _, _ = socket.recv_fds(peer, _PACKET, 4)
    except OSError as e:
        raise Gone(str(e)) from None
    if not data:
        raise Gone("it ended")
    for fd in fds:
        os.set_inheritable(fd, False)
    message: Dict[str, Any] = json.loads(data)
    return message, list(fds)


def start_keeper(network: Dict[str, Any]) -> Tuple[int, socket.socket]:
    """Forks the keeper; (its process id, the agent's end of the conversation). It ends when that
    is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        ours.close()
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the pod's end is this process's, no signal
        Keeper(network, theirs).run()
    except Gone:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(0)


class Keeper:
    def __init__(self, network: Dict[str, Any], agent: socket.socket) -> None:
        self.agent = agent
        self.facts: Dict[str, Any] = network["facts"]
        self.spaces: Optional[Namespaces] = None
        self.ready: Optional[Dict[str, Any]] = None  # what an owner said
        self._name = "\0hpk-net-%d-%s" % (os.getuid(), network["cluster"])

    def run(self) -> None:
        """Until the agent is gone."""
        while True:
            found, peer = self._meet()
            if found:
                self._follow(peer)
            else:
                self._own(peer)

    def _meet(self) -> Tuple[bool, socket.socket]:
        """(True, a connection to the owner) or (False, the listening socket of this, the owner)."""
        number = 0
        while number < _NAMES:
            name = "%s-%d" % (self._name, number)
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                peer.connect(name)
                if peer_uid(peer) == os.getuid():
                    return True, peer
                number += 1
                peer.close()
                continue
            except ConnectionRefusedError:
                peer.close()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                listener.bind(name)
                listener.listen(1024)
                return False, listener
            except OSError:
                listener.close()  # another one was faster, and listens in a moment
                time.sleep(0.001)
        raise NamespaceError(
            "other users of node %s hold the names of your node network (%s)"
            % (socket.gethostname(), self._name[1:])
        )

    # --- a member ----------------------------------------------------------------------------

    def _follow(self, owner: socket.socket) -> None:
        """Passes messages on, until the owner ends; Gone when the agent does."""
        with owner, contextlib.suppress(_OwnerGone):
            self._to_owner(owner, {"facts": self.facts}, self.spaces)
            poll = select.poll()
            for one in (owner, self.agent):
                poll.register(one, select.POLLIN)
            while True:
                for fd, _ in poll.poll():
                    if fd == owner.fileno():
                        self._from_owner(owner)
                    else:
                        message, _ = receive(self.agent)
                        self.facts = newer(self.facts, message.get("facts"))
                        self._to_owner(owner, message)

    def _to_owner(
        self, owner: socket.socket, message: Dict[str, Any], fds: Optional[Sequence[int]] = None
    ) -> None:
        try:
            send(owner, message, fds)
        except Gone:
            raise _OwnerGone from None

    def _from_owner(self, owner: socket.socket) -> None:
        try:
            message, fds = receive(owner)
        except Gone:
            raise _OwnerGone from None
        if "namespaces" in message:
            known, self.spaces = self.spaces, Namespaces(*fds)
            if known is not None:
                for fd in known:
                    os.close(fd)
                return  # the same ones, of a new owner
        self.ready = message.get("ready") or self.ready
        send(self.agent, message, fds)

    # --- the owner ---------------------------------------------------------------------------

    def _own(self, listener: socket.socket) -> NoReturn:
        from .owner import Owner

        first = self.spaces is None
        while self.spaces is None:
            try:
                self.spaces = make_namespaces()
            except NamespaceError as e:
                send(self.agent, {"error": str(e)})
                if select.select([self.agent], [], [], _RETRY)[0]:
                    message, _ = receive(self.agent)
                    self.facts = newer(self.facts, message.get("facts"))
        members = self._waiting(listener)
        if first:
            send(self.agent, {"namespaces": True}, list(self.spaces))
        else:
            note("this job's agent now runs the node network")
        Owner(self, listener, members).run()

    def _waiting(self, listener: socket.socket) -> List[socket.socket]:
        """The members that came already. When an owner ends, a newcomer may be faster than those
        who have the network open: then theirs is the network."""
        members = []
        while select.select([listener], [], [], 0)[0]:
            member, _ = listener.accept()
            members.append(member)
            if peer_uid(member) == os.getuid() and select.select([member], [], [], 0)[0]:
                with contextlib.suppress(Gone):
                    message, fds = receive(member)
                    self.facts = newer(self.facts, message.get("facts"))
                    if fds:
                        self.spaces = Namespaces(*fds)
        return members


class _OwnerGone(Exception):
    pass


def newer(facts: Dict[str, Any], others: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """The ones that were true last."""
    return others if others and others["revision"] > facts["revision"] else facts
