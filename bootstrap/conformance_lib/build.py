"""What the run needs: the suite and its images, built from the pinned module, and a cluster."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from sandbox_lib import project
from sandbox_lib.base import CHECKOUT, SandboxError, building, say

HERE = Path(__file__).parent
MODULE = HERE / "module"
VERSION = "1.36.3"
PACKAGES = {
    "e2e.test": "k8s.io/kubernetes/test/e2e",
    "nonewprivs": "k8s.io/kubernetes/test/images/nonewprivs",
    "sample-apiserver": "k8s.io/sample-apiserver",
}
SANDBOX = (
    "--immediate", "--partitions", "main=node1,debug=node2", "--cpus", "128", "--memory", "128000",
)  # fmt: skip
REPOSITORIES = (
    "promoterE2eRegistry", "buildImageRegistry", "gcEtcdRegistry", "gcRegistry",
    "dockerLibraryRegistry",
)  # fmt: skip
"""Keys of test/utils/image/manifest.go's RegistryList; the registries of images that must not be
pulled stay as they are."""
CONFIG = HERE / "config.yaml"
"""Added to the user's configuration."""


def binaries(names: Collection[str] = frozenset(PACKAGES)) -> Path:
    """Builds what is missing; answers the suite's path in the component cache."""
    pins = (MODULE / "go.mod").read_bytes() + (MODULE / "go.sum").read_bytes()
    key = hashlib.sha256(pins).hexdigest()
    for name in names:
        target = project.components() / name / VERSION / name
        mark = target.with_name("key")
        if target.exists() and mark.exists() and mark.read_text() == key:
            continue
        say(f"building {name} (the suite takes some minutes)")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["test", "-c"] if name.endswith(".test") else ["build"]
        flags = ["-trimpath", "-buildvcs=false", "-ldflags", "-s -w"]
        with building(target) as temporary:
            go([*command, *flags, "-o", str(temporary), PACKAGES[name]])
        mark.write_text(key)
    return project.components() / "e2e.test" / VERSION / "e2e.test"


def suite_binary() -> Path:
    """The suite alone, for those of its tests that need no images of their own."""
    return binaries({"e2e.test"})


def go(words: Sequence[str]) -> None:
    environment = {**os.environ, "GOWORK": "off", "CGO_ENABLED": "0"}
    done = subprocess.run(["go", *words], cwd=MODULE, env=environment, check=False)
    if done.returncode:
        raise SandboxError(f"go {' '.join(words[:2])} failed; the lines above say why")


def sandbox(*words: str, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
    """`bootstrap/sandbox …`."""
    argv = [str(CHECKOUT / "bootstrap" / "sandbox"), *words]
    done: subprocess.CompletedProcess[str] = subprocess.run(argv, text=True, check=False, **more)  # type: ignore[call-overload]
    if check and done.returncode:
        raise SandboxError(f"bootstrap/sandbox {' '.join(words)} failed")
    return done


def alice(*words: str, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
    """Runs a command on the sandbox's login node."""
    return sandbox("exec", "--user", "alice", "--", *words, check=check, **more)


def repositories(registry: str) -> str:
    """KUBE_TEST_REPO_LIST's file."""
    return "".join(f"{key}: {registry}/e2e\n" for key in REPOSITORIES)


def cluster(home: Path) -> None:
    """The sandbox with the suite's images, and alice's Kubernetes in it; `home` is hers."""
    if sandbox("status", check=False, capture_output=True).returncode:
        sandbox("up", *SANDBOX)
    sandbox("refresh")
    sandbox("images", "--recipes", str(HERE / "images"), stdout=subprocess.DEVNULL)
    if alice("hpk", "status", check=False, capture_output=True).returncode:
        settings = home / ".hpk" / "config.yaml"
        added = CONFIG.read_text()
        if added not in settings.read_text():
            with settings.open("a") as f:
                f.write(added)
        alice("sbatch", "/opt/hpk/src/hpk.sbatch")
    alice("hpk", "status", "--wait", "120", stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    suite_binary()
