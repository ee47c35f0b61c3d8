"""Decides which tokens are computed next and who holds memory; knows neither device nor model."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ullage_engine.core.admission import Room, refuse_double, refuse_forever, refuse_now
from ullage_engine.core.pace import Pace
from ullage_engine.core.plan import Chunk, SampledToken, StepPlan
from ullage_engine.core.request import EngineRequest
from ullage_engine.core.sequence import Sequence
from ullage_engine.kv.blocks import BlockPool, PoolUsage
from ullage_engine.memory.expected import ExpectedOutput
from ullage_engine.memory.predictor import block_bytes, expected_length, num_blocks
from ullage_engine.memory.promises import Promises
from ullage_engine.messages import Profile, Rejected, ReleaseState, TokenLogprobs, TokenOutput

_MAX_RELEASES = 32
_WAITING_PER_RUNNING = 4
"""Size of the waiting room in batches; whoever comes later is better queued by the router."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step and the worker may hold at most."""

    max_model_len: int
    """Longest sequence, tokens."""
    max_sequences: int
    prompt_tokens: int
    """Prompt tokens computed in one step."""
    is_chunked: bool
    """Prompts may be split over steps; otherwise `prompt_tokens` must hold a whole one."""
    decode_tokens: int
    """Tokens of context that the decodes of one step read together."""


