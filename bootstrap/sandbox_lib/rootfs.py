"""The root file system every node shares: Debian trixie, with apptainer from sid."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import enter
from .base import CLEAN_ENV, CONTAINED, SandboxError, building, cache_dir, run, run_long, say

PACKAGES = (
    # Slurm and what it stands on
    "slurmctld", "slurmd", "slurm-client", "slurmrestd", "slurmdbd", "slurm-wlm-basic-plugins",
    "munge", "libpmix2t64", "mariadb-server-core", "mariadb-client-core",
    # rootless containers and networks
    "apptainer", "uidmap", "fuse-overlayfs", "squashfuse", "squashfs-tools", "passt",
    "iproute2", "iputils-ping", "nftables", "iptables",
    # HPK and its images
    "python3", "python3-venv", "ca-certificates", "docker-registry", "skopeo", "busybox-static",
    # the node itself
    "tini", "dnsmasq-base", "procps", "curl", "less", "jq", "nano",
)  # fmt: skip

USERS = {"alice": True, "bob": True, "carol": False}
"""Name → has subordinate ids. Everyone's primary group is their own."""

SOURCES = "deb {mirror} trixie main\ndeb {mirror} sid main\n"
PREFERENCES = "Package: *\nPin: release n=sid\nPin-Priority: 50\n"

CUSTOMIZE = r"""
set -e
cd "$1"
for user in $HPK_USERS; do
    chroot . useradd --no-create-home --shell /bin/bash "$user"
done
for user in $HPK_NO_SUBIDS; do
    sed -i "/^$user:/d" etc/subuid etc/subgid
done
mkdir -p opt/hpk etc/slurm var/lib/registry
ln -s /opt/hpk/venv/bin/hpk usr/local/bin/hpk
ln -s /opt/hpk/bin/kubectl usr/local/bin/kubectl
rm -f etc/resolv.conf
"""


def mirror() -> str:
    return os.environ.get("HPK_DEBIAN_MIRROR", "http://deb.debian.org/debian")


def key() -> str:
    """Names what the build makes: another package list or script is another root file system."""
    parts = [PACKAGES, USERS, SOURCES, PREFERENCES, CUSTOMIZE, mirror()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def path() -> Path:
    return cache_dir() / "sandbox" / f"rootfs-{key()}"


def need(*tools: tuple[str, str]) -> None:
    """Installs the Debian packages of missing tools: (tool, package)."""
    missing = sorted({package for tool, package in tools if not shutil.which(tool)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise SandboxError(f"the sandbox needs {', '.join(missing)}: install them and try again")
    say(f"installing {', '.join(missing)} with apt-get")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q"], env=env, check=False)  # a stale third-party source may fail
    run(["apt-get", "install", "-yq", "--no-install-recommends", *missing], env=env)


def ensure() -> Path:
    """Returns the root file system, built first if this one does not exist yet."""
    target = path()
    if target.exists():
        return target
    need(("mmdebstrap", "mmdebstrap"), ("mmdebstrap", "debian-archive-keyring"))
    log = target.parent / "rootfs.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with building(target) as root, tempfile.TemporaryDirectory() as files:
        if target.exists():  # another process built it while this one waited
            return target
        Path(files, "sources").write_text(SOURCES.format(mirror=mirror()))
        Path(files, "preferences").write_text(PREFERENCES)
        Path(files, "customize").write_text(CUSTOMIZE)
        env = {
            **os.environ,
            "HPK_FILES": files,
            "HPK_USERS": " ".join(USERS),
            "HPK_NO_SUBIDS": " ".join(name for name, subids in USERS.items() if not subids),
        }
        argv: list[str | Path] = [
            *CONTAINED, "--mount-proc", "mmdebstrap", "--mode=root", "--variant=apt",
            f"--include={','.join(PACKAGES)}",
            # Some mirrors' copy of sid is older than its Release file allows.
            '--aptopt=Acquire::Check-Valid-Until "false"',
            *(f"--dpkgopt=path-exclude=/usr/share/{d}/*" for d in ("man", "doc", "locale", "info")),
            '--setup-hook=install -D "$HPK_FILES/preferences" "$1/etc/apt/preferences.d/sid"',
            '--customize-hook=sh "$HPK_FILES/customize" "$1"',
            "trixie", root, f"{files}/sources",
        ]  # fmt: skip
        run_long(f"building the nodes' root file system ({len(PACKAGES)} Debian packages and "
                 "what they need)", argv, log, env=env)  # fmt: skip
    return target


def python_env() -> dict[str, str]:
    """The host's settings for pip and TLS, which the root file system has no other way to know."""
    keep = ("PIP_", "SSL_CERT_", "REQUESTS_CA_BUNDLE")
    proxies = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(keep) or name.lower() in proxies
    }


def enter_command(
    spec_file: Path,
    steps: Sequence[Sequence[str | int]],
    root: Path,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    hostname: str = "",
) -> list[str]:
    """The command that runs enter.py with these steps; the caller puts namespaces around it."""
    spec = {
        "root": str(root), "hostname": hostname, "steps": list(steps),
        "argv": list(argv), "env": dict(env),
    }  # fmt: skip
    spec_file.write_text(json.dumps(spec))
    return [sys.executable, "-I", str(Path(enter.__file__).resolve()), str(spec_file)]


def in_rootfs(
    argv: Sequence[str], binds: Sequence[tuple[str, Path, str]] = (), *, log: Path | None = None,
    title: str = "", outside: bool = True,
) -> None:  # fmt: skip
    """Runs a command in a throw-away view of the root file system, on the host's network.

    binds: ("bind" | "ro-bind", host path, path inside); nothing else it writes is kept. With
    `outside` it gets the host's settings for pip, proxies and TLS. With `log`, the output goes
    there and progress lines are shown.
    """
    root = ensure()
    settings = python_env() if outside else {}
    with tempfile.TemporaryDirectory(prefix="hpk-sandbox-") as scratch:
        new = Path(scratch, "root")
        new.mkdir()
        steps: list[Sequence[str | int]] = [["overlay", str(root), scratch, str(new)]]
        if outside:
            steps += [["ro-bind", str(p.resolve()), f"{new}{p}"] for p in outside_files(settings)]
        steps += [[kind, str(source), f"{new}{target}"] for kind, source, target in binds]
        steps += [["bind", "/dev", f"{new}/dev"], ["mount", "proc", f"{new}/proc", ""]]
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            env = {**CLEAN_ENV, "HOME": "/root", **settings}
            inner = enter_command(Path(file.name), steps, new, argv, env)
            command = [*CONTAINED, *inner]
            if log is not None:
                run_long(title, command, log)
                return
            done = run(command, check=False)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()[-3:]
                raise SandboxError(f"{' '.join(argv)} failed: {' / '.join(said)}")


def outside_files(settings: Mapping[str, str]) -> list[Path]:
    """What a program needs of the host's files to reach the network as the host does."""
    paths = [
        "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/pip.conf",
        "/usr/share/ca-certificates", "/usr/local/share/ca-certificates",
        # certificates, local wheel directories, pip's configuration file
        *(word for value in settings.values() for word in value.split() if word.startswith("/")),
    ]  # fmt: skip
    return [Path(p) for p in dict.fromkeys(paths) if Path(p).exists()]
