"""The scheduler: decides which tokens to compute next, and which sequences to preempt.

The scheduler deals only with counts of blocks and tokens. It does not depend on a device or a
model.
"""

import time
from collections.abc import Callable
from typing import Literal

from ullage_common.request_cost import MemoryProfile
from ullage_engine.kv_cache.prefix_cache import KvPolicy
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import (
    EngineRequest,
    PromptLogprobs,
    TokenLogprobs,
    TokenOutput,
)
from ullage_engine.protocol.step_plan import Chunk, SampledToken, StepPlan
from ullage_engine.protocol.worker_state import ReleaseState, SchedulerStats
from ullage_engine.scheduler.admission import AdmissionControl
from ullage_engine.scheduler.batch_plan import Planned, SchedulerLimits, Transfers
from ullage_engine.scheduler.common_prefix import common_prefix
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.lifecycle import Lifecycle
from ullage_engine.scheduler.planner import BatchPlanner
from ullage_engine.scheduler.sequence import Sequence
from ullage_engine.scheduler.speculation import Speculation
from ullage_engine.scheduler.state import NewSpeculation, SchedulerState
from ullage_engine.scheduler.stats import SchedulerStatistics

__all__ = ["KvPolicy", "Scheduler", "SchedulerLimits"]

_DEFAULT_POLICY = KvPolicy()

_Finish = Literal["", "stop", "length"]


