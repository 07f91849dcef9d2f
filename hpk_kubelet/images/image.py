"""An image as the kubelet sees it, and what its Pulled event says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpk_kubelet.images.manifest import ImageRunConfig


class Image(msgspec.Struct, frozen=True, kw_only=True):
    reference: str  # canonical: docker.io/library/busybox:latest
    id: str  # registry/repository@digest: status.imageID; an index's digest where there is one
    digest: str  # of this platform's manifest: names the directory
    rootfs: Path  # the unpacked directory; read-only by agreement
    config: ImageRunConfig
    size: int  # bytes as the registry stores it
    disk: int  # bytes unpacked
    pulled: bool = False  # this call brought it, rather than finding it
    pull_seconds: float = 0.0  # the pull alone, without waiting for other pulls


def pulled_message(image: str, result: Image, total_seconds: float) -> str:
    """The Pulled event's text, in the kubelet's words (image_manager.go)."""
    if not result.pulled:
        return f'Container image "{image}" already present on machine'
    return (
        f'Successfully pulled image "{image}" in {_go_duration(result.pull_seconds)} '
        f"({_go_duration(total_seconds)} including waiting). Image size: {result.size} bytes."
    )


def _go_duration(seconds: float) -> str:
    """Go's time.Duration, cut to milliseconds: 850ms, 1.25s, 2m3.5s."""
    milliseconds = int(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
