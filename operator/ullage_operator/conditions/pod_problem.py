"""A problem of a pod, as the status and conditions of its service report it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Pod = Mapping[str, Any]

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
CONFIG_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
CRASH_LOOP = "CrashLoopBackOff"
CANNOT_START = "CannotStart"
STUCK_REASONS = IMAGE_REASONS | CONFIG_REASONS | {CRASH_LOOP, CANNOT_START}


@dataclass(frozen=True, slots=True)
class PodProblem:
    """A pod's problem, as a service's status reports it."""

    pod: str
    """Name of the pod (empty for a problem without a pod)."""
    reason: str
    message: str
    """The problem and its remedy."""
    blocks: bool
    """Whether the service is not Ready because of this problem, even if other pods serve.

    The value is true for crash loops and for processes that cannot start.
    """

    @property
    def is_stuck(self) -> bool:
        """Return whether only a change to the spec or to a named object can solve the problem."""
        return self.reason in STUCK_REASONS

    def __str__(self) -> str:
        return f"pod {self.pod}: {self.message}" if self.pod else self.message


@dataclass(frozen=True, slots=True)
class ObjectWarning:
    """The latest Event of type Warning about a pod or a workload."""

    reason: str
    """Reason in CamelCase, such as FailedMount."""
    message: str


Warnings = Mapping[str, ObjectWarning]
"""The latest warnings, by the uid of the pod or workload."""


def problem_of(pod: Pod, reason: str, message: str, blocks: bool = False) -> PodProblem:
    return PodProblem(str(pod["metadata"]["name"]), reason, message, blocks)