class Scheduler:
    """Continuous batching over a block pool.

    Use: `submit` and `cancel` at any time between steps; then for each step `schedule`, compute
    the plan, `commit`. Nothing is dropped: an admitted request ends by a token with a finish, by
    `cancel` or by `fail`.
    """

    def __init__(
        self,
        profile: Profile,
        limits: SchedulerLimits,
        pace: Pace,
        expected: ExpectedOutput,
    ) -> None:
        pool_blocks = profile.kv_pool_bytes // block_bytes(profile)
        self._profile = profile
        self._limits = limits
        self._pace = pace
        self._expected = expected
        self._pool = BlockPool(pool_blocks, profile.block_tokens)
        self._promises = Promises(self._pool)
        self._by_id: dict[str, Sequence] = {}
        self._by_rank: list[Sequence] = []
        self._planned: list[tuple[Sequence, int]] = []
        self._max_running = limits.max_sequences
        self._num_submitted = 0
        self._num_steps = 0
        self._num_preemptions = 0

    # what it holds -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._by_rank)

    @property
    def num_running(self) -> int:
        return sum(sequence.is_running for sequence in self._by_rank)

    @property
    def num_waiting(self) -> int:
        return len(self._by_rank) - self.num_running

    @property
    def num_steps(self) -> int:
        """Steps committed."""
        return self._num_steps

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    @property
    def expected_output_tokens(self) -> int:
        return self._expected.tokens

    @property
    def prefill_backlog_tokens(self) -> int:
        """Prompt tokens admitted and not computed."""
        return sum(each.num_remaining for each in self._by_rank if not each.is_decoding)

    @property
    def free_bytes(self) -> int:
        return self._pool.num_free * block_bytes(self._profile)

    @property
    def available_bytes(self) -> int:
        """What a new request may be promised."""
        return self._promises.num_available * block_bytes(self._profile)

    @property
    def usage(self) -> PoolUsage:
        return self._pool.usage(sum(sequence.num_computed for sequence in self._by_rank))

    def releases(self) -> list[ReleaseState]:
        """Memory predicted to come back, soonest first; the last entry holds all the rest."""
        coming = sorted(self._coming_releases())
        head, rest = coming[: _MAX_RELEASES - 1], coming[_MAX_RELEASES - 1 :]
        if rest:
            head.append((rest[-1][0], sum(num_bytes for _, num_bytes in rest)))
        return [ReleaseState(after_s=after, num_bytes=num_bytes) for after, num_bytes in head]

    def check_integrity(self) -> None:
        """Asserts that no block is lost and no promise exceeds the pool."""
        self._promises.check_integrity(self._by_rank)
        assert len(self._by_rank) == len(self._by_id), "sequences lost or doubled"
        assert self.num_running <= self._limits.max_sequences, "batch too large"
        assert all(each.is_running or not each.block_ids for each in self._by_rank), "idle blocks"

    # requests in and out -------------------------------------------------------------------------

    def submit(
        self, request: EngineRequest, *, resumed: bool = False
    ) -> Rejected | TokenOutput | None:
        """Admits a request and promises it memory, or refuses it and keeps nothing.

        A resumed request was admitted before: it may have to wait for its promise but is not
        refused one. It is answered at once if nothing is left of it to produce.
        """
        produced = len(request.token_ids) - request.num_prompt_tokens
        refusal = self._refusal(request, resumed or produced > 0)
        if refusal:
            return refusal
        if produced >= request.max_tokens or len(request.token_ids) >= self._limit:
            return TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
        self._admit(request)
        return None

    def cancel(self, request_id: str) -> None:
        """Forgets a request and frees its memory; one that is gone already is no error."""
        sequence = self._by_id.get(request_id)
        if sequence:
            self._remove(sequence)

    def fail_newest(self) -> str | None:
        """Gives up on the least important running sequence; its request id."""
        victim = self._newest_running()
        if victim:
            self._remove(victim)
        return victim.request_id if victim else None

    def preempt_newest(self) -> bool:
        """Frees the memory of the least important running sequence; it waits to be recomputed."""
        victim = self._newest_running()
        if victim:
            self._preempt(victim)
        return victim is not None

    def set_batch_share(self, share: float) -> None:
        """Lets at most this share of `max_sequences`, and at least one, run; the running go on."""
        self._max_running = max(1, int(self._limits.max_sequences * share))

    # a step --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running sequences first, then those that wait, as memory allows."""
        self._promises.restore(self._by_rank)
        self._start_waiting()
        return self._plan(self._limits.prompt_tokens, self._limits.is_chunked)

    def replan(self, prompt_tokens: int) -> StepPlan:
        """Plans the same step anew with smaller prompt chunks; no waiting sequence starts."""
        return self._plan(prompt_tokens, is_chunked=True)

    def commit(self, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Takes over the result of the planned step.

        A token that ends its sequence is part of the output, stop tokens included.
        """
        for sequence, count in self._planned:
            sequence.num_computed += count
            sequence.last_step = self._num_steps
        self._planned = []
        self._num_steps += 1
        return [self._append(token) for token in sampled if token.request_id in self._by_id]

    # admission -----------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """Longest sequence this pool and model hold, tokens."""
        pool_tokens = self._pool.num_blocks * self._pool.block_tokens
        return min(self._limits.max_model_len, pool_tokens)

    def _refusal(self, request: EngineRequest, resumed: bool) -> Rejected | None:
        if request.request_id in self._by_id:
            return refuse_double(request, self._profile)
        if resumed and request.token_ids:
            return None
        profile, longest = self._profile, self._limits.max_model_len
        forever = refuse_forever(request, profile, longest, self._expected.tokens)
        return forever or refuse_now(request, profile, longest, self._room())

    def _room(self) -> Room:
        places = self._limits.max_sequences * _WAITING_PER_RUNNING - self.num_waiting
        return Room(self.available_bytes, places, self._expected.tokens, self._coming_releases())

    def _coming_releases(self) -> Iterator[tuple[float, int]]:
        for each in self._by_rank:
            if each.promised:
                prompt = 0 if each.is_decoding else each.num_remaining
                after = self._pace.seconds_until(prompt, each.expected_remaining)
                yield after, each.promised * block_bytes(self._profile)

    def _admit(self, request: EngineRequest) -> None:
        sequence = Sequence(
            request=request,
            arrival=self._num_submitted,
            limit=self._limit,
            expected_output=self._expected.tokens,
            token_ids=list(request.token_ids),
        )
        self._num_submitted += 1
        self._by_id[request.request_id] = sequence
        bisect.insort(self._by_rank, sequence, key=lambda each: each.rank)
        self._charge(sequence)
        self._promises.restore(self._by_rank)

    def _charge(self, sequence: Sequence) -> None:
        length = expected_length(sequence.request, sequence.expected_output, sequence.limit)
        self._promises.owe(sequence, num_blocks(self._profile, length))

    # planning ------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        room = self._max_running - self.num_running
        for sequence in self._by_rank:
            if room <= 0:
                return
            if not sequence.is_running and self._promises.is_kept(sequence):
                sequence.is_running = True
                room -= 1

    def _plan(self, prompt_tokens: int, is_chunked: bool) -> StepPlan:
        decoding = self._pick_decodes()
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        self._planned = []
        # Oldest first: whoever is preempted for another's block is newer, so not yet planned.
        for sequence in [each for each in self._by_rank if each.is_running]:
            if sequence.is_decoding:
                count = 1 if sequence.request_id in decoding else 0
            else:
                count = _prompt_share(sequence.num_remaining, prompt_tokens, is_chunked)
            if not sequence.is_running or count == 0 or not self._make_room(sequence, count):
                continue
            self._planned.append((sequence, count))
            (decodes if sequence.is_decoding else prompts).append(self._chunk(sequence, count))
            prompt_tokens -= 0 if sequence.is_decoding else count
        return StepPlan(chunks=decodes + prompts)

    def _pick_decodes(self) -> set[str]:
        """Decodes of this step, those that waited longest first, within the context they read."""
        ready = [each for each in self._by_rank if each.is_running and each.is_decoding]
        ready.sort(key=lambda each: each.last_step)
        picked: set[str] = set()
        room = self._limits.decode_tokens
        for sequence in ready:
            room -= len(sequence.token_ids)
            if room < 0 and picked:
                break
            picked.add(sequence.request_id)
        return picked

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + count
        needed = num_blocks(self._profile, end)
        return Chunk(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[start:end],
            start=start,
            block_ids=sequence.block_ids[:needed],
            sampling=sequence.request.sampling if end == len(sequence.token_ids) else None,
            history=sequence.token_ids,
            num_prompt_tokens=sequence.request.num_prompt_tokens,
        )

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Allocates blocks for the next `count` tokens; False: the sequence itself had to go."""
        needed = num_blocks(self._profile, sequence.num_computed + count)
        while not self._promises.grow(sequence, needed, self._by_rank):
            victim = self._newest_running()
            assert victim is not None, "a running sequence found none to preempt"
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _newest_running(self) -> Sequence | None:
        return next((each for each in reversed(self._by_rank) if each.is_running), None)

    def _preempt(self, sequence: Sequence) -> None:
        self._promises.release(sequence)
        sequence.is_running = False
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        # It outlived its estimate: charge it anew for what it has and as much again as is usual.
        sequence.expected_output = sequence.num_output + self._expected.tokens
        self._charge(sequence)

    # results -------------------------------------------------------------------------------------

    def _append(self, sampled: SampledToken) -> TokenOutput:
        sequence = self._by_id[sampled.request_id]
        sequence.token_ids.append(sampled.token_id)
        finish = _finish(sequence, sampled.token_id)
        if finish:
            self._observe_output(sequence, finish)
            self._remove(sequence)
        return TokenOutput(
            request_id=sampled.request_id,
            token_ids=[sampled.token_id],
            finish=finish,
            logprobs=_logprobs(sequence, sampled),
            num_preemptions=sequence.num_preemptions,
        )

    def _observe_output(self, sequence: Sequence, finish: str) -> None:
        # Output cut below the estimate by its own limit does not tell how long outputs are.
        if finish == "stop" or sequence.num_output >= self._expected.tokens:
            self._expected.observe(sequence.num_output)

    def _remove(self, sequence: Sequence) -> None:
        self._promises.release(sequence)
        del self._by_id[sequence.request_id]
        self._by_rank.remove(sequence)
        self._planned = [entry for entry in self._planned if entry[0] is not sequence]


def _prompt_share(remaining: int, budget: int, is_chunked: bool) -> int:
    if is_chunked:
        return min(remaining, max(0, budget))
    return remaining if remaining <= budget else 0


def _finish(sequence: Sequence, token_id: int) -> Literal["", "stop", "length"]:
    if token_id in sequence.request.stop_token_ids:
        return "stop"
    is_full = len(sequence.token_ids) >= sequence.limit
    return "length" if is_full or sequence.num_output >= sequence.request.max_tokens else ""


def _logprobs(sequence: Sequence, sampled: SampledToken) -> list[TokenLogprobs] | None:
    if sequence.request.sampling.top_logprobs is None:
        return None
    return [TokenLogprobs(sampled.logprob, sampled.top_ids, sampled.top_logprobs)]
