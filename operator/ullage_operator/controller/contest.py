"""Which of several operators serves a service that more than one of them watches: pure.

Each release of the chart elects its leader by a lease of its own, so two releases with the same
namespaces would both act. The operator that serves a service has its name in the service's status.
Another one asks there whether that operator lives, which takes the question away when it does. The
one that asked then leaves the service alone; where nobody answers, it takes over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ANSWER_S = 60.0
"""Seconds within which an operator that lives answers, a change of its leader included."""
ASK_AGAIN_S = 300.0
"""Seconds after which an operator that answered is asked once more."""

Status = Mapping[str, Any]


class Turn(StrEnum):
    """What an operator does about a service."""

    SERVE = "serve"
    ASK = "ask"
    """Ask the operator that serves it whether it lives."""
    WAIT = "wait"
    """Wait for the answer."""
    YIELD = "yield"
    """Leave it to the operator that answered."""


@dataclass(frozen=True, slots=True)
class Question:
    """What an operator asked about a service."""

    holder: str
    """Name of the operator that was asked."""
    asked_s: float
    """When it was asked, on this process's clock."""
    is_answered: bool = False
    """Whether its answer was logged."""


def turn_of(own: str, status: Status, question: Question | None, now_s: float) -> Turn:
    """Return what the operator of a name does about a service.

    Args:
        question: what it asked last; None before the first question.
    """
    holder = holder_of(status)
    if holder in ("", own):
        return Turn.SERVE
    if question is None or question.holder != holder:
        return Turn.ASK
    waited_s = now_s - question.asked_s
    if challenger_of(status) == own:
        return Turn.WAIT if waited_s < ANSWER_S else Turn.SERVE
    return Turn.YIELD if waited_s < ASK_AGAIN_S else Turn.ASK


def holder_of(status: Status) -> str:
    """Return the name of the operator that serves a service; empty where none does yet."""
    return str((status.get("operator") or {}).get("name", ""))


def challenger_of(status: Status) -> str:
    """Return the name of another operator that asked last and has no answer; empty: none has."""
    return str((status.get("operator") or {}).get("challenger", ""))


def asked(own: str, status: Status) -> dict[str, Any]:
    """Return a status with the question of an operator."""
    return {**status, "operator": {"name": holder_of(status), "challenger": own}}


def held(own: str, status: Status) -> dict[str, Any]:
    """Return a status that names the operator which serves, and answers whoever asked."""
    return {**status, "operator": {"name": own}}
