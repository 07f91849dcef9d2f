"""What keeps a pod from starting, in the words a real kubelet would use."""

from __future__ import annotations

from hpk_kubelet.errors import HPKError


class ConfigError(HPKError):
    """A container can't be configured as the pod asks; waiting may help (an object may appear).

    `reason` is the waiting reason of the container (CreateContainerConfigError,
    CreateContainerError); `container` is None when the whole pod waits, as for volumes: the
    containers then show ContainerCreating. `event` is (reason, message) of the Warning Event.
    """

    def __init__(
        self,
        message: str,
        *,
        container: str | None = None,
        reason: str = "CreateContainerConfigError",
        event: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.container = container
        self.reason = reason
        self.event = event or ("Failed", f"Error: {message}")


def volume_error(volume: str, message: str) -> ConfigError:
    """A volume can't be made: what kubelet's operation_generator.go reports as FailedMount."""
    return ConfigError(
        message,
        reason="ContainerCreating",
        event=("FailedMount", f'MountVolume.SetUp failed for volume "{volume}" : {message}'),
    )
