"""Image references, with the grammar and the defaults of Docker and Kubernetes.

The behaviour is that of github.com/distribution/reference (normalize.go, regexp.go), which the
kubelet parses with, its error texts included.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple, NoReturn

from hpk_kubelet.images.errors import ImagePullError

DOCKER_HUB = "docker.io"
_HOST_PART = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_HOST = rf"(?:{_HOST_PART}(?:\.{_HOST_PART})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_PATH_PART = r"[a-z0-9]+(?:(?:[._]|__|[-]+)[a-z0-9]+)*"
_DIGEST = r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}"
_REFERENCE = re.compile(
    rf"({_HOST})/({_PATH_PART}(?:/{_PATH_PART})*)"
    rf"(?::([A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}))?(?:@({_DIGEST}))?"
)
_IDENTIFIER = re.compile(r"[a-f0-9]{64}")
_SUPPORTED_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


class Reference(NamedTuple):
    """A normalized reference; `digest` wins over `tag` where both are given."""

    registry: str  # host[:port]; docker.io for Docker Hub
    repository: str
    tag: str  # "" only when there is a digest
    digest: str  # sha256:… or ""

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}@{self.digest}" if self.digest else f"{self.name}{tag}"

    def with_digest(self, digest: str) -> str:
        """`registry/repository@digest`: what Kubernetes calls the image's id."""
        return f"{self.name}@{digest}"


def is_digest(text: str) -> bool:
    """Whether `text` is a digest that content can be checked against, and safe in a path."""
    return _SUPPORTED_DIGEST.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def parse_reference(image: str) -> Reference:
    """`busybox` → docker.io/library/busybox:latest.

    Raises ImagePullError with reason InvalidImageName and the kubelet's words.
    """

    def invalid(why: str) -> NoReturn:
        raise ImagePullError(
            f'Failed to apply default image tag "{image}": '
            f'couldn\'t parse image name "{image}": {why}',
            "InvalidImageName",
        )

    if _IDENTIFIER.fullmatch(image):
        invalid(f"invalid repository name ({image}), cannot specify 64-byte hexadecimal strings")
    registry, rest = _split_registry(image)
    remote = rest.partition(":")[0]
    if remote != remote.lower():
        invalid(f"invalid reference format: repository name ({remote}) must be lowercase")
    match = _REFERENCE.fullmatch(f"{registry}/{rest}")
    if match is None:
        invalid("invalid reference format")
    registry, repository, tag, digest = match.groups(default="")
    if len(repository) > 255:
        invalid("repository name must not be more than 255 characters")
    if digest and not is_digest(digest):
        known = digest.partition(":")[0] in ("sha256", "sha512")
        invalid("invalid checksum digest length" if known else "unsupported digest algorithm")
    if not digest:
        tag = tag or "latest"
    return Reference(registry, repository, tag, digest)


def _split_registry(name: str) -> tuple[str, str]:
    """splitDockerDomain of normalize.go."""
    first, slash, rest = name.partition("/")
    if not slash:
        return DOCKER_HUB, f"library/{name}"
    if first == "index.docker.io":
        registry, remote = DOCKER_HUB, rest
    elif first == "localhost" or "." in first or ":" in first or first != first.lower():
        registry, remote = first, rest
    else:
        registry, remote = DOCKER_HUB, name
    if registry == DOCKER_HUB and "/" not in remote:
        remote = f"library/{remote}"
    return registry, remote
