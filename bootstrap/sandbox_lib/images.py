"""The example images (recipes in bootstrap/images) and the registry they are served from.

A recipe is a TOML file: `tag`, or `names` (each NAME:TAG; default: the file's name and the tag);
`busybox = true` for a shell and its tools, or `[debian]` packages, with a script that trims them;
`[files]`, path in the image = "rootfs:PATH" (from the nodes' root file system), "component:NAME"
(from the component cache) or "go:PATH" (a file of a pinned Go module); `[texts]`, path in the
image = what the file says; `[modes]` of files, octal; `[links]`, path in the image = what it points
to; `[config]`, OCI's run settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from . import oci, project, rootfs
from .base import (
    CHECKOUT,
    CONTAINED,
    SandboxError,
    building,
    cache_dir,
    run,
    run_dir,
    run_long,
    say,
)
from .slurmconf import HEAD_ADDRESS, REGISTRY

RECIPES = CHECKOUT / "bootstrap" / "images"
DEBIAN = "deb {mirror} trixie main\n"
KUBERNETES = "k8s.io/kubernetes"
MODULE = CHECKOUT / "bootstrap" / "modules" / "kubernetes"
TEXTS = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnobody:x:65534:\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
DIRECTORIES = {"/dev": 0o755, "/proc": 0o755, "/sys": 0o755, "/root": 0o700, "/run": 0o755,
               "/tmp": 0o1777, "/var/tmp": 0o1777}  # fmt: skip


class MissingComponent(SandboxError):
    """A recipe needs a binary that the component cache does not have."""


def load_all(recipes: Path = RECIPES) -> None:
    """Builds and loads every recipe whose present form the registry does not have yet."""
    for recipe in sorted(recipes.glob("*.toml")):
        try:
            references = load_recipe(recipe)
        except MissingComponent as error:
            say(str(error))
        else:
            print(*references, sep="\n")


def load_recipe(path: Path) -> list[str]:
    """Returns the references pods use."""
    recipe = tomllib.loads(path.read_text())
    names = image_names(path, recipe)
    key = recipe_key(path, recipe)
    mark = run_dir() / "registry" / "loaded" / names[0].replace("/", "_").partition(":")[0]
    if not (mark.exists() and mark.read_text() == key):
        archive = build(path, recipe, key)
        for name in names:
            load(archive, name)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(key)
    return [f"{REGISTRY}/{name}" for name in names]


def image_names(path: Path, recipe: dict[str, Any]) -> list[str]:
    """What the registry calls the image, NAME:TAG."""
    return recipe.get("names") or [f"{path.stem}:{recipe['tag']}"]


def sources(name: str, recipe: dict[str, Any]) -> dict[str, Path]:
    """Path in the image → the file it comes from."""
    found: dict[str, Path] = {}
    for target, source in recipe.get("files", {}).items():
        kind, _, what = source.partition(":")
        if kind == "rootfs":
            found[target] = rootfs.ensure() / what.lstrip("/")
        elif kind == "go":
            found[target] = go_file(what)
        else:
            path = project.component(what)
            if path is None:
                raise MissingComponent(
                    f"image {name} is left out: {project.components()} has no {what} yet "
                    f"(`bootstrap/component {what}` obtains it)"
                )
            found[target] = path
    return found


def go_file(path: str) -> Path:
    """A file of a module that HPK pins, by import path; Go's module cache has it."""
    words = ["go", "list", "-C", MODULE, "-m", "-f", "{{.Dir}}", KUBERNETES]
    if not path.startswith(f"{KUBERNETES}/"):
        raise SandboxError(f"go:{path} is not a file of {KUBERNETES}")
    return Path(run(words).stdout.strip()) / path.removeprefix(f"{KUBERNETES}/")


