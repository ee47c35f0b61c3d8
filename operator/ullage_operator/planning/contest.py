"""Decides which operator serves a service that several operators watch. Pure.

Each release of the chart elects its leader by its own lease, so two releases with the same
namespaces would both act. The service's status names the operator that serves it. Another operator
writes a question to the status, and the serving operator answers by removing the question. If the
serving operator answers, the other operator leaves the service alone. If the serving operator does
not answer, the other operator takes over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ANSWER_S = 60.0
"""Seconds within which a live operator answers, even if its leader changes."""
ASK_AGAIN_S = 300.0
"""Seconds after which an operator that answered is asked again."""

Status = Mapping[str, Any]


class ServingTurn(StrEnum):
    """What an operator does about a service that another operator may serve."""

    SERVE = "serve"
    ASK = "ask"
    """Ask the serving operator whether it is alive."""
    WAIT = "wait"
    """Wait for the serving operator's answer."""
    YIELD = "yield"
    """Leave the service to the operator that answered."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the operator that serves a service: whether that operator is still alive."""

    holder: str
    """Name of the operator that was asked."""
    asked_s: float
    """Time of the question in seconds, on the clock of this process."""
    is_answered: bool = False
    """Whether the serving operator's answer was logged."""


def turn_of(own: str, status: Status, question: Question | None, now_s: float) -> ServingTurn:
    """Decide what the operator `own` does about a service that another operator may serve.

    Args:
        question: the operator's last question, or None before the first one.
    """
    holder = holder_of(status)
    if holder in ("", own):
        return ServingTurn.SERVE
    if question is None or question.holder != holder:
        return ServingTurn.ASK
    waited_s = now_s - question.asked_s
    if challenger_of(status) == own:
        return ServingTurn.WAIT if waited_s < ANSWER_S else ServingTurn.SERVE
    return ServingTurn.YIELD if waited_s < ASK_AGAIN_S else ServingTurn.ASK


def holder_of(status: Status) -> str:
    """Return the name of the operator that serves a service (empty if no operator serves it)."""
    return str((status.get("operator") or {}).get("name", ""))


def challenger_of(status: Status) -> str:
    """Return the name of the operator whose question is unanswered (empty without a question)."""
    return str((status.get("operator") or {}).get("challenger", ""))


def asked(own: str, status: Status) -> dict[str, Any]:
    """Return a status that contains an operator's question."""
    return {**status, "operator": {"name": holder_of(status), "challenger": own}}


def held(own: str, status: Status) -> dict[str, Any]:
    """Return a status that names `own` as the serving operator and has no unanswered question."""
    return {**status, "operator": {"name": own}}
