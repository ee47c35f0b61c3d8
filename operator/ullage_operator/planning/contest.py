"""Decides which operator manages a service that several operators watch.

Each release of the chart elects its leader with its own Lease, so two releases that watch the same
namespace would both act. The service's status therefore names the operator that manages the
service. Another operator writes a liveness query to the status, and the managing operator answers
by removing the query. If the answer comes in time, the other operator leaves the service alone.
Otherwise it takes over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ANSWER_S = 60.0
"""Seconds within which a live operator answers a liveness query, even if its leader changes."""
ASK_AGAIN_S = 300.0
"""Seconds after which an operator that answered is queried again."""

Status = Mapping[str, Any]


class ServingTurn(StrEnum):
    """What an operator does with a service that another operator may already manage."""

    SERVE = "serve"
    ASK = "ask"
    """Query the managing operator to find out whether it is alive."""
    WAIT = "wait"
    """Wait for the managing operator to answer the query."""
    YIELD = "yield"
    """Leave the service to the operator that answered."""


@dataclass(frozen=True, slots=True)
class Question:
    """A liveness query to the operator that manages a service."""

    holder: str
    """Name of the operator that was queried."""
    asked_s: float
    """Time of the query in seconds, on the clock of this process."""
    is_answered: bool = False
    """Whether the managing operator's answer has been seen and logged."""


def turn_of(own: str, status: Status, question: Question | None, now_s: float) -> ServingTurn:
    """Decide what operator `own` does about a service that another operator may already manage.

    Args:
        question: the operator's last query, or None before the first one.
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
    """Return the name of the operator that manages a service (empty if there is none)."""
    return str((status.get("operator") or {}).get("name", ""))


def challenger_of(status: Status) -> str:
    """Return the name of the operator that wrote the open query (empty if there is none)."""
    return str((status.get("operator") or {}).get("challenger", ""))


def asked(own: str, status: Status) -> dict[str, Any]:
    """Return the status with a liveness query from operator `own` added."""
    return {**status, "operator": {"name": holder_of(status), "challenger": own}}


def held(own: str, status: Status) -> dict[str, Any]:
    """Return the status with `own` as the managing operator, and without an open query."""
    return {**status, "operator": {"name": own}}
