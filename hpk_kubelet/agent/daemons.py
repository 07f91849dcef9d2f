"""What the owner of a node network runs for it: pasta, flanneld, and whatever the facts name.

All of them are children of the owner and end with it (PR_SET_PDEATHSIG). Nothing of them is left
on the node's disk: flanneld has a file system in memory of its own.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import syscalls
from .namespaces import PATH, find_program
from .nodenet import (
    INTERFACE,
    NODE,
    RESOLVER,
    Interface,
    Namespaces,
    host_interface,
    prepare_network,
    rules,
    run_nft,
)

FIRST_RETRY, LONGEST_RETRY, SOUND = 0.1, 10.0, 30.0  # seconds
WORDS = 2000  # bytes of a daemon's last words that are kept

_FLANNELD = ("vxlanPort", "mtu", "etcd", "flanneld")  # the facts it depends on

# flanneld clears up rules of iptables that are not there in a new namespace, and does not start
# without the program. This answers it faster than the real one, and where there is none.
_IPTABLES = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'iptables v1.8.11 (nf_tables)'\n"


class Daemon:
    """One child and what it said last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.words = b""
        self.pipe = -1
        self.delay = FIRST_RETRY
        self.began = 0.0

    def last_words(self) -> str:
        lines = [line.strip() for line in self.words.decode(errors="replace").splitlines()]
        errors = [line for line in lines if line[:1] in ("E", "F")]  # klog's
        return (errors or [line for line in lines if line] or ["it said nothing"])[-1][:400]


