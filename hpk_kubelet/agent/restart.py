"""Whether and when a container that ended runs again (pure; kubelet's rules)."""

from typing import Any, Dict

INITIAL = 10.0  # kubelet's MaxContainerBackOff and its first step, seconds
LONGEST = 300.0


def should_restart(container: Dict[str, Any], exit_code: int, init: bool) -> bool:
    """By KEP-5307's rules, then restartPolicy; an init container that succeeded never does."""
    if init and not container["sidecar"] and exit_code == 0:
        return False
    for rule in container.get("restartPolicyRules", []):
        codes = rule.get("exitCodes", {})
        matches = exit_code in codes.get("values", [])
        if codes.get("operator") == ("In" if matches else "NotIn"):
            return True
    policy = container["restartPolicy"]
    return bool(policy == "Always" or (policy == "OnFailure" and exit_code != 0))


class BackOff:
    """client-go's flowcontrol.Backoff as kubelet uses it: the first restart is immediate, then
    10 s doubling to 300 s; forgotten after 10 minutes without a restart."""

    def __init__(self) -> None:
        self._step = 0.0
        self._updated = 0.0

    def wait(self, finished: float, now: float) -> float:
        """Seconds until a container that ended at `finished` may start; 0: at once."""
        if not self._step or finished - self._updated > 2 * LONGEST:
            return 0.0
        return max(0.0, finished + self._step - now)

    @property
    def step(self) -> float:
        return self._step

    def next(self, now: float) -> None:
        """A restart happens now."""
        if not self._step or now - self._updated > 2 * LONGEST:
            self._step = INITIAL
        else:
            self._step = min(self._step * 2, LONGEST)
        self._updated = now


def duration(seconds: float) -> str:
    """As Go prints it: 10s, 1m20s, 5m0s."""
    whole = int(seconds)
    return "%dm%ds" % divmod(whole, 60) if whole >= 60 else "%ds" % whole
