"""Bounds the number of services whose rollouts begin without an edit of theirs, because the
operator or a base changed.

A new default image is a new revision of every service that names none. If all rolled out at once,
each would want additional GPUs, and a bad image would reach all of them. The same holds for a new
router image, which would break the streams of all services at once.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ullage_operator.kube.cache import ServiceKey
from ullage_operator.rollout.stages import (
    PAUSED,
    QUEUED,
    ROLLING_OUT,
    TRYING,
    RolloutProgress,
    RolloutStage,
)

Statuses = Iterable[tuple[ServiceKey, Mapping[str, Any]]]
_ROLLING = frozenset(stage.value for stage in (*TRYING, RolloutStage.PROMOTING))


class RolloutQueue:
    """The services that roll out now, and those that wait for their turn, by name.

    Rollouts that an edit started count too, but do not wait.

    Args:
        max_rollouts: services that may be in a rollout when another one begins unasked.
        wake: called with a service whose turn has come; with one whose turn it still is, again.
    """

    def __init__(self, max_rollouts: int, wake: Callable[[ServiceKey], None]) -> None:
        self._max_rollouts = max_rollouts
        self._wake = wake
        self._rolling: set[ServiceKey] | None = None
        """None until the rollouts that another operator began have been counted."""
        self._only_routers: set[ServiceKey] = set()
        """Rolling services in which only routers are being replaced."""
        self._waiting: set[ServiceKey] = set()

    def may_begin(self, key: ServiceKey, statuses: Callable[[], Statuses]) -> bool:
        """Return whether a service may begin a rollout that no edit asks for.

        Args:
            statuses: returns all services with their status; asked for once.
        """
        if self._rolling is None:
            self._rolling = {each for each, status in statuses() if _is_rolling(status)}
        if key in self._rolling and key not in self._only_routers:
            return True
        return len(self._rolling - {key}) < self._max_rollouts

    def on_planned(
        self,
        key: ServiceKey,
        progress: RolloutProgress,
        *,
        router_waits: bool = False,
        router_rolls: bool = False,
    ) -> None:
        """Record the progress of a service's rollout; one that waits for people or pods does not
        count.

        Args:
            router_waits: whether new routers wait for the service's turn.
            router_rolls: whether routers are being replaced.
        """
        waits = progress.is_held or progress.is_asleep or progress.reason == PAUSED
        is_renewing = progress.renewal == ROLLING_OUT
        is_rolling = is_renewing or (progress.stage.value in _ROLLING and not waits)
        if router_rolls and not is_rolling:
            self._only_routers.add(key)
        else:
            self._only_routers.discard(key)
        is_waiting = router_waits or QUEUED in (progress.reason, progress.renewal)
        self._place(key, is_rolling or router_rolls, is_waiting)

    def forget(self, key: ServiceKey) -> None:
        """Remove a service that is gone or can no longer be rolled out."""
        self._only_routers.discard(key)
        self._place(key, is_rolling=False, is_waiting=False)

    def drop(self) -> None:
        """Remove all services, because another operator leads."""
        self._rolling = None
        self._only_routers.clear()
        self._waiting.clear()

    def _place(self, key: ServiceKey, is_rolling: bool, is_waiting: bool) -> None:
        """Puts a service where it belongs, and wakes as many as there is room for then."""
        rolling = set() if self._rolling is None else self._rolling
        if ((key in rolling), (key in self._waiting)) == (is_rolling, is_waiting):
            return
        for services, is_member in ((rolling, is_rolling), (self._waiting, is_waiting)):
            if is_member:
                services.add(key)
            else:
                services.discard(key)
        room = max(0, self._max_rollouts - len(rolling))
        for waiting in sorted(self._waiting)[:room]:
            self._wake(waiting)


def _is_rolling(status: Mapping[str, Any]) -> bool:
    return status.get("rollout", {}).get("stage") in _ROLLING
