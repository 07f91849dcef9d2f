"""etcd as flannel's: a user of its own there, who reads and writes one prefix and nothing else.

etcd takes the common name of a client's certificate for the user's name. Users exist from the
first start on; the file `hpk-users` beside etcd's data says that they were made.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.controlplane.pki import KeyPair, Leaf, Pki
from hpk_kubelet.errors import HPKError
from hpk_kubelet.network.facts import ETCD_PREFIX

APISERVER = "kube-apiserver-etcd-client"
FLANNEL = "hpk-flannel"
_ROOT = "root"


def flannel_client(pki: Pki) -> KeyPair:
    """What flanneld shows etcd, on every node."""
    return pki.leaf("flannel", Leaf(FLANNEL), pki.etcd_ca)


class Etcdctl:
    """etcdctl as etcd's administrator."""

    def __init__(self, program: Path, endpoint: str, pki: Pki) -> None:
        pair = pki.leaf("etcd-root", Leaf(_ROOT), pki.etcd_ca)
        self._argv = (
            str(program),
            f"--endpoints={endpoint}",
            f"--cacert={pki.etcd_ca.cert}",
            f"--cert={pair.cert}",
            f"--key={pair.key}",
        )

    async def run(self, *words: str) -> None:
        """HPKError with its last words; what exists already is no error."""
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", "")},
        )
        _, err = await process.communicate()
        if process.returncode and b"already exist" not in err:
            said = err.decode(errors="replace").strip().splitlines() or ["no word"]
            raise HPKError(f"etcdctl {' '.join(words[:2])} failed: {said[-1][:400]}")


async def make_users(etcdctl: Etcdctl, mark: Path, network: str) -> None:
    """Makes the users and flannel's configuration `network`, unless `mark` says that they are
    there. The API server must not run yet: from here on it needs its user."""
    done = f"1 {network}"
    try:
        before = mark.read_text()
    except FileNotFoundError:
        before = ""
    if before == done:
        return
    await etcdctl.run("put", f"{ETCD_PREFIX}/config", network)
    if not before:
        await asyncio.gather(
            *(etcdctl.run("user", "add", "--no-password", u) for u in (_ROOT, APISERVER, FLANNEL)),
            *(etcdctl.run("role", "add", role) for role in (_ROOT, FLANNEL)),
        )
        prefix = ETCD_PREFIX + "/"
        await asyncio.gather(
            etcdctl.run("role", "grant-permission", FLANNEL, "--prefix=true", "readwrite", prefix),
            *(etcdctl.run("user", "grant-role", user, _ROOT) for user in (_ROOT, APISERVER)),
            etcdctl.run("user", "grant-role", FLANNEL, FLANNEL),
        )
        await etcdctl.run("auth", "enable")
    write_private(mark, done)
