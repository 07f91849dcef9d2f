"""`hpk image`: the same cache the kubelet uses, filled and cleaned from a login node."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hpk_kubelet import homes
from hpk_kubelet.config import Paths, load_config
from hpk_kubelet.errors import HPKError
from hpk_kubelet.images import gc
from hpk_kubelet.images.store import Image, ImageStore, default_root

app = typer.Typer(
    name="image",
    help="The images that pods run from.",
    no_args_is_help=True,
    add_completion=False,
)


class Output(StrEnum):
    table = "table"
    json = "json"


def _store() -> ImageStore:
    config = load_config(Paths())
    return ImageStore(default_root(config), config.images.insecure_registries)


@app.command()
def pull(
    references: Annotated[
        list[str], typer.Argument(metavar="REFERENCE...", help="busybox, ghcr.io/org/app:1.2, …")
    ],
) -> None:
    """Pull images ahead of the pods that need them; present ones are brought up to date.

    Logins of docker, podman and apptainer are used.
    """
    for reference in references:
        image = asyncio.run(_pull(reference))
        typer.echo(f"{image.id}  {decimal(image.size)}, {decimal(image.disk)} unpacked")


async def _pull(reference: str) -> Image:
    store = _store()
    console = Console(stderr=True)
    bars = Progress(
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    try:
        with bars:
            bar = bars.add_task(reference, total=None)

            def progress(done: int, total: int) -> None:
                what = reference if done < total else f"{reference} (unpacking)"
                bars.update(bar, completed=done, total=total, description=what)

            return await store.pull(reference, "Always", on_progress=progress)
    finally:
        await store.close()


@app.command("list")
def list_images(
    output: Annotated[Output, typer.Option("--output", "-o")] = Output.table,
) -> None:
    """List the images in the cache, last used first."""
    store = _store()
    found = gc.images(store)
    if output is Output.json:
        rows = [
            {
                "references": image.references,
                "digest": image.digest,
                "size": image.size,
                "disk": image.disk,
                "lastUsed": int(image.used),
                "rootfs": str(store.directory(image.digest) / "rootfs"),
            }
            for image in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for line in table(found, time.time()):
        typer.echo(line)


def table(found: Sequence[gc.Listed], now: float) -> list[str]:
    """Aligned lines with a header, an image's further tags below its first; never wrapped, so
    that a reference can be copied and grepped."""
    rows = [("REFERENCE", "DIGEST", "SIZE", "UNPACKED", "LAST USED")]
    for image in found:
        first, *others = _tags(image) or ["<none>"]
        digest = image.digest.partition(":")[2][:12]
        used = f"{_age(now - image.used)} ago"
        rows.append((first, digest, decimal(image.size), decimal(image.disk), used))
        rows += [(other, "", "", "", "") for other in others]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


@app.command("gc")
def collect(
    unused: Annotated[
        str, typer.Option(help="Only images not asked for in this long: 90s, 30m, 12h, 7d.")
    ] = "10m",
) -> None:
    """Remove images that no pod refers to, and what interrupted pulls left."""
    seconds = _duration(unused)
    in_use: set[str] = set()
    for home in homes.known(Paths().home):
        in_use |= gc.digests_in_use(Paths(home).pods)
    result = gc.collect(_store(), in_use, max(seconds, 0.0))
    for image in result.images:
        typer.echo(f"removed {', '.join(_tags(image)) or image.digest}")
    freed = decimal(sum(image.disk for image in result.images))
    typer.echo(f"{len(result.images)} images, {freed}; {result.leftovers} interrupted pulls")


def _tags(image: gc.Listed) -> list[str]:
    return [name for name in image.references if "@" not in name]


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdigit():
        raise HPKError(f"--unused {text}: a number and a unit is meant, such as 30m, 12h or 7d")
    return float(number) * _UNITS[unit]


def _age(seconds: float) -> str:
    for unit in "dhm":
        if seconds >= _UNITS[unit]:
            return f"{int(seconds // _UNITS[unit])}{unit}"
    return f"{max(int(seconds), 0)}s"
