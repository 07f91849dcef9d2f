"""The owner's part of a keeper: its members, its daemons, and the facts they run by."""

import contextlib
import json
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING, Any, Dict, List, NoReturn, Optional, Set

from .daemons import Daemons
from .journal import note
from .syscalls import peer_uid

if TYPE_CHECKING:
    from .keeper import Keeper


class Owner:
    def __init__(
        self, keeper: "Keeper", listener: socket.socket, members: List[socket.socket]
    ) -> None:
        assert keeper.spaces is not None
        self._spaces = keeper.spaces
        self._agent = keeper.agent
        self._facts = keeper.facts
        self._ready: Optional[Dict[str, Any]] = keeper.ready
        self._error = ""
        self._listener = listener
        self._first = members
        self._members: Set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._daemons = Daemons(
            self._spaces, self._facts, self._selector, self._is_ready, self._failed
        )

    def run(self) -> NoReturn:
        """Until the agent is gone: Gone."""
        from .keeper import Gone

        waking, wake = os.pipe()
        os.set_blocking(waking, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        def child_ended() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(waking, 4096)
            self._daemons.collect()

        register = self._selector.register
        register(waking, selectors.EVENT_READ, child_ended)
        register(self._listener, selectors.EVENT_READ, self._accept)
        register(self._agent, selectors.EVENT_READ, lambda: self._hear(self._agent))
        for member in self._first:
            self._admit(member)
        if self._ready is not None:
            self._daemons.keep_subnet(self._ready["subnetFile"])
        self._reread()
        self._daemons.start()
        try:
            while True:
                for key, _ in self._selector.select(self._daemons.timeout()):
                    # what was dealt with before in this round may have closed it
                    if key.fileobj in self._selector.get_map():
                        key.data()
                self._daemons.tick()
        except Gone:
            self._daemons.stop()
            raise

    # --- members -----------------------------------------------------------------------------

    def _accept(self) -> None:
        self._admit(self._listener.accept()[0])

    def _admit(self, member: socket.socket) -> None:
        from .keeper import Gone, send

        if peer_uid(member) != os.getuid():
            member.close()
            return
        try:
            send(member, {"namespaces": True}, list(self._spaces))
            for message in self._standing():
                send(member, message)
        except Gone:
            member.close()
            return
        self._members.add(member)
        self._selector.register(member, selectors.EVENT_READ, lambda: self._hear(member))

    def _standing(self) -> List[Dict[str, Any]]:
        """What somebody new is told."""
        if self._ready is not None:
            return [{"ready": self._ready}]
        return [{"error": self._error}] if self._error else []

    def _hear(self, member: socket.socket) -> None:
        from .keeper import Gone, newer, receive

        try:
            message, fds = receive(member)
        except Gone:
            if member is self._agent:
                raise
            self._forget(member)
            return
        if fds and os.fstat(fds[1]).st_ino != os.fstat(self._spaces.net).st_ino:
            note("a pod of this node is in another node network, which nobody runs any more")
        for fd in fds:
            os.close(fd)
        self._change(newer(self._facts, message.get("facts")))

    def _forget(self, member: socket.socket) -> None:
        self._members.discard(member)
        self._selector.unregister(member)
        member.close()

    def _tell(self, message: Dict[str, Any]) -> None:
        from .keeper import Gone, send

        send(self._agent, message)
        for member in list(self._members):
            try:
                send(member, message)
            except Gone:
                self._forget(member)

    # --- the network -------------------------------------------------------------------------

    def _change(self, facts: Dict[str, Any]) -> None:
        if facts is not self._facts:
            self._facts = facts
            self._daemons.change(facts)

    def _reread(self) -> None:
        """The facts' own file may be newer than what any member knows."""
        from .keeper import newer

        with contextlib.suppress(OSError, ValueError, KeyError), open(self._facts["file"]) as f:
            self._facts = newer(self._facts, json.load(f))
            self._daemons.set_facts(self._facts)

    def _is_ready(self, data: Dict[str, Any]) -> None:
        self._error = ""
        before = self._ready or {"base": int.from_bytes(os.urandom(2), "big")}
        data["base"] = before["base"]
        if data != self._ready:
            self._ready = data
            self._tell({"ready": data})

    def _failed(self, sentence: str) -> None:
        note("node network: %s" % sentence)
        self._error = sentence
        self._reread()
        self._tell({"error": sentence})
