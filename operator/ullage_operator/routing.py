"""The part of a spec about where requests run and wait."""

from ullage_operator.sections import Bytes, Seconds, Section


class Queue(Section, frozen=True, kw_only=True):
    max_requests: int
    max_bytes: Bytes
    max_prompt_bytes: Bytes
    timeout: Seconds
    aging: Seconds


class ShrinkContext(Section, frozen=True, kw_only=True):
    max_dropped_share: float
    keep_turns: int


class ShrinkOutput(Section, frozen=True, kw_only=True):
    min_tokens: int
    min_share: float


class Route(Section, frozen=True, kw_only=True):
    pools: tuple[str, ...]


class Reject(Section, frozen=True, kw_only=True):
    min_retry_after: int
    max_retry_after: int


class Rungs(Section, frozen=True, kw_only=True):
    shrink_context: ShrinkContext
    shrink_output: ShrinkOutput
    route: Route
    reject: Reject


class Affinity(Section, frozen=True, kw_only=True):
    max_sessions: int
    max_prefixes: int
    max_extra_load: int


class Breaker(Section, frozen=True, kw_only=True):
    failures: int
    pause: Seconds
    max_pause: Seconds
    max_ejected_share: float


class Retries(Section, frozen=True, kw_only=True):
    share: float
    per_second: float
    burst: int


class Placement(Section, frozen=True, kw_only=True):
    affinity: Affinity
    breaker: Breaker
    retries: Retries


class Coalesce(Section, frozen=True, kw_only=True):
    enabled: bool
    window: Seconds
    across_tenants: bool


class Replace(Section, frozen=True, kw_only=True):
    enabled: bool


class Prefill(Section, frozen=True, kw_only=True):
    window: Seconds
    mlp_products: int


class Wake(Section, frozen=True, kw_only=True):
    max_requests: int
    max_bytes: Bytes
    timeout: Seconds


class Routing(Section, frozen=True, kw_only=True):
    large_request_tokens: int
    large_request_kv: Bytes
    ladder: tuple[str, ...]
    rungs: Rungs
    wake: Wake
    queue: Queue
    placement: Placement
    prefill: Prefill
    coalesce: Coalesce
    replace: Replace
