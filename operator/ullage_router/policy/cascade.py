"""Decides which of a cascade's models answer a request.

A cascade sends a request to a small model first and hands it over to a larger one when the small
model is unsure. `features` reads a request before any model has seen it, `plan` chooses the first
step, and `Confidence` judges a step's first tokens.

Only the beginning and the end of the last turn are searched for code and maths. The question is
usually in one of these places, and a long conversation takes no longer to search than a short one.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CascadeSection, FallbackSection, HeuristicsSection

SEARCHED_CHARACTERS = 4000
"""Number of characters searched at each end of the last turn."""
CHARACTERS_PER_TOKEN = 4
"""Average number of characters per token, for estimates."""
CODE_LINES = 2
"""Minimum number of code-like lines for a text to count as code."""
MATHS_SHARE = 0.12
"""Minimum fraction of digits and operators in a text's non-space characters to count as maths."""
MATHS_CHARACTERS = 8
"""Minimum number of digits and operators for a text to count as maths."""
HELD_SHARE = 0.5
"""Maximum fraction of a request's remaining time that one step of the cascade may use.

The rest is left for the next step.
"""

Reason = Literal["FIRST", "HARD", "SEVERAL_ANSWERS", "OWN_TOKENS", "PEAK"]

_FENCE = re.compile(r"^\s{0,3}(?:```|~~~)", re.MULTILINE)
_CODE_LINE = re.compile(
    r"^[ \t]*+(?:"
    r"(?:async[ \t]+)?(?:def|fn|func|function)[ \t]+\w+[ \t]*[(<]"
    r"|(?:class|struct|enum|interface|impl|trait)[ \t]+\w+[ \t]*[:({<]"
    r"|from[ \t]+[\w.]+[ \t]+import[ \t]|import[ \t]+[\w.]+;?[ \t]*$"
    r"|\#include[ \t]*[<\"]"
    r"|(?:const|let|var)[ \t]+\w+[ \t]*[:=]"
    r"|(?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER)[ \t]+\S"
    r"|[^\n]{0,200}[;{}][ \t]*$"
    r")",
    re.MULTILINE,
)
_FORMULA = re.compile(r"\$\$|\\(?:frac|sum|int|sqrt|begin|cdot|lim|infty)\b|\w\s?\^\s?[\w({]")
_MATHS = frozenset("0123456789+-*/=<>^%∑∫√≤≥≠±×÷π")  # noqa: RUF001 - the signs themselves


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a request that determine the first step of its cascade."""

    characters: int = 0
    """Total number of characters in all turns."""
    turns: int = 1
    has_code: bool = False
    has_maths: bool = False
    has_tools: bool = False
    has_several_answers: bool = False
    """Whether the request asks for several samples or beams.

    One confidence value cannot judge several answers.
    """
    is_bound: bool = False
    """Whether the request contains token ids of this model, which other models would misread."""
    priority: int = 0


def features(request: inference_pb2.GenerateRequest) -> Features:
    """Return a request's features.

    The run time depends only on the number of turns, because at most 2 * SEARCHED_CHARACTERS
    characters are searched.
    """
    texts = [m.content for m in request.messages.messages] or [request.text]
    last = _ends(texts[-1])
    return Features(
        characters=sum(map(len, texts)),
        turns=len(texts),
        has_code=has_code(last),
        has_maths=has_maths(last),
        has_tools=request.messages.HasField("tools"),
        has_several_answers=_has_several_answers(request.samples),
        is_bound=_is_bound(request),
        priority=request.priority,
    )


def estimated_tokens(request: inference_pb2.GenerateRequest) -> int:
    """Estimate the number of prompt tokens to charge until the actual tokens are counted."""
    characters = sum(len(m.content) for m in request.messages.messages) + len(request.text)
    return len(request.token_ids.ids) or 1 + characters // CHARACTERS_PER_TOKEN


def has_code(text: str) -> bool:
    """Return whether a text has a code fence, or at least CODE_LINES lines that look like code."""
    if _FENCE.search(text):
        return True
    lines = _CODE_LINE.finditer(text)
    return sum(1 for _ in itertools.islice(lines, CODE_LINES)) == CODE_LINES


def has_maths(text: str) -> bool:
    """Return whether a text has a formula, or many digits and operators for its length."""
    if _FORMULA.search(text):
        return True
    signs = sum(character in _MATHS for character in text)
    size = sum(not character.isspace() for character in text)
    return signs >= MATHS_CHARACTERS and signs >= MATHS_SHARE * size


def _ends(text: str) -> str:
    """Return the first and the last SEARCHED_CHARACTERS characters of a text."""
    if len(text) <= 2 * SEARCHED_CHARACTERS:
        return text
    return f"{text[:SEARCHED_CHARACTERS]}\n{text[-SEARCHED_CHARACTERS:]}"


def _has_several_answers(samples: inference_pb2.Samples) -> bool:
    return samples.n > 1 or samples.best_of > 1 or samples.HasField("beam")


def _is_bound(request: inference_pb2.GenerateRequest) -> bool:
    return (
        request.WhichOneof("input") == "token_ids"
        or bool(request.stop.stop_token_ids)
        or bool(request.sampling.logit_bias)
        or bool(request.sampling.allowed_token_ids)
        or request.output.return_token_ids
    )


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """The load on this service's engines."""

    pressure_level: int = 0
    """Lowest pressure level among the ready engines (0 if no engine is ready)."""
    queued: int = 0
    """Number of requests waiting in this router."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The cascade steps that one request may take."""

    steps: tuple[int, ...]
    """Indices of the steps, in the order in which they are tried."""
    is_judged: bool
    """Whether every step but the last withholds its first tokens until its confidence is known."""
    is_parallel: bool
    """Whether each step starts at the same time as the previous step."""
    reason: Reason


