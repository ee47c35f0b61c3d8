"""Everything that the operator raises.

OperatorError
├── Permanent             trying again cannot help until somebody changes something
│   ├── InvalidManifest   an LLMService that the API would refuse; lists every problem
│   ├── LocalFailure      a local run that cannot go on
│   └── ClusterRefused    the API server says that a request is wrong
└── Temporary             worth another try after `delay_s`
    └── ClusterUnavailable  the API server did not answer, is busy, or does not let us yet
        ├── ClusterDenied     the operator's account lacks a right
        ├── ClusterPostponed  this request meets a quota, admission or a failing webhook
        ├── ClusterConflict   somebody else was faster
        ├── ClusterForgets    the history asked for is gone: list anew
        └── KindAbsent        the API server does not serve the kind
"""

from collections.abc import Sequence
from dataclasses import dataclass


class OperatorError(Exception):
    """Base of this tree."""


class Permanent(OperatorError):
    """Trying again cannot help until somebody changes something."""


class Temporary(OperatorError):
    """Worth another try after `delay_s` seconds."""

    def __init__(self, message: str, delay_s: float = 5.0) -> None:
        super().__init__(message)
        self.delay_s = delay_s


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a manifest."""

    path: str
    """Field, such as spec.memory.thresholdPercent; empty for the whole document."""
    message: str
    """What is wrong, with the value, and what to do."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InvalidManifest(Permanent):
    """An LLMService that the API would refuse."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class LocalFailure(Permanent):
    """A local run that cannot go on; the message says why in one line."""


class ClusterRefused(Permanent):
    """The API server says that a request of ours is wrong."""


class ClusterUnavailable(Temporary):
    """The API server did not answer, is busy, or does not let us yet."""


class ClusterDenied(ClusterUnavailable):
    """The operator's account lacks a right; `verb` is the one, such as patch."""

    def __init__(self, message: str, verb: str, delay_s: float) -> None:
        super().__init__(message, delay_s)
        self.verb = verb


class ClusterPostponed(ClusterUnavailable):
    """This request cannot be done now, for a quota, admission or a webhook; others may be."""


class ClusterConflict(ClusterUnavailable):
    """Somebody else wrote first."""


class ClusterForgets(ClusterUnavailable):
    """The history that a watch or a page needs is gone: list anew."""


class KindAbsent(ClusterUnavailable):
    """The API server does not serve the kind."""
