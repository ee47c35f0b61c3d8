"""What parts of a spec are made of, and the parts about rollouts and streams."""

import msgspec

_WORDS = {"kv": "KV", "e2e": "E2E", "ca": "CA", "url": "URL"}


def camel(name: str) -> str:
    """`session_kv_limit` is `sessionKVLimit` in the API."""
    first, *rest = name.split("_")
    return first + "".join(_WORDS.get(word, word.capitalize()) for word in rest)


class Bytes(int):
    """A quantity of bytes."""


class Seconds(float):
    """A duration."""


class Section(msgspec.Struct, frozen=True, kw_only=True, rename=camel):
    """Base of all parts of a spec; field names are those of the API in snake case."""


class Thresholds(Section, frozen=True, kw_only=True):
    error_rate: float
    ttft_ratio: float
    e2e_ratio: float
    restarts: int


class Rollout(Section, frozen=True, kw_only=True):
    strategy: str
    weight_steps: tuple[int, ...]
    step_duration: Seconds
    min_requests: int
    max_wait: Seconds
    start_deadline: Seconds
    canary_replicas: int
    thresholds: Thresholds
    auto_rollback: bool
    paused: bool


class Streaming(Section, frozen=True, kw_only=True):
    buffer_tokens: int
    coalesce_tokens: int
    coalesce_window: Seconds
    tokens_per_second: float
    keepalive: Seconds
