"""kubeconfig files: the user's own, and one per component."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane.files import make_private_dir, write_private
from hpk_kubelet.controlplane.pki import KeyPair, Leaf, Pki, node_client
from hpk_kubelet.errors import HPKError

USERS = {
    # file name below pki/kubeconfigs → who that component is to the API server
    "admin": Leaf("hpk-admin", "system:masters"),
    "controller-manager": Leaf("system:kube-controller-manager"),
    "scheduler": Leaf("system:kube-scheduler"),
    "services": Leaf("system:hpk-services"),
    "coredns": Leaf("system:coredns"),
    "proxy": Leaf("system:kube-proxy"),  # bound to system:node-proxier by the API server itself
    "provisioner": Leaf("system:hpk-provisioner"),
}


@dataclass(frozen=True)
class Control:
    """Where the control plane is, as `run/control.json` has it."""

    api: str
    host: str
    job: int | None
    pid: int
    started: str
    network: str = ""  # the pods' network mode, and why

    def to_json(self) -> str:
        return json.dumps(self.__dict__, indent=1) + "\n"


def read_control(paths: Paths) -> Control | None:
    """The last control plane that was started here, alive or not; None if there was none."""
    try:
        raw = paths.control.read_text()
    except FileNotFoundError:
        return None
    try:
        return Control(**json.loads(raw))
    except (ValueError, TypeError):
        raise HPKError(
            f"{paths.control} is not readable; if no control job of yours runs (squeue --me), "
            "remove that file"
        ) from None


def render(api: str, ca: Path, pair: KeyPair, user: str) -> str:
    """A kubeconfig with everything inside (JSON, which is YAML), so that it can be copied."""

    def b64(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    return (
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "hpk",
                "clusters": [
                    {
                        "name": "hpk",
                        "cluster": {"server": api, "certificate-authority-data": b64(ca)},
                    }
                ],
                "users": [
                    {
                        "name": user,
                        "user": {
                            "client-certificate-data": b64(pair.cert),
                            "client-key-data": b64(pair.key),
                        },
                    }
                ],
                "contexts": [{"name": "hpk", "context": {"cluster": "hpk", "user": user}}],
            },
            indent=1,
        )
        + "\n"
    )


def component_kubeconfig(paths: Paths, name: str) -> Path:
    """Where the kubeconfig of a component is: `scheduler`, `services`, `node-NAME`, …"""
    return paths.pki / "kubeconfigs" / f"{name}.kubeconfig"


def write_component_kubeconfig(paths: Paths, pki: Pki, name: str, api: str) -> Path:
    """Writes the kubeconfig of one of `USERS`."""
    leaf = USERS[name]
    return _write(paths, name, render(api, pki.ca.cert, pki.leaf(name, leaf), leaf.common_name))


def write_node_kubeconfig(paths: Paths, node: str) -> Path:
    """Makes `system:node:NODE` its certificate and kubeconfig; needs a control plane's address.

    Called by the kubelet for each virtual node; cheap when the certificate is still good.
    """
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", node):
        raise HPKError(f"{node!r} is no valid node name: small letters, digits, '-' and '.'")
    control = read_control(paths)
    if control is None:
        raise HPKError("no control plane was started yet: sbatch hpk.sbatch")
    pki = Pki(paths.pki)
    pair = node_client(pki, node)
    text = render(control.api, pki.ca.cert, pair, f"system:node:{node}")
    return _write(paths, f"node-{node}", text)


def _write(paths: Paths, name: str, text: str) -> Path:
    path = component_kubeconfig(paths, name)
    make_private_dir(path.parent)
    write_private(path, text)
    return path
