"""The four results of `decide`: run, shrink the context, wait, or refuse."""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from ullage_common.request_cost import Demand

Action = Literal["accept", "shrink", "queue", "route4", "reject"]
Step = Literal["accept", "shrinkOutput", "route"]


class Run(msgspec.Struct, frozen=True):
    """Send the request to an engine."""

    action: Action
    reason: str
    pool: str
    engine: str
    """Key of the engine that runs the request."""
    max_tokens: int
    demand: Demand
    step: Step
    """What made the request fit: enough memory at home, a shorter output, or another pool."""
    step_limit_s: float = math.inf
    """Longest step, in seconds, with which the request meets its deadline on this engine."""
    choices: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes that the request needs on each engine that may serve it instead, by engine key.

    Empty if the prefill window cannot move the request.
    """
    is_shrunk: bool = False
    """Whether the output is shorter than the engine allows, in the home pool or in another one."""


class ShrinkContext(msgspec.Struct, frozen=True):
    """Drop turns until the prompt has at most `prompt_tokens` tokens, then decide again.

    If the reason is CONTEXT_TOO_LONG, the shortened prompt is used even if it still has more than
    `prompt_tokens` tokens.
    """

    reason: str
    prompt_tokens: int
    fewest: int
    """Minimum number of tokens that the prompt must keep."""


class Wait(msgspec.Struct, frozen=True):
    """Wait until this pool has memory, then decide again."""

    reason: str
    pool: str
    demand: Demand
    longest_s: float = math.inf
    """Longest useful wait in seconds.

    After a longer wait, the request would be late even on an idle engine.
    """
    available: int = 0
    """Bytes available on the pool's usable engine with the most free memory."""
    review_s: float = math.inf
    """Seconds after which to decide again, because the forecast will then have proven wrong."""


class Refuse(msgspec.Struct, frozen=True):
    """Refuse the request with this error."""

    kind: Literal["invalid", "busy", "unavailable"]
    reason: str
    message: str
    demand: Demand | None = None
    available: int = 0
    """Bytes available on the pool's usable engine with the most free memory."""
    retry_after_s: int | None = None
    pool: str = ""
    """The pool that would have served the request (empty if there is none)."""
    field: str = "input"
    """The invalid field of a request that can never be served."""


NextStep = Run | ShrinkContext | Wait | Refuse
