"""Limits how many services roll out at the same time after a change to the operator itself.

A new default image creates a new revision of every service that does not set an image. If all
services rolled out at once, each would need additional GPUs, and a bad image would reach all of
them. The limit also applies to a new router image, which would otherwise interrupt the streams of
all services at once.
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
    """The services with a running rollout, and the services that wait for their turn.

    Rollouts that start because a service was edited count towards the limit, but do not wait.

    Args:
        max_rollouts: the maximum number of services that may be in a rollout at once.
        wake: called with a service when its turn comes, possibly more than once.
    """

    def __init__(self, max_rollouts: int, wake: Callable[[ServiceKey], None]) -> None:
        self._max_rollouts = max_rollouts
        self._wake = wake
        self._rolling: set[ServiceKey] | None = None
        """Services with a running rollout (None until those of the previous leader are known)."""
        self._only_routers: set[ServiceKey] = set()
        """Services with a rollout that replaces only routers."""
        self._waiting: set[ServiceKey] = set()
        self._seeking: set[ServiceKey] = set()
        """Services with a canary pod, or an engine pod after a promotion, that has no node yet."""
        self._roomless: set[ServiceKey] = set()
        """Services with an unschedulable engine."""

    def may_begin(self, key: ServiceKey, statuses: Callable[[], Statuses]) -> bool:
        """Return whether a service may start a rollout that was not triggered by an edit.

        Only one rollout at a time may wait for free nodes. If pods of two services waited at once,
        one could take the resources that the other service freed for its own pod.

        Args:
            key: the service.
            statuses: a function that returns all services with their status, and is called at most
                once.
        """
        if self._rolling is None:
            self._rolling = {each for each, status in statuses() if _is_rolling(status)}
        if key in self._rolling and key not in self._only_routers:
            return True
        if self._seeking - {key}:
            return False
        return len(self._rolling - {key}) < self._max_rollouts

    def may_yield(self, key: ServiceKey) -> bool:
        """Return whether resources freed by deleting a service's old pod would go to its next pod.

        An unschedulable engine of another service could take them first, so the result is False
        while there is one. If several edited services wait for resources at the same time, the
        first by name takes precedence.
        """
        others = (self._roomless | self._seeking) - {key}
        return all({key, other} <= self._seeking and key < other for other in others)

    def on_planned(
        self,
        key: ServiceKey,
        progress: RolloutProgress,
        *,
        router_waits: bool = False,
        router_rolls: bool = False,
        seeks_room: bool = False,
        lacks_room: bool = False,
    ) -> None:
        """Record the progress of a service's rollout.

        A rollout that waits for a user or for sleeping pools does not count towards the limit.

        Args:
            key: the service.
            progress: the progress of its rollout.
            router_waits: whether the service must wait for its turn to roll out the operator's new
                router pod template.
            router_rolls: whether routers are being replaced.
            seeks_room: whether a pod of its canary, or an engine pod after the promotion, has no
                node yet.
            lacks_room: whether one of the service's engines is unschedulable.
        """
        waits = progress.is_held or progress.is_asleep or progress.reason == PAUSED
        is_renewing = progress.renewal == ROLLING_OUT
        is_rolling = is_renewing or (progress.stage.value in _ROLLING and not waits)
        if router_rolls and not is_rolling:
            self._only_routers.add(key)
        else:
            self._only_routers.discard(key)
        is_waiting = router_waits or QUEUED in (progress.reason, progress.renewal)
        self._place(
            key,
            is_rolling=is_rolling or router_rolls,
            is_waiting=is_waiting,
            seeks_room=seeks_room,
            lacks_room=lacks_room,
        )

    def forget(self, key: ServiceKey) -> None:
        """Remove a service that was deleted or can no longer be rolled out."""
        self._only_routers.discard(key)
        self._place(key)

    def drop(self) -> None:
        """Remove all services, because another operator is the leader now."""
        self._rolling = None
        for services in (self._only_routers, self._waiting, self._seeking, self._roomless):
            services.clear()

    def _place(
        self,
        key: ServiceKey,
        *,
        is_rolling: bool = False,
        is_waiting: bool = False,
        seeks_room: bool = False,
        lacks_room: bool = False,
    ) -> None:
        """Record a service's state in the queue.

        If the state has changed, wake as many waiting services as may start a rollout now.
        """
        rolling = set() if self._rolling is None else self._rolling
        membership = (
            (rolling, is_rolling),
            (self._waiting, is_waiting),
            (self._seeking, seeks_room),
            (self._roomless, lacks_room),
        )
        if all((key in services) == is_member for services, is_member in membership):
            return

        for services, is_member in membership:
            if is_member:
                services.add(key)
            else:
                services.discard(key)
        room = 0 if self._seeking else max(0, self._max_rollouts - len(rolling))
        for waiting in sorted(self._waiting)[:room]:
            self._wake(waiting)


def _is_rolling(status: Mapping[str, Any]) -> bool:
    return status.get("rollout", {}).get("stage") in _ROLLING
