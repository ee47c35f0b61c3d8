"""Limits on requests, enforced by the router, and by engines for clients that bypass the router."""

import math
from collections.abc import Mapping
from types import MappingProxyType

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_REQUEST_ID_BYTES = 128
MAX_SESSION_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_FINGERPRINTS = 32
"""Maximum number of distinct fingerprints of engines that have generated parts of an answer."""
MAX_FINGERPRINT_BYTES = 64
MAX_PRIORITY = 100
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024
MAX_STOP_BYTES = 256
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17
"""Maximum number of log-probabilities of one prompt's tokens, alternatives included.

In the largest form, as JSON, they take about 5 MB of a router's memory.
"""
MAX_SAMPLES = 16
MAX_BEAM_WIDTH = 8
MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20
MAX_MESSAGES = 8192
"""Maximum number of turns in a conversation, and of tool calls in all turns together."""
MAX_CALLS = 128
"""Maximum number of tool calls in one turn of a conversation."""
MAX_PARTS = 8192
"""Maximum number of text parts in one turn."""
MAX_PROMPT_TOKENS = 1 << 20
"""Maximum number of tokens in a prompt that consists of token ids."""
MAX_BEAM_STOP_TOKENS = 16
"""Maximum number of stop tokens in a beam search. Each token adds a candidate to every step."""
MAX_LENGTH_PENALTY = 10
MAX_LOGIT_BIAS = 1024
"""Maximum number of tokens with a logit bias."""
MAX_ALLOWED_TOKENS = 1024
"""Maximum number of tokens to which a request may restrict its answer."""
MAX_GRAMMAR_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
"""Maximum nesting depth of objects and arrays in a JSON Schema."""


class Range:
    """An interval of numbers. NaN is never in the interval.

    Requests carry numbers as float32 with about seven digits, in which 0.01 is slightly too small.
    Numbers are therefore rounded to seven digits before the comparison.
    """

    def __init__(self, low: float, high: float, low_open: bool = False) -> None:
        self._low = low
        self._high = high
        self._low_open = low_open

    def __contains__(self, value: float) -> bool:
        value = float(f"{value:.7g}")
        above = value > self._low if self._low_open else value >= self._low
        return math.isfinite(value) and above and value <= self._high

    def __str__(self) -> str:
        return f"{'above' if self._low_open else 'from'} {self._low:g} to {self._high:g}"


SAMPLING_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, 2),
        "top_p": Range(0, 1, low_open=True),
        "min_p": Range(0, 1),
        "repetition_penalty": Range(0.01, 100),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
    }
)
"""Permitted range of each numeric field in `ullage.inference.v1.SamplingParams`."""

LOGIT_BIAS = Range(-100, 100)
