"""Which of the network modes a node can have, found by looking, and in which words to say so."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from hpk_kubelet.errors import HPKError

Setting = Literal["auto", "rootless", "site", "host"]
Mode = Literal["rootless", "site", "host"]

_PATH = os.pathsep.join(("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin"))


@dataclass(frozen=True)
class Choice:
    mode: Mode
    why: str


def find(program: str) -> str | None:
    """Also where administrators' programs are."""
    return shutil.which(program, path=os.environ.get("PATH", "") + os.pathsep + _PATH)


def missing() -> list[str]:
    """What the rootless network lacks on this node, one clause each; [] if it can be had."""
    lacks = []
    try:
        made = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", "true"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if made.returncode:
            lacks.append(
                f"users can't make namespaces ({' '.join(made.stderr.split()) or 'unshare failed'})"
            )
    except (OSError, subprocess.TimeoutExpired) as e:
        lacks.append(f"unshare can't be tried ({e})")
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as e:
        lacks.append(f"/dev/net/tun can't be opened ({e.strerror})")
    if not (pasta := find("pasta")):
        lacks.append("pasta (package passt) is not installed")
    elif not _has_option(pasta, "--map-guest-addr"):
        lacks.append("its pasta is too old (from 2024_08 on it has --map-guest-addr)")
    if not find("nft"):
        lacks.append("nft (package nftables) is not installed")
    return lacks


def _has_option(program: str, option: str) -> bool:
    try:
        done = subprocess.run([program, "--help"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return option.encode() in done.stdout + done.stderr


def choose(setting: Setting, lacks: list[str]) -> Choice:
    """`lacks`: what `missing` said of the node. HPKError when what is demanded can't be had."""
    where = platform.node()
    if setting in ("host", "site"):
        return Choice(setting, "the configuration says so")
    if not lacks:
        why = "the configuration says so" if setting == "rootless" else f"{where} has all it needs"
        return Choice("rootless", why)
    words = "; ".join(lacks)
    if setting == "rootless":
        raise HPKError(
            f"config.yaml: network: rootless can't be had on {where}: {words}. An administrator "
            "can mend that; `network: auto` falls back to the nodes' own network"
        )
    return Choice("host", f"on {where} {words}")
