"""What a decision is made from: the engines, the request and the policy at one moment."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ullage_router.config import PrefillSection, Rung, RungsSection
from ullage_router.predict import Profile, most_tokens

# Share of the time left that the prompts before and its own may take: the answer needs the rest.
PREFILL_SHARE = 0.8


class Standing(Enum):
    """Whether an engine takes requests."""

    USABLE = "usable"
    RECOVERING = "recovering"
    """Connected, with a worker that is not ready yet: worth waiting for."""
    UNUSABLE = "unusable"


class QueueState(Enum):
    """What the queue holds for this request."""

    OPEN = "open"
    FULL = "full"
    SPENT = "spent"
    """It has waited as long as it may."""
    LATE = "late"
    """Its answer could not end in time any more."""


@dataclass(frozen=True, slots=True)
class Release:
    """Memory that an engine predicts to get back."""

    after_s: float
    size: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at one moment."""

    id: str
    pool: str
    standing: Standing
    available: int
    """Reported headroom less the credit of requests that the report cannot include, bytes."""
    capacity: int
    """KV pool, bytes."""
    profile: Profile
    expected_output: int
    max_model_len: int
    health: float = 1.0
    load: int = 0
    """Requests running, waiting and on their way."""
    releases: tuple[Release, ...] = ()
    backlog_tokens: int = 0
    """Prompt tokens that are computed before a new request's."""
    prefill_pairs: int = 0
    """Products of queries and keys in those of this router's prompts."""
    prefill_speed: float = 0.0
    """Tokens per second; 0 when unknown."""

    def longest(self, prompt_tokens: int, samples: int) -> int:
        """The longest sequence it can ever hold, tokens, of each sample of such a prompt."""
        held = most_tokens(self.profile, self.capacity, prompt_tokens, samples)
        return min(self.max_model_len, held)

    def prefill_work(self, mlp_products: int) -> int:
        """What is computed before a new request's prompt (`prefill.work`)."""
        return self.prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def backlog_s(self) -> float:
        """Seconds until a new request's prompt is begun; 0 when the speed is unknown."""
        return self.backlog_tokens / self.prefill_speed if self.prefill_speed else 0.0

    def least_s(self, prompt_tokens: int) -> float:
        """Seconds that an answer to such a prompt takes at least; 0 when the speed is unknown."""
        return prompt_tokens / self.prefill_speed / PREFILL_SHARE if self.prefill_speed else 0.0

    def is_in_time(self, prompt_tokens: int, patience_s: float) -> bool:
        """A prompt would be computed in time. An idle engine always may try."""
        if not self.backlog_s:
            return True
        first_token_s = self.backlog_s + prompt_tokens / self.prefill_speed
        return first_token_s <= PREFILL_SHARE * patience_s


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about the request and those before it."""

    prompt_tokens: int
    max_tokens: int
    """Most output tokens wanted."""
    min_tokens: int
    """Fewest output tokens that still make an answer: shrinking stops here."""
    samples: int = 1
    """Answers to the prompt that are generated, each of as many output tokens."""
    droppable: bool = False
    """The conversation has turns that may be dropped."""
    queue: QueueState = QueueState.OPEN
    ahead: Mapping[str, int] = field(default_factory=dict)
    """Bytes that requests before this one wait for, by pool; a pool without waiters is absent."""
    refused_by: frozenset[str] = frozenset()
    """Engines that refused it since their last report."""
    patience_s: float = math.inf
    """Time left for the whole answer."""
    preferred: str = ""
    """The engine whose caches have most of its beginning; empty when none is known."""
    draw: int = 0
    """Chance, from outside, so that the same input gives the same decision."""


@dataclass(frozen=True, slots=True)
class Policy:
    pools: tuple[str, ...]
    """In order of preference."""
    large_request_tokens: int
    large_request_kv: int
    ladder: tuple[Rung, ...]
    rungs: RungsSection = field(default_factory=RungsSection)
    max_extra_load: int = 8
    """Requests that a preferred engine may have more than the one it is preferred to."""
    prefill: PrefillSection = field(default_factory=PrefillSection)
