"""The images of a pod: its containers' and those that are volumes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.auth import Keyring, pull_secrets_keyring
from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.images.store import Image, ImageStore, Policy, pulled_message
from hpk_kubelet.node.objects import Key, Object, ObjectCache
from hpk_kubelet.spec.references import image_pull_secrets
from hpk_kubelet.volumes import image_volumes
from hpk_kubelet.volumes.image import PREFIX

Say = Callable[[str, str, str, str], None]
"""(type, reason, message, field path) of an Event on the pod."""


class PullFailed(HPKError):
    """At least one image could not be had; `failures` is by container."""

    def __init__(self, failures: dict[str, ImagePullError]) -> None:
        super().__init__("; ".join(map(str, failures.values())))
        self.failures = failures


def containers(pod: Object) -> list[tuple[Object, str]]:
    """Each container with its field path, in the order they start."""
    spec = pod["spec"]
    return [
        (container, f"spec.{key}{{{container['name']}}}")
        for key in ("initContainers", "containers")
        for container in spec.get(key) or ()
    ]


def ephemeral_containers(pod: Object) -> list[tuple[Object, str]]:
    """Those of `kubectl debug`, each with its field path."""
    return [
        (container, f"spec.ephemeralContainers{{{container['name']}}}")
        for container in pod["spec"].get("ephemeralContainers") or ()
    ]


async def pull_images(
    pod: Object,
    objects: ObjectCache,
    store: ImageStore,
    say: Say,
    all_of_them: Sequence[tuple[Object, str]] = (),
) -> dict[str, Image]:
    """The image of each container (the pod's, unless others are named); PullFailed once all pulls
    have ended."""
    all_of_them = all_of_them or containers(pod)
    names = image_pull_secrets(pod)
    keyring = Keyring()
    if names:
        wanted: list[Key] = [("Secret", name) for name in names]
        found = await objects.get(pod["metadata"]["namespace"], wanted)
        if missing := [name for (_, name), secret in found.items() if secret is None]:
            say("Warning", "FailedToRetrieveImagePullSecret",
                f"Unable to retrieve some image pull secrets ({', '.join(missing)}); "
                "attempting to pull the image may not succeed.", "")  # fmt: skip
        keyring = pull_secrets_keyring(s for s in found.values() if s is not None)

    async def one(container: Object, path: str) -> Image | ImagePullError:
        image, began = container["image"], time.monotonic()

        def pulling() -> None:
            say("Normal", "Pulling", f'Pulling image "{image}"', path)

        policy: Policy = container.get("imagePullPolicy") or "IfNotPresent"
        try:
            pulled = await store.pull(image, policy, keyring, on_pulling=pulling)
        except ImagePullError as e:
            return e
        message = pulled_message(image, pulled, time.monotonic() - began)
        say("Normal", "Pulled", message, path)
        return pulled

    results = await asyncio.gather(*(one(*container) for container in all_of_them))
    by_name = {c["name"]: r for (c, _), r in zip(all_of_them, results, strict=True)}
    failures = {name: r for name, r in by_name.items() if isinstance(r, ImagePullError)}
    if failures:
        raise PullFailed(mounting(pod, failures))
    return {name: r for name, r in by_name.items() if isinstance(r, Image)}


def with_volumes(pod: Object) -> list[tuple[Object, str]]:
    """All images of a pod: its containers', and those that are volumes."""
    return [*containers(pod), *((volume, "") for volume in image_volumes(pod))]


def mounting(pod: Object, failures: dict[str, ImagePullError]) -> dict[str, ImagePullError]:
    """A volume's failure is that of the first container that mounts it."""
    found = dict(failures)
    for key in [key for key in failures if key.startswith(PREFIX)]:
        name, failure = key.removeprefix(PREFIX), found.pop(key)
        every = [container for container, _ in containers(pod)]
        user = next(
            (c for c in every if any(m["name"] == name for m in c.get("volumeMounts") or ())),
            every[0],
        )
        found.setdefault(user["name"], failure)
    return found