class Scheduler:
    """Continuous batching of sequences whose KV is stored in the blocks of a prefix cache.

    Call `submit`, `submit_group`, `fork` and `cancel` at any time between steps. For each step,
    call `schedule`, perform the plan's moves, compute the plan, and call `commit`. No request is
    lost: an admitted request only ends with a token that has a finish reason, or by `cancel`,
    `discard` or `fail_newest`.

    Up to `SchedulerLimits.max_in_flight` plans may be scheduled before the first is committed.
    Plans in flight never share a sequence, and their moves and steps must be performed in order. A
    later plan may therefore reuse the blocks of a cancelled sequence immediately.
    """

    def __init__(
        self,
        profile: MemoryProfile,
        limits: SchedulerLimits,
        throughput: ThroughputEstimator,
        output_lengths: OutputLengthEstimator,
        policy: KvPolicy = _DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
        new_speculation: NewSpeculation = Speculation,
    ) -> None:
        state = SchedulerState.create(
            profile, limits, throughput, output_lengths, policy, clock, new_speculation
        )
        self._state = state
        self._profile = profile
        self._limits = limits
        self._output_lengths = output_lengths
        self._cache = state.cache
        self._block_tokens = state.cache.block_tokens
        self._reservations = state.reservations
        self._sequences = state.sequences
        self._fork_groups = state.fork_groups
        self._swap = state.swap
        self._conv_states = state.conv_states
        self._has_conv_states = limits.replay_tokens > 0
        self._in_flight = state.in_flight
        self._max_running = limits.max_sequences

        self.tiers = state.tiers
        """Transfers of KV to and from tiers outside the device, or None without tiers."""
        self.speculation = state.speculation
        self.events = RequestEvents()
        self._statistics = SchedulerStatistics(profile, state)
        self.figures = self._statistics.figures

        self._admission = AdmissionControl(profile, state)
        self._lifecycle = Lifecycle(state, self._statistics, self.events)
        self._planner = BatchPlanner(state, self._lifecycle)

    # state ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        has_moves = self.tiers is not None and self.tiers.has_moves
        return has_moves or len(self._sequences) > 0

    @property
    def has_decodes(self) -> bool:
        """Return whether the next step decodes any running sequence."""
        return any(sequence.is_decoding for sequence in self._sequences.running)

    @property
    def num_steps(self) -> int:
        """Return the number of committed steps that computed at least one chunk."""
        return self._statistics.num_steps

    def stats(self) -> SchedulerStats:
        """Collect the statistics. See `SchedulerStatistics.collect`."""
        return self._statistics.collect()

    def releases(self) -> list[ReleaseState]:
        """List the expected memory releases, soonest first. See `soonest_releases`."""
        return self._admission.releases()

    def check_integrity(self) -> None:
        """Assert that no block or slot is leaked, and that the pool covers every reservation."""
        self._state.check_integrity()

    # requests in and out -------------------------------------------------------------------------

    def submit(
        self, request: EngineRequest, *, resumed: bool = False
    ) -> Rejected | TokenOutput | None:
        """Admit a request and reserve its memory, or refuse it without changing any state.

        Args:
            request: the request, which may include output that another engine has already
                generated.
            resumed: whether an earlier worker of this engine has already admitted the request. If
                memory is short, a resumed request waits instead of being refused.

        Returns:
            The refusal, the output of a request that has nothing left to produce, or None.
        """
        answer = self.submit_group([request], resumed=resumed)
        if isinstance(answer, Rejected):
            return answer
        return answer[0] if answer else None

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admit samples of one prompt together, or refuse them all.

        The samples share the KV of their common prefix and reserve it once.

        Returns:
            The refusal, which names the first sample, or an output for each sample that has nothing
            left to produce.
        """
        refusal = self._admission.refuse_duplicates(requests)
        if refusal:
            return refusal

        complete = [
            request for request in requests if self._admission.is_complete(request, resumed)
        ]
        remaining = [request for request in requests if request not in complete]
        if remaining:
            refusal = self._admission.submit(remaining, resumed)
        if refusal:
            return refusal
        self._statistics.observe_memory()
        return [
            TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
            for request in complete
        ]

    def fork(self, parent_id: str, child_request: EngineRequest) -> None:
        """Admit a request, and share the KV of the prefix that it has in common with its parent.

        This is how a beam search branches. The child ranks directly behind its parent and is never
        refused. If memory is short, the child waits like a preempted sequence. The parent is not
        affected. If a parent is no longer needed, `cancel` it before the next fork, so that its
        blocks can be reused. If the parent has already finished, the child reuses the KV that is
        still in the prefix cache.
        """
        assert child_request.request_id not in self._sequences, "the child's id is in use"
        parent = self._sequences.get(parent_id)
        if parent is None:
            self._admission.submit([child_request], resumed=True)
            return

        child = self._admission.new_sequence(child_request, parent.rank)
        child.cached_prompt_tokens = parent.cached_prompt_tokens
        child.limit = parent.limit
        self._sequences.add(child)

        computed = parent.token_ids[: parent.num_computed]
        shared = common_prefix(child_request.token_ids[:-1], computed)
        if shared:
            self._lifecycle.fork(parent, child, shared)
        else:
            self._reservations.defer(child)

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Drop a request and free its memory. Unknown ids are ignored.

        Set `is_answered` if the request is dropped because a stop string ended its answer. The
        length of the answer is then included in the output length estimate.
        """
        if sequence := self._sequences.get(request_id):
            if is_answered:
                self._observe_output(sequence, "stop")
            self._lifecycle.remove(sequence)

    def discard(self, request_id: str) -> None:
        """Drop a request whose KV may be corrupt, and evict its blocks from the prefix cache.

        All cached texts that begin with the same block are evicted too. Other sequences keep the
        blocks that they hold, but new requests can no longer find these blocks in the cache.
        Unknown ids are ignored. If the request is in the oldest plan in flight but has been
        cancelled since, only its cached blocks are evicted. A new request with the same id is not
        affected.
        """
        cancelled = self._in_flight[0].cancelled if self._in_flight else []
        for each in cancelled:
            if each.request_id == request_id:
                self._evict_branch(each, [])
                return

        if sequence := self._sequences.get(request_id):
            path = sequence.blocks.ids[: sequence.num_cached_blocks]
            self._lifecycle.remove(sequence)
            self._evict_branch(sequence, path)

    def fail_newest(self) -> str | None:
        """Drop the least important running sequence, and return its request id.

        Call `fail_newest`, `preempt_newest` and `replan` only while exactly one plan is in flight.
        """
        if victim := self._sequences.newest_running:
            self._lifecycle.remove(victim)
        return victim.request_id if victim else None

    def preempt_newest(self) -> bool:
        """Preempt the least important running sequence. Return False if there is none."""
        if victim := self._sequences.newest_running:
            self._lifecycle.preempt(victim)
        return victim is not None

    # limits from outside -------------------------------------------------------------------------

    def set_batch_share(self, share: float) -> None:
        """Limit the batch to a fraction (0 to 1) of `max_sequences`, but to at least one sequence.

        If more sequences are already running, they continue, but no new sequence starts until the
        batch is below the limit.
        """
        self._max_running = max(1, int(self._limits.max_sequences * min(1.0, share)))

    def withhold(self, num_bytes: int) -> None:
        """Set how many KV bytes are withheld from new requests, even if they are available.

        Workers call this if other processes have taken memory. Each call replaces the number from
        the previous call. Admitted requests keep their KV.
        """
        self._reservations.num_withheld = -(-num_bytes // self._profile.block_bytes)

    def end_idle_sessions(self) -> None:
        """Unpin the cached KV of sessions that have been idle for longer than configured."""
        self._cache.sessions.end_idle()

    def evict_all(self) -> None:
        """Evict all KV that no sequence is using, including KV in tiers outside the device."""
        if self.tiers:
            self.tiers.discard(None, [])
        self._cache.evict_all()

    # a step --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: running sequences first, then waiting sequences as memory allows.

        A plan with chunks is in flight from this call until `commit`.
        """
        self._cache.sessions.end_idle()
        self._start_waiting()
        if self.tiers:
            self.tiers.place(self._state.sequences_in_flight())

        chunks = self._planner.plan(self._limits.prompt_tokens, self._limits.is_chunked)
        if not chunks:
            # All that ran were preempted, for more important ones that had no slot in the batch.
            self._start_waiting()
            chunks = self._planner.plan(self._limits.prompt_tokens, self._limits.is_chunked)
        self._statistics.observe_memory()
        return self._with_moves(chunks, Transfers())

    def replan(self, prompt_tokens: int) -> StepPlan:
        """Replan the same step with smaller prompt chunks, without starting waiting sequences.

        The previous plan's moves have already been performed, so the new plan only contains moves
        that were requested since then.
        """
        done = self._in_flight.pop().transfers if self._in_flight else Transfers()
        chunks = self._planner.plan(prompt_tokens, is_chunked=True)
        return self._with_moves(chunks, done)

    def abandon(self) -> None:
        """Drop the latest plan in flight without computing its chunks.

        Its block moves must be performed nevertheless, before those of any later plan. A later plan
        reports them to the server.
        """
        planned = self._in_flight.pop()
        if self.tiers:
            self.tiers.keep(planned.transfers)

    def is_awaited(self, request_id: str) -> bool:
        """Return whether the oldest plan in flight still includes this request.

        If the request has been cancelled since the plan was made, nobody awaits its token.
        """
        return bool(self._in_flight) and request_id in self._in_flight[0].entries

    @property
    def is_scoring(self) -> bool:
        """Return whether the oldest plan in flight scores prompt tokens."""
        return bool(self._in_flight) and self._in_flight[0].scores

    def score(self, scored: list[PromptLogprobs]) -> list[PromptLogprobs]:
        """Record the log-probabilities that the oldest plan in flight has computed.

        Call this before `commit`. Return those to report: not of requests that were cancelled, and
        none twice, even if a step was computed again.
        """
        planned = self._in_flight[0].entries if self._in_flight else {}
        new = []
        for each in scored:
            entry = planned.get(each.request_id)
            if entry is not None and each.start == entry[0].num_scored:
                entry[0].num_scored += each.num_tokens
                new.append(each)
        return new

    def commit(self, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Append the sampled tokens to the sequences of the oldest plan in flight.

        A token that ends its sequence is included in the output, even if it is a stop token. Tokens
        of sequences that were cancelled in the meantime are discarded.
        """
        oldest = self._in_flight.popleft() if self._in_flight else Planned({}, [])
        planned = oldest.entries
        if self.tiers:
            self.tiers.finish(oldest.transfers)

        before: dict[str, list[SampledToken]] = {}
        if self.speculation:
            sampled, before = self.speculation.verify(planned, sampled)

        # All blocks are cached before any sequence forks, so that children share the cached ones.
        for sequence, chunk in planned.values():
            self._advance(sequence, chunk)
        if self._fork_groups:
            self._fork_children(planned)

        # A step that computes nothing is no progress. If it counted, a hang would go unnoticed.
        self._statistics.num_steps += bool(planned)

        # Looked up in the plan and not in the table: a new request may have a cancelled one's id.
        return [
            self._append(entry[0], token, before.get(token.request_id) if before else None)
            for token in sampled
            if (entry := planned.get(token.request_id))
        ]

    def _start_waiting(self) -> None:
        """Start waiting sequences, most important first, until the batch is full."""
        # Revoked reservations first, by importance. Only memory that remains may start others.
        self._reservations.grant_deferred(self._sequences)
        num_slots = self._max_running - self._sequences.num_running
        if not self._sequences.num_waiting:
            return

        for sequence in self._sequences:
            if num_slots <= 0:
                return
            if not sequence.is_running and self._admission.can_start(sequence):
                self._lifecycle.start(sequence)
                num_slots -= 1

    def _with_moves(self, chunks: list[Chunk], done: Transfers) -> StepPlan:
        """Build a plan from these chunks and all pending moves.

        `done` contains the transfers of the plan that this one replaces. They have already been
        performed, so they are reported to the server once the new plan has been computed. If the
        new plan has no chunks, a later plan reports them.
        """
        # Drained last: planning chunks preempts and copies, and those moves belong to this plan.
        moves = self._swap.drain(chunks)
        if self.tiers:
            copies, transfers = self.tiers.drain(chunks)
            moves += copies
            self.tiers.keep(done.and_those_of(transfers))
            if chunks:
                kept = self.tiers.take_kept()
                self._in_flight[-1] = self._in_flight[-1]._replace(transfers=kept)
        return StepPlan(chunks=chunks, moves=moves)

    # results -------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, chunk: Chunk) -> None:
        """Mark a chunk's tokens as computed, and add any blocks that are now full to the cache."""
        num_computed = chunk.start + len(chunk.token_ids)
        assert chunk.targets is None or sequence.num_scored >= chunk.scored_range().stop, (
            f"{sequence.request_id} was computed without its log-probabilities"
        )
        if sequence.is_decoding and chunk.sampling:
            sequence.num_computed = num_computed
        elif num_computed > sequence.num_computed:
            sequence.set_computed(num_computed)

        if self._has_conv_states:
            self._conv_states.commit(sequence, chunk)
        sequence.last_step = self._statistics.num_steps

        num_uncached = num_computed - sequence.num_cached_blocks * self._block_tokens
        if num_uncached >= self._block_tokens:
            self._cache_full_blocks(sequence)

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        first = sequence.num_cached_blocks
        full = sequence.num_computed // self._cache.block_tokens
        if self._cache.has_cache and full > first:
            num_merged = self._reservations.cache_blocks(sequence, first, full)
            self._statistics.prefix_merged_tokens += num_merged * self._cache.block_tokens
            if self.tiers:
                self.tiers.offer(sequence, first, full)

    def _fork_children(self, planned: dict[str, tuple[Sequence, Chunk]]) -> None:
        for sequence, _ in planned.values():
            for child in self._fork_groups.take_ready(sequence):
                child.cached_prompt_tokens = sequence.cached_prompt_tokens
                self._lifecycle.fork(sequence, child, child.fork.num_shared_tokens)

    def _append(
        self, sequence: Sequence, sampled: SampledToken, before: list[SampledToken] | None
    ) -> TokenOutput:
        """Append a sampled token to a sequence, and return the output for the client.

        The output begins with the draft tokens in `before`, which the sequence already contains.
        """
        request = sequence.request
        tokens = sequence.token_ids
        token = sampled.token_id
        tokens.append(token)
        sequence.is_decoding = True

        finish: _Finish = ""
        if token in request.stop_token_ids or len(tokens) >= sequence.max_length:
            finish = "stop" if token in request.stop_token_ids else "length"
            self._observe_output(sequence, finish)
            self._lifecycle.remove(sequence)

        return TokenOutput(
            sampled.request_id,
            [each.token_id for each in [*before, sampled]] if before else [token],
            finish,
            None if request.sampling.top_logprobs is None else _logprobs_of(sampled, before),
            sequence.num_preemptions,
            sequence.cached_prompt_tokens or 0,
        )

    def _observe_output(self, sequence: Sequence, finish: _Finish) -> None:
        # An output cut by its own limit below the estimate does not show how long outputs are.
        if finish == "stop" or sequence.num_output >= self._output_lengths.estimate:
            self._output_lengths.observe(sequence.num_output)

    def _evict_branch(self, sequence: Sequence, path: list[int]) -> None:
        # KV that it loaded and did not commit may be cached for others already.
        path = path or self._cache.match(sequence.token_ids, sequence.request.cache_salt)
        if self.tiers:
            self.tiers.discard(sequence, path)
        self._cache.evict_branch(path)


def _logprobs_of(sampled: SampledToken, before: list[SampledToken] | None) -> list[TokenLogprobs]:
    """List the log-probabilities of the accepted draft tokens, then that of the sampled token."""
    return [
        TokenLogprobs(each.logprob, each.top_ids, each.top_logprobs)
        for each in [*(before or []), sampled]
    ]