class Daemons:
    """`ready` is called with the network's data when pods may join, `failed` with a sentence."""

    def __init__(
        self,
        spaces: Namespaces,
        facts: Dict[str, Any],
        selector: selectors.BaseSelector,
        ready: Callable[[Dict[str, Any]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._spaces = spaces
        self._facts = facts
        self._selector = selector
        self._ready = ready
        self._failed = failed
        self._pasta, self._flanneld = Daemon("pasta"), Daemon("flanneld")
        self._others: Dict[str, Tuple[Daemon, Dict[str, Any]]] = {}
        self._timers: List[Tuple[float, Callable[[], None]]] = []
        self._talk: Optional[socket.socket] = None
        self._notice: Optional[socket.socket] = None
        self._subnet_file = ""  # the last one flanneld wrote: it keeps its subnet
        self._host = Interface("", "", "")

    # --- time and children -------------------------------------------------------------------

    def timeout(self) -> Optional[float]:
        """Seconds until `tick` is wanted."""
        if not self._timers:
            return None
        return max(0.0, min(at for at, _ in self._timers) - time.monotonic())

    def tick(self) -> None:
        now = time.monotonic()
        due = [call for at, call in self._timers if at <= now]
        self._timers = [(at, call) for at, call in self._timers if at > now]
        for call in due:
            call()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Once, however many ask for it: what ends together is started together."""
        others = [(at, other) for at, other in self._timers if other != call]
        self._timers = [*others, (time.monotonic() + seconds, call)]

    def _spawn(self, daemon: Daemon, become: Callable[[], None]) -> None:
        """Forks the daemon's process; `become` ends in its execve."""
        reading, writing = os.pipe()
        daemon.words, daemon.began = b"", time.monotonic()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                syscalls.die_with_parent(signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                os.setsid()
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                null = os.open(os.devnull, os.O_RDONLY)
                for fd, wanted in ((null, 0), (writing, 1), (writing, 2)):
                    os.dup2(fd, wanted)
                become()
            except BaseException as e:
                os.write(2, ("%s\n" % (str(e) or type(e).__name__)).encode(errors="replace"))
            finally:
                os._exit(126)
        os.close(writing)
        os.set_blocking(reading, False)
        daemon.pid, daemon.pipe = pid, reading
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._hear(daemon))

    def _hear(self, daemon: Daemon) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(daemon.pipe, 1 << 16)
            daemon.words = (daemon.words + data)[-WORDS:]
            if not data:
                self._deafen(daemon)

    def _deafen(self, daemon: Daemon) -> None:
        if daemon.pipe >= 0:
            self._selector.unregister(daemon.pipe)
            os.close(daemon.pipe)
            daemon.pipe = -1

    def _kill(self, daemon: Daemon) -> None:
        if daemon.pid:
            os.kill(daemon.pid, signal.SIGKILL)
            os.waitpid(daemon.pid, 0)
            daemon.pid = 0
        self._deafen(daemon)

    def collect(self) -> None:
        """On SIGCHLD."""
        for daemon in (self._pasta, self._flanneld, *(one for one, _ in self._others.values())):
            if daemon.pid and os.waitpid(daemon.pid, os.WNOHANG)[0]:
                daemon.pid = 0
                while daemon.pipe >= 0:
                    before = daemon.words
                    self._hear(daemon)
                    if daemon.words == before:
                        self._deafen(daemon)
                self._ended(daemon)

    def _ended(self, daemon: Daemon) -> None:
        if time.monotonic() - daemon.began > SOUND:
            daemon.delay = FIRST_RETRY
        self._failed("%s ended: %s" % (daemon.name, daemon.last_words()))
        if daemon is self._pasta or daemon is self._flanneld:
            again = self.start
        else:
            again = self._start_others
        self._later(daemon.delay, again)
        daemon.delay = min(daemon.delay * 2, LONGEST_RETRY)

    def stop(self) -> None:
        self._timers.clear()
        for daemon in (self._flanneld, self._pasta, *(one for one, _ in self._others.values())):
            self._kill(daemon)

    # --- the network itself ------------------------------------------------------------------

    def start(self) -> None:
        """Starts pasta and flanneld, or what of them does not run."""
        self._kill(self._flanneld)
        try:
            facts = self._facts
            self._host = host_interface(facts)
            pasta = _needed("pasta", "it connects a network namespace with the node's network")
            _needed("nft", "it translates addresses in the pods' network")
        except OSError as e:
            self._failed(str(e))
            self._later(LONGEST_RETRY, self.start)
            return
        fresh = not self._pasta.pid
        for old in (self._talk, self._notice):
            if old is not None:
                self._selector.unregister(old)
                old.close()
        self._notice = None
        self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._spawn(self._flanneld, lambda: self._become_flanneld(theirs, fresh))
        theirs.close()
        if fresh:
            argv = self._pasta_argv(pasta, self._flanneld.pid)
            self._selector.register(
                self._talk, selectors.EVENT_READ, lambda: self._start_pasta(argv)
            )
        else:
            self._selector.register(self._talk, selectors.EVENT_READ, self._take_notice)

    def _start_pasta(self, argv: List[str]) -> None:
        assert self._talk is not None
        if self._talk.recv(16) != b"clear":  # its end: told by SIGCHLD
            self._drop_talk()
            return
        self._selector.modify(self._talk, selectors.EVENT_READ, self._take_notice)
        self._spawn(self._pasta, lambda: os.execve(argv[0], argv, os.environ))

    def _drop_talk(self) -> None:
        assert self._talk is not None
        self._selector.unregister(self._talk)
        self._talk.close()
        self._talk = None

    def _pasta_argv(self, pasta: str, inside: int) -> List[str]:
        """`inside`: a process in the namespaces. pasta opens them by name, and the second one with
        rights in the first alone: it may look at nothing outside then."""
        base = "/proc/%d/ns/" % inside
        port = str(self._facts["vxlanPort"])
        return [
            pasta, "--foreground", "--quiet", "--ipv4-only", "--config-net",
            "--userns", base + "user", "--netns", base + "net", "--no-netns-quit",
            "--interface", self._host.name, "--ns-ifname", INTERFACE, "--no-dhcp",
            "--address", self._host.address, "--netmask", self._host.netmask,
            "--mtu", str(self._facts["mtu"]),
            "--udp-ports", port, "--tcp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none",
            # the node's loopback is not for pods; its address is, and its resolver
            "--no-map-gw", "--map-guest-addr", NODE, "--dns-forward", RESOLVER,
        ]  # fmt: skip

    def _become_flanneld(self, talk: socket.socket, fresh: bool) -> None:
        """In the child: prepares the namespace once pasta has made the interface."""
        facts = self._facts
        self._spaces.enter()
        prepare_network(facts, self._host.address, fresh, lambda: talk.send(b"clear"))
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("tmpfs", "/run", "tmpfs", 0, "mode=0700")
        os.mkdir("/run/flannel")
        with open("/run/flannel/subnet.env", "w") as f:
            f.write(self._subnet_file)
        os.mkdir("/run/bin")
        for name in ("iptables", "ip6tables"):
            with open("/run/bin/" + name, "w") as f:
                f.write(_IPTABLES)
            os.chmod("/run/bin/" + name, 0o700)
        notice = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notice.bind("/run/notify")
        socket.send_fds(talk, [b"up"], [notice.fileno()])
        etcd = facts["etcd"]
        argv = [
            facts["flanneld"], "-etcd-endpoints", ",".join(etcd["endpoints"]),
            "-etcd-prefix", etcd["prefix"], "-etcd-cafile", etcd["ca"],
            "-etcd-certfile", etcd["cert"], "-etcd-keyfile", etcd["key"],
            "-iface", INTERFACE, "-subnet-file", "/run/flannel/subnet.env",
            "-ip-masq=false", "-iptables-forward-rules=false",
        ]  # fmt: skip
        env = {"PATH": "/run/bin:" + os.environ.get("PATH", "") + ":" + PATH,
               "NOTIFY_SOCKET": "/run/notify", "GOMEMLIMIT": "48MiB"}  # fmt: skip
        os.execve(argv[0], argv, env)

    def _take_notice(self) -> None:
        assert self._talk is not None
        data, fds, _, _ = socket.recv_fds(self._talk, 16, 1)
        self._drop_talk()
        if data == b"up" and fds:
            self._notice = socket.socket(fileno=fds[0])
            self._selector.register(self._notice, selectors.EVENT_READ, self._noticed)

    def _noticed(self) -> None:
        assert self._notice is not None
        if self._notice.recv(256) != b"READY=1":
            return
        try:
            with open("/proc/%d/root/run/flannel/subnet.env" % self._flanneld.pid) as f:
                self._subnet_file = f.read()
        except OSError:
            return  # it ended meanwhile
        values = dict(line.split("=", 1) for line in self._subnet_file.split() if "=" in line)
        self._ready(
            {
                "subnet": values["FLANNEL_SUBNET"], "network": values["FLANNEL_NETWORK"],
                "mtu": int(values["FLANNEL_MTU"]), "hostIP": self._host.address,
                "subnetFile": self._subnet_file,
            }
        )  # fmt: skip
        self._start_others()

    # --- facts -------------------------------------------------------------------------------

    def keep_subnet(self, subnet_file: str) -> None:
        """What the owner before had."""
        self._subnet_file = subnet_file

    def set_facts(self, facts: Dict[str, Any]) -> None:
        """For whatever starts next."""
        self._facts = facts

    def change(self, facts: Dict[str, Any]) -> None:
        """New facts: restarts what depends on what changed."""
        before, self._facts = self._facts, facts
        if any(before[key] != facts[key] for key in ("vxlanPort", "mtu")):
            self._kill(self._pasta)
        if any(before.get(k) != facts.get(k) for k in _FLANNELD):
            self.start()
        elif rules(before, self._host.address) != rules(facts, self._host.address):
            self._apply_rules()
        self._start_others()

    def _apply_rules(self) -> None:
        text = rules(self._facts, self._host.address)
        pid = os.fork()
        if pid == 0:
            try:
                self._spaces.enter()
                run_nft(text)
                os._exit(0)
            except BaseException as e:
                os.write(2, ("hpk: node network: %s\n" % e).encode(errors="replace"))
            finally:
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            self._failed("the pod network's address translation could not be changed")

    def _start_others(self) -> None:
        """Brings the further daemons in line with the facts."""
        wanted = self._facts.get("daemons") or {}
        for name, (daemon, spec) in list(self._others.items()):
            if wanted.get(name) != spec:
                self._kill(daemon)
                del self._others[name]
        if not self._subnet_file:
            return
        for name, spec in wanted.items():
            daemon, _ = self._others.setdefault(name, (Daemon(name), spec))
            if not daemon.pid:
                self._spawn(daemon, lambda spec=spec: self._become(spec))  # type: ignore[misc]

    def _become(self, spec: Dict[str, Any]) -> None:
        self._spaces.enter()
        argv = [
            word.replace("{hostIP}", self._host.address).replace("{node}", socket.gethostname())
            for word in spec["argv"]
        ]
        env = {"PATH": os.environ.get("PATH", "") + ":" + PATH, **spec.get("env", {})}
        os.execve(argv[0], argv, env)


def _needed(program: str, why: str) -> str:
    path = find_program(program)
    if path is None:
        raise OSError("%s is not on the PATH of node %s; %s" % (program, socket.gethostname(), why))
    return path
