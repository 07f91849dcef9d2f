"""The user's configuration (`$HPK_HOME/config.yaml`) and where HPK keeps its files.

Every setting has a default that works on a plain Slurm cluster, so the file is optional.
A wrong key, type or value is one sentence naming the file and the place.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import msgspec.yaml

from hpk_kubelet.errors import HPKError

_REGISTRY = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")


def _absolute(key: str, value: str, starts: tuple[str, ...] = ("/", "~/")) -> None:
    """ValueError, which msgspec reports with the place, for what depends on where one stands."""
    if value and not value.startswith(starts):
        raise ValueError(f"{key}: {value!r} is not an absolute path")


class ImageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    form: Literal["auto", "directory"] = "auto"
    """What a pulled image becomes on disk; `auto` is `directory`, which starts fastest."""
    insecure_registries: tuple[str, ...] = ()
    """`host[:port]` of registries that are spoken to over plain http."""
    cache: str = ""
    """Where images are kept; the default is `images` under `cache_dir()`."""

    def __post_init__(self) -> None:
        _absolute("cache", self.cache)
        for registry in self.insecure_registries:
            if not _REGISTRY.fullmatch(registry):
                raise ValueError(f"insecureRegistries: {registry!r} is not HOST or HOST:PORT")


class SlurmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    partitions: tuple[str, ...] = ()
    """Partitions that become nodes; empty means every partition that is up for this user."""
    poll_interval: Annotated[float, msgspec.Meta(ge=0.5)] = 5.0
    """Seconds between two bulk queries of Slurm while nothing is expected to change."""
    memory_overhead_mb: Annotated[int, msgspec.Meta(ge=0)] = 192
    """Added to every job's `--mem` for the agent and the container runtime."""
    default_memory_mb: Annotated[int, msgspec.Meta(ge=1)] = 512
    """`--mem` of a pod that names neither a memory limit nor a request, before the overhead."""
    gpu_resource: Literal["auto", "nvidia.com/gpu", "amd.com/gpu"] = "auto"
    """As what pods ask for the GPUs of nodes; `auto` goes by the type Slurm has for them."""
    extra_flags: tuple[str, ...] = ()
    """sbatch flags added to every pod's job, before the pod's own (which win)."""
    priority_classes: dict[str, tuple[str, ...]] = {}
    """sbatch flags (`--nice=…`, `--qos=…`) for the pods of a PriorityClass, by its name."""
    sharing: Literal["shared", "exclusive"] = "shared"
    """`exclusive`: no jobs of other users on the compute nodes of pods."""
    start: Literal["batch", "immediate", "auto"] = "auto"
    """`batch`: by sbatch, in Slurm's next scheduling pass; `immediate`: by salloc, where resources
    are free at the moment; `auto`: the same where the site lets it, without a word where not."""
    backend: Literal["auto", "commands", "slurmrestd"] = "auto"
    """`slurmrestd` is faster at submitting and cancelling; `auto` uses it where it is installed."""
    rest_url: str = ""
    """Of the site's own slurmrestd, `https://host:port`; empty: HPK runs one on a Unix socket."""
    rest_token_file: str = ""
    """Holds the token (JWT) for `rest_url`."""

    def __post_init__(self) -> None:
        _absolute("restTokenFile", self.rest_token_file)
        if self.rest_url and not self.rest_url.startswith(("https://", "http://")):
            raise ValueError(f"restUrl: {self.rest_url!r} is not an http:// or https:// URL")
        if bool(self.rest_url) != bool(self.rest_token_file):
            raise ValueError("restUrl and restTokenFile go together")


class VolumeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    path: str = ""
    """Directory for the data of PersistentVolumeClaims; the default is `volumes` in $HPK_HOME."""
    capacity: str = ""
    """How much all claims may ask for together (`500Gi`), where a quota says less than df."""

    def __post_init__(self) -> None:
        _absolute("path", self.path)


class SecurityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    allowed_unsafe_sysctls: tuple[str, ...] = ()
    """Sysctls (`kernel.msg*`) that pods may set in their own namespaces besides the safe ones."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    network: Literal["auto", "rootless", "site", "host"] = "auto"
    """`rootless`: pods have a network of their own; `site`: the one that `siteNetwork` gives them;
    `host`: they use their nodes' network; `auto`: rootless where the control job's node has what it
    takes, else host."""
    site_network: str = ""
    """Path of an administrator's program on compute nodes that is called like a CNI plugin for each
    pod; goes with `network: site`."""
    service_mode: Literal["headless", "clusterIP"] = "headless"
    """`headless`: every Service is answered by DNS alone; `clusterIP`: kube-proxy on each node
    makes them complete (needs the rootless network)."""
    network_interface: str = ""
    """Of compute nodes, for the pod network's packets; default: the one towards the control job."""
    network_mtu: Annotated[int, msgspec.Meta(ge=1280, le=65520)] = 65520
    """Of the pod network's packets between nodes, VXLAN's 50 bytes included. Those larger than the
    site's own MTU travel in fragments: several times faster on a network that loses none."""
    ports: str = ""
    """`first-last`: the range the servers choose their ports from; empty: any free port."""
    address: str = ""
    """IPv4 address at which other nodes reach the control plane's; default: the host name's."""
    components: str = ""
    """Directory with binaries to use instead of fetched ones (`$HPK_COMPONENTS` goes before)."""
    mirror: str = ""
    """URL that takes the place of `https://` in the addresses of official release downloads."""
    local_dir: str = ""
    """Node-local directory for writable layers and emptyDir; default $SLURM_TMPDIR or /tmp."""
    max_pods: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """`pods` capacity of every virtual node."""
    images: ImageConfig = ImageConfig()
    volumes: VolumeConfig = VolumeConfig()
    security: SecurityConfig = SecurityConfig()
    slurm: SlurmConfig = SlurmConfig()

    def __post_init__(self) -> None:
        _absolute("components", self.components)
        _absolute("localDir", self.local_dir, ("/",))
        _absolute("siteNetwork", self.site_network, ("/",))
        if bool(self.site_network) != (self.network == "site"):
            raise ValueError("network: site and siteNetwork go together")
        if self.mirror and not self.mirror.startswith(("https://", "http://")):
            raise ValueError(f"mirror: {self.mirror!r} is not an http:// or https:// URL")
        if self.address:
            try:
                ipaddress.IPv4Address(self.address)
            except ValueError:
                raise ValueError(f"address: {self.address!r} is not an IPv4 address") from None


class Paths:
    """Every path under `$HPK_HOME` (default `~/.hpk`), all on the shared file system.

    `HPK_STATE` moves only what needs a file system with working fsync and mmap: etcd's data.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or Path(os.environ.get("HPK_HOME") or Path.home() / ".hpk").absolute()
        self.config = self.home / "config.yaml"
        self.kubeconfig = self.home / "kubeconfig"  # the user's, cluster-admin, 0600
        self.pki = self.home / "pki"
        state = os.environ.get("HPK_STATE")
        self.etcd = (Path(state).absolute() if state else self.home) / "etcd"
        self.backups = self.home / "backup"  # copies of etcd's data
        self.log = self.home / "log"  # one file per component
        self.run = self.home / "run"
        self.control = self.run / "control.json"  # which job is the control job, where its API is
        self.kubelet = self.run / "kubelet.json"  # where agents find the kubelet (see wire.py)
        self.network = self.home / "network.json"  # what was chosen for the pod network, for good
        self.nodes = self.run / "nodes.json"  # node → partition, of the kubelet that ran last
        self.pods = self.home / "pods"  # one directory per pod uid
        self.arrays = self.home / "arrays"  # which pod each task of a job array is
        self.seccomp = self.home / "seccomp"  # your profiles for pods (Localhost)
        self.agent = self.home / "agent"  # the agent as the jobs run it, one directory per version

    def pod(self, uid: str) -> Path:
        return self.pods / uid


def cache_dir() -> Path:
    """What can be fetched or built again: components, images. `$XDG_CACHE_HOME/hpk`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hpk"


def load_config(paths: Paths) -> Config:
    """Reads the configuration; raises HPKError with the file and the place of a mistake."""
    try:
        raw = paths.config.read_bytes()
    except FileNotFoundError:
        return Config()
    except OSError as e:
        raise HPKError(f"{paths.config} can't be read: {e.strerror}") from None
    try:
        return msgspec.yaml.decode(raw or b"{}", type=Config)
    except msgspec.MsgspecError as e:
        words = " ".join(str(e).split())  # YAML's own errors are several lines
        raise HPKError(f"{paths.config}: {words}; see docs/install.md for the settings") from None
