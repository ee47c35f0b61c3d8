"""What a request looks like before any model has seen it: a pure function of the request.

Only the last turn is searched for code and maths, and only its ends: a long conversation costs no
more than a short one, and what is asked stands in the last turn.
"""

import itertools
import re
from dataclasses import dataclass

from ullage.inference.v1 import inference_pb2

SEARCHED_CHARACTERS = 4000
"""Of either end of the last turn."""
CHARACTERS_PER_TOKEN = 4
CODE_LINES = 2
"""As many lines that read like code make a prompt code."""
MATHS_SHARE = 0.12
"""Share of digits and operators among all but spaces from which a text is maths."""
MATHS_CHARACTERS = 8

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
class Traits:
    """One request, as far as the choice of a step cares."""

    characters: int = 0
    """Of all turns."""
    turns: int = 1
    has_code: bool = False
    has_maths: bool = False
    has_tools: bool = False
    has_several_answers: bool = False
    """Samples or beams: there is no one stream of tokens to judge."""
    is_bound: bool = False
    """It speaks in tokens of this service's own model, which no other reads alike."""
    priority: int = 0


def traits(request: inference_pb2.GenerateRequest) -> Traits:
    """Reads a request in time bounded by SEARCHED_CHARACTERS and the number of turns."""
    texts = [m.content for m in request.messages.messages] or [request.text]
    last = _ends(texts[-1])
    return Traits(
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
    """Of the prompt, before anybody has tokenised it; charged until it is known."""
    characters = sum(len(m.content) for m in request.messages.messages) + len(request.text)
    return len(request.token_ids.ids) or 1 + characters // CHARACTERS_PER_TOKEN


def has_code(text: str) -> bool:
    """A fence, or several lines that begin or end as code does."""
    if _FENCE.search(text):
        return True
    lines = _CODE_LINE.finditer(text)
    return sum(1 for _ in itertools.islice(lines, CODE_LINES)) == CODE_LINES


def has_maths(text: str) -> bool:
    """A formula, or many digits and operators for its length."""
    if _FORMULA.search(text):
        return True
    signs = sum(character in _MATHS for character in text)
    size = sum(not character.isspace() for character in text)
    return signs >= MATHS_CHARACTERS and signs >= MATHS_SHARE * size


def _ends(text: str) -> str:
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
        or request.output.return_token_ids
    )
