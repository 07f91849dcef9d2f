"""HPK inside the sandbox: a virtual environment all nodes see, and the checkout in it."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from pathlib import Path

from . import rootfs
from .base import CHECKOUT, SandboxError, building, cache_dir, remove, run, run_dir, say

VENV = "/opt/hpk/venv"
BUILD_TOOLS = ("setuptools>=77",)


def dependencies() -> list[str]:
    """What the project needs at run time, and what installing it needs."""
    data = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    return [*data["project"]["dependencies"], *BUILD_TOOLS]


def venv() -> Path:
    """The cached environment with the dependencies alone, made with the nodes' own Python."""
    needs = dependencies()
    key = hashlib.sha256("\n".join([rootfs.key(), *needs]).encode()).hexdigest()[:12]
    target = cache_dir() / "sandbox" / f"venv-{key}"
    if target.exists():
        return target
    rootfs.ensure()
    with building(target) as temporary:
        if not target.exists():
            temporary.mkdir()
            script = 'python3 -m venv "$0" && "$0/bin/pip" install --progress-bar off "$@"'
            rootfs.in_rootfs(
                ["/bin/sh", "-c", script, VENV, *needs], [("bind", temporary, VENV)],
                log=target.parent / "venv.log", title="installing HPK's Python dependencies",
            )  # fmt: skip
    return target


def install(force: bool = False) -> bool:
    """Installs this checkout into the environment the nodes see; True if anything changed."""
    opt = run_dir() / "opt"
    mark = opt / "installed"
    base = venv()
    source = source_key(base)
    if not force and mark.exists() and mark.read_text() == source:
        return False
    mark.unlink(missing_ok=True)
    if not (opt / "venv" / base.name).exists():
        remove(opt / "venv.new")
        run(["cp", "-a", "--reflink=auto", base, opt / "venv.new"])
        (opt / "venv.new" / base.name).touch()
        remove(opt / "venv")
        (opt / "venv.new").rename(opt / "venv")
    build = opt / "build"
    remove(build)
    build.mkdir()
    # pip builds in the source directory: give it a copy, the checkout stays as it is
    shutil.copy2(CHECKOUT / "pyproject.toml", build)
    if (CHECKOUT / "README.md").exists():
        shutil.copy2(CHECKOUT / "README.md", build)
    else:
        (build / "README.md").touch()
    shutil.copytree(CHECKOUT / "hpk_kubelet", build / "hpk_kubelet",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    pip = [f"{VENV}/bin/pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
           "--no-index", "--force-reinstall", "/opt/hpk/build"]  # fmt: skip
    rootfs.in_rootfs(pip, [("bind", opt, "/opt/hpk")])
    remove(build)
    mark.write_text(source)
    return True


def source_key(base: Path) -> str:
    """Changes with any file of the package, and with the environment under it."""
    digest = hashlib.sha256(base.name.encode())
    files = sorted(p for p in (CHECKOUT / "hpk_kubelet").rglob("*") if p.is_file())
    for path in [CHECKOUT / "pyproject.toml", *files]:
        if "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def components() -> Path:
    """The host user's component cache, which the nodes see at /opt/hpk/components."""
    path = cache_dir() / "components"
    path.mkdir(parents=True, exist_ok=True)
    return path


def component(name: str) -> Path | None:
    """The newest binary of a component in the cache: `<name>/<version>/<name>`."""
    found = [p for p in components().glob(f"{name}/[!.]*/{name}") if p.is_file()]
    return max(found, key=lambda p: p.stat().st_mtime) if found else None


def link_kubectl() -> None:
    """Puts kubectl on every node's PATH (/usr/local/bin/kubectl leads to /opt/hpk/bin)."""
    found = component("kubectl")
    link = run_dir() / "opt" / "bin" / "kubectl"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    if found is None:
        say(f"no kubectl in {components()} yet: obtain the components, "
            "then run `bootstrap/sandbox refresh`")  # fmt: skip
        return
    link.symlink_to(Path("/opt/hpk/components") / found.relative_to(components()))


def check() -> None:
    if not (CHECKOUT / "pyproject.toml").exists():
        raise SandboxError(f"{CHECKOUT} is no checkout of HPK: it has no pyproject.toml")
