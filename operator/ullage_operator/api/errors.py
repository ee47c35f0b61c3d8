"""The exceptions that the operator raises.

OperatorError
├── Permanent             every retry fails until someone fixes the cause
│   ├── InvalidManifest   an LLMService that the API would reject, with every problem
│   ├── LocalFailure      a local run that cannot continue
│   └── ClusterRefused    the API server rejects a request as invalid
└── Temporary             a retry after `delay_s` may help
    └── ClusterUnavailable  the API server is unreachable, busy, or temporarily rejects a request
        ├── ClusterDenied     the operator's account lacks a permission
        ├── ClusterPostponed  a quota, admission or a webhook temporarily blocks this request
        ├── ClusterConflict   another client wrote the object first
        ├── ClusterForgets    the requested resource version has expired, so relist
        └── KindAbsent        the API server does not serve the kind
"""

from collections.abc import Sequence
from dataclasses import dataclass


class OperatorError(Exception):
    """Base class of all operator errors."""


class Permanent(OperatorError):
    """An error that recurs on every retry until someone fixes its cause."""


class Temporary(OperatorError):
    """An error that may go away if the caller retries after `delay_s` seconds."""

    def __init__(self, message: str, delay_s: float = 5.0) -> None:
        super().__init__(message)
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with one field of a manifest or with the whole manifest, and how to fix it."""

    path: str
    """Path of the field, for example spec.memory.thresholdPercent (empty for the whole document).
    """
    message: str
    """Message that states the problem, the offending value and the remedy."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidManifest(Permanent):
    """Raised for an LLMService that the API would reject. It carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class LocalFailure(Permanent):
    """Raised if a local run cannot continue. The message states the reason in one line."""


class ClusterRefused(Permanent):
    """Raised if the API server rejects a request as invalid, so that a retry would fail too."""


class ClusterUnavailable(Temporary):
    """The API server did not respond, is busy, or temporarily rejects a request."""


class ClusterDenied(ClusterUnavailable):
    """The operator's account lacks permission for the verb `verb`, for example patch."""

    def __init__(self, message: str, verb: str, delay_s: float) -> None:
        super().__init__(message, delay_s)
        self.verb = verb


class ClusterPostponed(ClusterUnavailable):
    """A quota, an admission plugin or a webhook temporarily blocks this particular request."""


class ClusterConflict(ClusterUnavailable):
    """Raised if a write fails because another client created or changed the object first."""


class ClusterForgets(ClusterUnavailable):
    """The resource version of a watch or list page has expired, so the caller must relist."""


class KindAbsent(ClusterUnavailable):
    """Raised if the API server does not serve the kind of object that a request is about."""