def plan(features: Features, load: ServiceLoad, policy: CascadeSection) -> Plan:
    """Return a request's steps: a first step chosen by its features, then all larger models."""
    last = len(policy.steps) - 1
    if features.is_bound:
        return Plan((policy.own,), False, False, "OWN_TOKENS")
    if policy.fallback and is_peak(features.priority, load, policy.fallback):
        return Plan(tuple(range(last + 1)), False, False, "PEAK")
    if features.has_several_answers:
        return Plan((last,), False, False, "SEVERAL_ANSWERS")
    points = difficulty(features, policy.heuristics)
    steps = tuple(range(min(points, last), last + 1))
    return Plan(steps, len(steps) > 1, policy.parallel, "HARD" if points else "FIRST")


def difficulty(features: Features, policy: HeuristicsSection) -> int:
    """Return the number of signs that a prompt is hard, such as its length or the presence of code.

    For each sign, the request starts one model further up the cascade.
    """
    signs = (
        0 < policy.prompt_characters < features.characters,
        0 < policy.turns < features.turns,
        policy.code and features.has_code,
        policy.maths and features.has_maths,
        policy.tools and features.has_tools,
    )
    return sum(signs)


def is_peak(priority: int, load: ServiceLoad, policy: FallbackSection) -> bool:
    """Return whether the load is so high that requests of this priority use the fallback model."""
    if priority > policy.max_priority:
        return False
    return (
        0 < policy.pressure_level <= load.pressure_level
        or 0 < policy.queued_requests <= load.queued
    )


class Confidence:
    """The running geometric mean probability of an answer's first tokens.

    Args:
        num_judged: number of tokens to judge. If the answer is shorter, all its tokens are judged.
    """

    def __init__(self, num_judged: int) -> None:
        self._wanted = num_judged
        self._tokens = 0
        self._logprobs: list[float] = []

    def add(self, tokens: int, logprobs: Iterable[float]) -> None:
        """Add the next tokens of the answer.

        Args:
            tokens: number of tokens that arrived, with or without log-probabilities.
            logprobs: natural log-probabilities, at most one per token.
        """
        self._tokens += tokens
        room = self._wanted - len(self._logprobs)
        self._logprobs.extend(value for value, _ in zip(logprobs, range(room), strict=False))

    @property
    def tokens(self) -> int:
        """Number of tokens that have arrived."""
        return self._tokens

    @property
    def is_complete(self) -> bool:
        """Whether all tokens to judge have arrived."""
        return self._tokens >= self._wanted

    @property
    def value(self) -> float | None:
        """The geometric mean of the probabilities, which is exp(mean log-probability), from 0 to 1.

        None if there are no log-probabilities or their mean is NaN.
        """
        mean = sum(self._logprobs) / len(self._logprobs) if self._logprobs else math.nan
        if math.isnan(mean):
            return None
        return math.exp(0.0 if mean > 0 else mean)

    def reaches(self, threshold: float) -> bool:
        """Return whether the confidence is known and at least the threshold."""
        return self.value is not None and self.value >= threshold
