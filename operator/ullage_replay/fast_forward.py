"""Computes several decode steps as one, while nothing can happen between them.

An engine that decodes the same sequences again and again would need one call of the scheduler a
step, which takes most of a replay's time. Where no request arrives, no answer ends and no report is
due, the outcome of the next steps is known, and the scheduler takes their tokens at once: as draft
tokens that are all right. Durations and speeds are still accounted for step by step.
"""

from collections.abc import Sequence as Tokens
from typing import Protocol

from msgspec.structs import replace

from ullage_engine.kv_cache.prefix_cache import PrefixCache
from ullage_engine.protocol.step_plan import Chunk, SampledToken
from ullage_engine.scheduler.batch_plan import SchedulerLimits
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.sequence import Sequence
from ullage_engine.scheduler.speculation import Speculation

MOST_STEPS = 64
"""Most steps that are computed in addition to one."""


class Horizon(Protocol):
    """What the replay knows about the next steps."""

    def num_more_steps(self, lengths: dict[str, int], most: int) -> int:
        """Return how many more steps than one certainly follow one another, at most `most`.

        Args:
            lengths: lengths in tokens of the sequences that decode, by request id.
            most: the most that the sequences have room for.
        """

    def next_tokens(self, request_id: str, length: int, count: int) -> list[int]:
        """Return the tokens that follow a sequence of this length."""


class FastForward(Speculation):
    """Drafts the tokens that the trace prescribes, for as many steps as are certain."""

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, horizon: Horizon) -> None:
        super().__init__(limits, cache)
        self._horizon = horizon

    def draft(self, decoding: list[Sequence], num_running: int) -> dict[Sequence, list[int]]:
        """Draft tokens for all sequences of a batch that only decodes, or for none of them."""
        if not decoding or len(decoding) < num_running:
            return {}
        room = min([self._room(sequence) for sequence in decoding])
        if room <= 0:
            return {}
        lengths = {sequence.request_id: len(sequence.token_ids) for sequence in decoding}
        count = self._horizon.num_more_steps(lengths, min(room, MOST_STEPS))
        if count <= 0:
            return {}
        following = self._horizon.next_tokens
        return {
            sequence: following(sequence.request_id, len(sequence.token_ids), count)
            for sequence in decoding
        }

    def verify(
        self, planned: dict[str, tuple[Sequence, Chunk]], sampled: list[SampledToken]
    ) -> tuple[list[SampledToken], dict[str, list[SampledToken]]]:
        """Accept all draft tokens."""
        if len(sampled) <= len(planned):
            return sampled, {}

        drawn: dict[str, list[SampledToken]] = {}
        for token in sampled:
            drawn.setdefault(token.request_id, []).append(token)
        for request_id, (sequence, chunk) in planned.items():
            sequence.token_ids += [token.token_id for token in drawn[request_id][:-1]]
            planned[request_id] = (sequence, replace(chunk, num_sampled=1))
        last = [tokens[-1] for tokens in drawn.values()]
        return last, {name: tokens[:-1] for name, tokens in drawn.items()}


class StepwiseThroughput(ThroughputEstimator):
    """Observes each of the steps that were computed as one."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds_of_latest: Tokens[float] = ()
        """Durations of the steps that were computed as one, in seconds."""

    def observe(
        self, seconds: float, *, num_decodes: int, num_prompt_tokens: int, num_accepted: int = 0
    ) -> None:
        if not num_accepted:
            super().observe(seconds, num_decodes=num_decodes, num_prompt_tokens=num_prompt_tokens)
            return
        for each in self.step_seconds_of_latest:
            super().observe(each, num_decodes=num_decodes, num_prompt_tokens=0)