def recipe_key(path: Path, recipe: dict[str, Any]) -> str:
    """Changes with the recipe, its trim script and every file it copies."""
    digest = hashlib.sha256(path.read_bytes())
    if "debian" in recipe:
        digest.update((path.parent / recipe["debian"]["trim"]).read_bytes())
    else:
        digest.update(json.dumps([rootfs.key(), TEXTS, DIRECTORIES]).encode())
    for source in sources(path.stem, recipe).values():
        stat = source.stat()
        digest.update(f"{source} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def build(path: Path, recipe: dict[str, Any], key: str) -> Path:
    """The OCI archive of a recipe, from the cache or made now."""
    name = path.stem if path.parent == RECIPES else f"{path.parent.parent.name}-{path.stem}"
    target = cache_dir() / "sandbox" / "images" / f"{name}-{key}.tar"
    if target.exists():
        return target
    with building(target) as temporary, tempfile.TemporaryDirectory() as scratch:
        if target.exists():
            return target
        layer = Path(scratch, "layer.tar")
        if "debian" in recipe:
            debian(name, recipe["debian"], path.parent, layer)
        else:
            say(f"building image {name}")
        assemble(name, recipe, layer)
        oci.write_archive(layer, recipe["config"], temporary)
    for old in target.parent.glob(f"{name}-{'?' * len(key)}.tar"):
        if old != target:
            old.unlink()
    return target


def assemble(name: str, recipe: dict[str, Any], target: Path) -> None:
    """A layer out of single files; they follow those of Debian's packages, if there are any."""
    modes = recipe.get("modes", {})
    with target.open("r+b" if "debian" in recipe else "wb") as out, oci.Layer(out) as layer:
        for path, mode in DIRECTORIES.items():
            layer.directory(path, mode)
        for path, text in (TEXTS | recipe.get("texts", {})).items():
            if path.lstrip("/") not in layer.made:
                layer.file(path, text.encode())
        if recipe.get("busybox"):
            busybox = rootfs.ensure() / "usr" / "bin" / "busybox"
            layer.file("/bin/busybox", busybox, 0o755)
            for applet in run([busybox, "--list"]).stdout.split():
                if applet != "busybox":
                    layer.link(f"/bin/{applet}", "busybox")
            layer.link("/usr/bin/env", "../../bin/busybox")
        for path, source in sources(name, recipe).items():
            usual = 0o755 if os.access(source, os.X_OK) else 0o644
            layer.file(path, source, int(modes[path], 8) if path in modes else usual)
        for path, pointed in recipe.get("links", {}).items():
            layer.link(path, pointed)


def debian(name: str, recipe: dict[str, Any], recipes: Path, target: Path) -> None:
    """A layer of Debian packages."""
    rootfs.need(("mmdebstrap", "mmdebstrap"), ("mmdebstrap", "debian-archive-keyring"))
    with tempfile.TemporaryDirectory() as files:
        Path(files, "sources").write_text(DEBIAN.format(mirror=rootfs.mirror()))
        trim = shlex.quote(str(recipes / recipe["trim"]))
        variant = recipe.get("variant", "essential")
        argv: list[str | Path] = [
            *CONTAINED, "--mount-proc", "mmdebstrap", "--mode=root",
            f"--variant={variant}",
            f"--include={','.join(recipe['packages'])}",
            *(f"--dpkgopt=path-exclude=/usr/share/{d}/*" for d in ("man", "doc", "locale", "info")),
            f'--{"extract" if variant == "extract" else "customize"}-hook=sh {trim} "$1"',
            "--skip=output/dev", "--format=tar", "trixie", target, f"{files}/sources",
        ]  # fmt: skip
        log = cache_dir() / "sandbox" / f"image-{name}.log"
        log.unlink(missing_ok=True)
        run_long(f"building image {name} from {', '.join(recipe['packages'])}", argv, log)


def load(archive: Path, name: str) -> str:
    """Puts an OCI archive (or layout directory) into the registry; returns the pods' reference."""
    if not archive.exists():
        raise SandboxError(f"there is no {archive}: name an OCI archive or layout directory")
    kind = "oci" if archive.is_dir() else "oci-archive"
    say(f"loading image {name}")
    argv = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false",
            f"{kind}:/image", f"docker://{HEAD_ADDRESS}:5000/{name}"]  # fmt: skip
    try:
        rootfs.in_rootfs(argv, [("ro-bind", archive.resolve(), "/image")], outside=False)
    except SandboxError as error:
        said = re.search('msg="(.*)"', str(error))
        words = said[1] if said else str(error)
        raise SandboxError(f"cannot load {archive} as {name}: {words}") from None
    return f"{REGISTRY}/{name}"
