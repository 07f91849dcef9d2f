"""The pinned programs: which there are, and where the ones on this machine are."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hpk_kubelet.config import Paths, cache_dir, load_config
from hpk_kubelet.errors import HPKError

# In a checkout these are links to bootstrap/; in an installed package, copies.
DATA = Path(__file__).parent.parent / "data"
_ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Recipe:
    """One entry of components.toml; its comments say what the fields mean."""

    name: str
    version: str
    prints: tuple[str, ...]
    module: str
    package: str
    ldflags: tuple[str, ...] = ()
    cgo: bool = False
    optional: bool = False
    url: str = ""
    member: str = ""
    sha256: str = ""
    vendor: Mapping[str, str] = field(default_factory=dict)

    @property
    def cached(self) -> Path:
        """Where `hpk fetch` puts it."""
        return cache_root() / self.name / self.version / self.name


@dataclass(frozen=True)
class Found:
    """A program on this machine and which source it came from."""

    recipe: Recipe
    path: Path
    origin: str


def cache_root() -> Path:
    return cache_dir() / "components"


def architecture() -> str:
    """This machine's, as Go and the official releases call it."""
    machine = platform.machine()
    return _ARCHES.get(machine, machine)


def parse_recipes(table: Mapping[str, Mapping[str, Any]], arch: str) -> dict[str, Recipe]:
    """components.toml, decoded, for one architecture."""
    recipes = {}
    for name, entry in table.items():
        values = {"version": entry["version"], "arch": arch}
        url, member = (part.format(**values) for part in entry.get("download", ("", "")))
        recipes[name] = Recipe(
            name=name,
            version=entry["version"],
            prints=tuple(entry["prints"]),
            module=entry["module"],
            package=entry["package"],
            ldflags=tuple(flag.format(**values) for flag in entry.get("ldflags", ())),
            cgo=entry.get("cgo", False),
            optional=entry.get("optional", False),
            url=url,
            member=member,
            sha256=entry.get("sha256", {}).get(arch, ""),
            vendor=entry.get("vendor", {}),
        )
    return recipes


@cache
def recipes() -> dict[str, Recipe]:
    """Every pinned component by name, in the order they are obtained."""
    with (DATA / "components.toml").open("rb") as f:
        return parse_recipes(tomllib.load(f), architecture())


def recipe(name: str) -> Recipe:
    try:
        return recipes()[name]
    except KeyError:
        raise HPKError(f"there is no component {name}; there are: {', '.join(recipes())}") from None


def named_directories() -> list[Path]:
    """The directories the user names: HPK_COMPONENTS (`:` between several), then the config's;
    last `components` beside the environment HPK is installed in, for installations that several
    people share."""
    named = [Path(n).expanduser() for n in os.environ.get("HPK_COMPONENTS", "").split(":") if n]
    if configured := load_config(Paths()).components:
        directory = Path(configured).expanduser()
        if not directory.is_dir():
            raise HPKError(f"{Paths().config}: components: {directory} is not a directory")
        named.append(directory)
    return [*named, Path(sys.prefix).parent / "components"]


def prints_version(path: Path, wanted: Recipe) -> bool:
    """Runs a program to see whether it is exactly the pinned version."""
    if not wanted.prints:
        return False
    try:
        done = subprocess.run(
            [path, *wanted.prints],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    text = done.stdout + done.stderr
    # What Go adds after a + (the commit) is the same version; 1.36.30 is not 1.36.3.
    return bool(re.search(rf"(?<![\d.]){re.escape(wanted.version)}(?![\d.]|-)", text))


def find(name: str, directories: Sequence[Path] | None = None) -> Found | None:
    """Where a component is: the user's directories, PATH, the cache. Nothing is fetched."""
    wanted = recipe(name)
    for directory in named_directories() if directories is None else directories:
        for path in (directory / name, directory / name / wanted.version / name):
            if path.is_file() and os.access(path, os.X_OK):
                return Found(wanted, path.absolute(), "named directory")
    on_path = shutil.which(name)
    if on_path and prints_version(Path(on_path), wanted):
        return Found(wanted, Path(on_path), "PATH")
    if wanted.cached.is_file():
        origin = wanted.cached.with_name("origin")
        return Found(wanted, wanted.cached, origin.read_text().strip())
    return None


def installed(name: str) -> Path:
    """The path of a component; HPKError naming the command when it is not here yet."""
    found = find(name)
    if found is None:
        wanted = recipe(name)
        raise HPKError(
            f"{name} v{wanted.version} is not here yet; on a node that reaches the internet "
            f"(a login node), run: hpk fetch"
        )
    return found.path
