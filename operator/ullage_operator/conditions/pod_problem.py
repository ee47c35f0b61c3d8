"""A problem with a pod, as reported in the status and conditions of its service."""

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
APPLY_FAILED = "ApplyFailed"
STUCK_REASONS = IMAGE_REASONS | CONFIG_REASONS | {CRASH_LOOP, CANNOT_START, APPLY_FAILED}


@dataclass(frozen=True, slots=True)
class PodProblem:
    """A problem with a pod, as reported in the service's status."""

    pod: str
    """Name of the pod (empty for a problem without a pod)."""
    reason: str
    message: str
    """The problem and its remedy."""
    blocks: bool
    """Whether this problem makes the service not Ready, even if other pods serve.

    The value is true for crash loops and for processes that cannot start.
    """

    @property
    def is_stuck(self) -> bool:
        """Return whether the problem persists until the spec or a referenced object is changed."""
        return self.reason in STUCK_REASONS

    def __str__(self) -> str:
        return f"pod {self.pod}: {self.message}" if self.pod else self.message


@dataclass(frozen=True, slots=True)
class ObjectWarning:
    """The latest Warning Event about a pod or workload."""

    reason: str
    """Reason in CamelCase, such as FailedMount."""
    message: str


Warnings = Mapping[str, ObjectWarning]
"""The latest warnings, by the uid of the pod or workload."""


def problem_of(pod: Pod, reason: str, message: str, blocks: bool = False) -> PodProblem:
    return PodProblem(str(pod["metadata"]["name"]), reason, message, blocks)
