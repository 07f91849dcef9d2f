"""Why a container waits for its image: the reason and the words `kubectl describe` shows."""

from __future__ import annotations

from typing import Literal

from hpk_kubelet.errors import HPKError

# The kubelet's reasons (pkg/kubelet/images/types.go, cri-api/pkg/errors).
Reason = Literal["InvalidImageName", "ErrImagePull", "ErrImageNeverPull", "RegistryUnavailable"]


class ImagePullError(HPKError):
    """An image could not be had. `reason` is the container's waiting reason, str() its message."""

    def __init__(self, message: str, reason: Reason = "ErrImagePull") -> None:
        super().__init__(message)
        self.reason: Reason = reason
