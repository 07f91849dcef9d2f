"""The daemons of a cluster, each started in its node and waited for."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from .base import CLEAN_ENV, SandboxError, last_line, run_dir, wait_for
from .nodes import inside
from .rootfs import USERS
from .slurmconf import HEAD, HEAD_ADDRESS, Options

SOCKET = "/run/mysqld/mysqld.sock"


def call(node: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a node as root and returns its output, unchecked."""
    return subprocess.run(
        inside(node, argv), env=CLEAN_ENV, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def launch(node: str, name: str, argv: Sequence[str], user: str = "") -> subprocess.Popen[bytes]:
    """Starts a program; what it prints goes to NAME.out among the node's logs."""
    if user:
        argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--", *argv]
    with (run_dir() / "log" / node / f"{name}.out").open("ab") as out:
        return subprocess.Popen(
            inside(node, argv), env=CLEAN_ENV, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip


def daemon(
    node: str, name: str, argv: Sequence[str], user: str = "", *, foreground: bool = False
) -> None:
    """Starts a daemon and waits until it put itself in the background.

    One that stays in the foreground is put there by a shell; the node's PID 1 adopts it.
    """
    if foreground:
        argv = ["/bin/sh", "-c", '"$@" & :', "sh", *argv]
    if launch(node, name, argv, user).wait():
        log = run_dir() / "log" / node / f"{name}.out"
        raise SandboxError(f"{name} did not start on {node}: {last_line(log)} (see {log.parent})")


def folder(node: str, path: str, owner: str, mode: str = "700") -> None:
    call(node, "install", "-d", "-o", owner, "-g", owner, "-m", mode, path)


def munge(node: str) -> None:
    folder(node, "/run/munge", "munge", "755")
    daemon(node, "munged", ["/usr/sbin/munged"], "munge")


def head(options: Options) -> None:
    """Everything the head node runs; returns when slurmctld answers."""
    munge(HEAD)
    # /etc/hosts is all there is; another name does not exist, which is better than REFUSED
    dns = ["dnsmasq", "--no-resolv", "--address=/#/", "--log-facility=/var/log/slurm/dnsmasq.log",
           f"--listen-address={HEAD_ADDRESS}", "--bind-interfaces", "--user=root"]  # fmt: skip
    daemon(HEAD, "dnsmasq", dns)
    for port in (5000, 5001):
        argv = ["docker-registry", "serve", f"/etc/slurm/registry-{port}.yml"]
        daemon(HEAD, f"registry-{port}", argv, foreground=True)
    if options.accounting:
        database()
    slurmctld()


def slurmctld() -> None:
    """Starts slurmctld unless it runs; returns when it answers."""
    folder(HEAD, "/var/spool/slurmctld", "slurm")

    def answers() -> bool:
        if call(HEAD, "pgrep", "-x", "slurmctld").returncode:
            daemon(HEAD, "slurmctld", ["slurmctld"])
        return not call(HEAD, "scontrol", "ping").returncode

    wait_for("an answer of slurmctld", answers, 30)


def slurmd(nodes: Sequence[str]) -> None:
    """munge and slurmd on these nodes; returns when Slurm calls all of them idle."""
    for node in nodes:
        munge(node)
        folder(node, "/var/spool/slurmd", "root", "755")
    children = [(node, launch(node, "slurmd", ["slurmd", "-N", node])) for node in nodes]
    for node, child in children:
        if child.wait():
            raise SandboxError(f"slurmd did not start on {node}; see {run_dir() / 'log' / node}")
    wait_for("every node idle", lambda: idle() >= set(nodes), 60)


def idle() -> set[str]:
    """The nodes Slurm has work for."""
    lines = call(HEAD, "sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
    states = [line.split() for line in lines]
    return {name for name, state in states if state in ("idle", "mixed", "allocated")}


def database() -> None:
    """MariaDB, slurmdbd, and associations for every user."""
    for path in ("/var/lib/mysql", "/run/mysqld"):
        folder(HEAD, path, "slurm")
    install = ["mariadb-install-db", "--no-defaults", "--datadir=/var/lib/mysql",
               "--auth-root-authentication-method=normal", "--skip-test-db"]  # fmt: skip
    daemon(HEAD, "mariadb-install-db", install, "slurm")
    server = ["mariadbd", "--no-defaults", "--datadir=/var/lib/mysql", "--skip-networking",
              f"--socket={SOCKET}", "--innodb-buffer-pool-size=64M",
              "--innodb-lock-wait-timeout=900", "--skip-log-bin"]  # fmt: skip
    daemon(HEAD, "mariadbd", server, "slurm", foreground=True)
    sql = ("mariadb", "--no-defaults", f"--socket={SOCKET}", "-u", "root", "-e")
    wait_for("an answer of MariaDB", lambda: not call(HEAD, *sql, "SELECT 1").returncode, 60)
    must("mariadb", *sql[1:], "CREATE USER slurm@localhost; "
         "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;")  # fmt: skip
    daemon(HEAD, "slurmdbd", ["slurmdbd"])
    clusters = ("sacctmgr", "-n", "list", "cluster")
    wait_for("an answer of slurmdbd", lambda: not call(HEAD, *clusters).returncode, 30)
    must("sacctmgr", "-i", "add", "cluster", "sandbox")
    must("sacctmgr", "-i", "add", "account", "users", "Description=users", "Organization=sandbox")
    for user in USERS:
        must("sacctmgr", "-i", "add", "user", user, "Account=users")


def must(*argv: str) -> None:
    done = call(HEAD, *argv)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise SandboxError(f"{' '.join(argv)} on {HEAD} failed: {said}")
