"""The scheduler: which tokens of which sequences are computed next, and which are preempted.

It counts blocks and tokens and knows neither device nor model.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import compress

from ullage_common.request_cost import MemoryProfile
from ullage_engine.kv_cache.prefix_cache import KvPolicy
from ullage_engine.protocol.messages import (
    EngineRequest,
    Rejected,
    ReleaseState,
    SchedulerStats,
    TokenOutput,
)
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.step_plan import Chunk, SampledToken, StepPlan
from ullage_engine.scheduler.admission import AdmissionControl
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.sequence import (
    Finish,
    Planned,
    PromptBudget,
    SchedulerLimits,
    Sequence,
    Transfers,
    common_prefix,
    logprobs_of,
    make_chunk,
    make_decode,
    postponed_decodes,
)
from ullage_engine.scheduler.speculation import Speculation
from ullage_engine.scheduler.state import SchedulerState, SchedulerStatistics
from ullage_engine.scheduler.tiers import TierTransfers

__all__ = ["KvPolicy", "Scheduler", "SchedulerLimits"]

_DEFAULT_POLICY = KvPolicy()


class Scheduler:
    """Continuous batching over the blocks of a prefix cache.

    Use: `submit`, `submit_group`, `fork` and `cancel` at any time between steps; then for each step
    `schedule`, do the plan's moves, compute it, `commit`. Nothing is dropped: an admitted request
    ends by a token with a finish, by `cancel` or by `fail_newest`.

    Up to `SchedulerLimits.max_in_flight` plans may be scheduled before the first is committed. They
    have no sequence in common, and whoever computes them does their moves and steps in their order:
    so blocks that a cancelled sequence leaves behind may be given to a later plan at once.
    """

    def __init__(
        self,
        profile: MemoryProfile,
        limits: SchedulerLimits,
        throughput: ThroughputEstimator,
        output_lengths: OutputLengthEstimator,
        policy: KvPolicy = _DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        state = SchedulerState.create(profile, limits, throughput, output_lengths, policy, clock)
        self._state = state
        self._profile = profile
        self._limits = limits
        self._output_lengths = output_lengths
        self._cache = state.cache
        self._block_tokens = state.cache.block_tokens
        self._is_plain = not (limits.replay_tokens or state.cache.is_windowed)
        """Whether a sequence holds nothing but the blocks of one table."""
        self._reservations = state.reservations
        self._sequences = state.sequences
        self._fork_groups = state.fork_groups
        self._swap = state.swap
        self._conv_states = state.conv_states
        self.tiers: TierTransfers | None = None
        """KV outside the device; None: there is none."""
        if policy.kv_space:
            self.tiers = TierTransfers(state.cache, state.reservations, policy, throughput, clock)
        has_drafts = limits.num_speculative_tokens > 0 and limits.max_in_flight == 1
        has_drafts = has_drafts and self._is_plain
        self.speculation = Speculation(limits, state.cache) if has_drafts else None
        self._admission = AdmissionControl(profile, state)
        self._in_flight: deque[Planned] = deque()
        """Plans that are not committed, the oldest first."""
        self._max_running = limits.max_sequences
        self._max_read_bytes = limits.decode_tokens * profile.decode_read_bytes(1)
        self._statistics = SchedulerStatistics(profile, state)
        self.figures = self._statistics.figures
        self.events = RequestEvents()

    # what it holds -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        has_moves = self.tiers is not None and self.tiers.has_moves
        return has_moves or len(self._sequences) > 0

    @property
    def has_decodes(self) -> bool:
        """Whether the next step gives a running sequence its next token."""
        return any(sequence.is_decoding for sequence in self._sequences.running)

    @property
    def num_steps(self) -> int:
        """Steps with work that were committed."""
        return self._statistics.num_steps

    def stats(self) -> SchedulerStats:
        """Collect the statistics; see `SchedulerStatistics.collect`."""
        return self._statistics.collect(self.speculation)

    def releases(self) -> list[ReleaseState]:
        """List predicted releases of memory, soonest first; the last sums up all the rest."""
        return self._admission.releases()

    def check_integrity(self) -> None:
        """Asserts that no block or slot is lost and nothing is reserved that does not exist."""
        self._state.check_integrity()

    # requests in and out -------------------------------------------------------------------------

    def submit(
        self, request: EngineRequest, *, resumed: bool = False
    ) -> Rejected | TokenOutput | None:
        """Admits a request and reserves its memory, or refuses it and keeps nothing.

        A resumed request was admitted by a former worker of this engine: it may have to wait for
        memory but is not refused any. Output from another engine gives no such right. A request is
        answered at once if nothing is left of it to produce.
        """
        answer = self.submit_group([request], resumed=resumed)
        if isinstance(answer, Rejected):
            return answer
        return answer[0] if answer else None

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admits samples of one prompt together, or refuses all of them and names the first.

        They share the KV of their common prefix and reserve it once. The result has an output for
        each sample of which nothing is left to produce.
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
        return [
            TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
            for request in complete
        ]

    def fork(self, parent_id: str, child_request: EngineRequest) -> None:
        """Admits a request that shares the KV its tokens have in common with those of a parent.

        For searches that branch. The child ranks right behind its parent and is never refused: if
        memory is short it waits like a preempted sequence. The parent goes on unchanged; `cancel`
        it when it is not needed, and before others fork, so that its blocks are free for them. From
        a parent that has ended the child gets what the prefix cache still stores.
        """
        assert child_request.request_id not in self._sequences, "the child's id is in use"
        parent = self._sequences.get(parent_id)
        if parent is None:
            self._admission.submit([child_request], resumed=True)
            return
        child = self._admission.new_sequence(child_request, parent.priority, parent.arrival)
        child.cached_prompt_tokens = parent.cached_prompt_tokens
        child.limit = parent.limit
        self._sequences.add(child)
        computed = parent.token_ids[: parent.num_computed]
        shared = common_prefix(child_request.token_ids[:-1], computed)
        if shared:
            self._fork(parent, child, shared)
        else:
            self._reservations.defer(child)

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Drop a request and free its memory; an unknown id is no error.

        `is_answered`: a stop string ended the answer, whose length is observed like any other.
        """
        if sequence := self._sequences.get(request_id):
            if is_answered:
                self._observe_output(sequence, "stop")
            self._remove(sequence)

    def discard(self, request_id: str) -> None:
        """Drop a request whose KV may be damaged, and what is cached of it and of all that begin
        with the same block: what other sequences hold is kept for them alone. An unknown id is no
        error. Of a request that was cancelled while the oldest plan in flight computes it, what is
        cached goes, and one that has its id now stays."""
        cancelled = self._in_flight[0].cancelled if self._in_flight else []
        for each in cancelled:
            if each.request_id == request_id:
                self._evict_branch(each, [])
                return
        if sequence := self._sequences.get(request_id):
            path = sequence.block_ids[: sequence.num_cached_blocks]
            self._remove(sequence)
            self._evict_branch(sequence, path)

    def _evict_branch(self, sequence: Sequence, path: list[int]) -> None:
        # What it has loaded and not committed may be cached for others already.
        path = path or self._cache.match(sequence.token_ids, sequence.request.cache_salt)
        if self.tiers:
            self.tiers.discard(sequence, path)
        self._cache.evict_branch(path)

    def fail_newest(self) -> str | None:
        """Drop the least important running sequence; return its request id.

        This, `preempt_newest` and `replan` are for the only plan in flight.
        """
        if victim := self._sequences.newest_running:
            self._remove(victim)
        return victim.request_id if victim else None

    def preempt_newest(self) -> bool:
        """Preempts the least important running sequence; False where none runs."""
        if victim := self._sequences.newest_running:
            self._preempt(victim)
        return victim is not None

    def set_batch_share(self, share: float) -> None:
        """Limits the batch to a share of `max_sequences`, 0 to 1, and to at least one sequence.

        Sequences that run already go on; none starts until fewer run.
        """
        self._max_running = max(1, int(self._limits.max_sequences * min(1.0, share)))

    def withhold(self, num_bytes: int) -> None:
        """Withholds so much available KV from new requests; those admitted keep what they have."""
        self._reservations.num_withheld = -(-num_bytes // self._profile.block_bytes)

    def end_idle_sessions(self) -> None:
        """End sessions that were not used for their idle time."""
        self._cache.sessions.end_idle()

    def evict_all(self) -> None:
        """Evict all KV that no sequence holds, from tiers outside the device, too."""
        if self.tiers:
            self.tiers.discard(None, [])
        self._cache.evict_all()

    # a step --------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running sequences first, then waiting ones as memory allows.

        A plan with chunks is in flight from now on, until `commit`.
        """
        self._cache.sessions.end_idle()
        self._start_waiting()
        if self.tiers:
            self.tiers.place(self._sequences_in_flight())
        chunks = self._plan_chunks(self._limits.prompt_tokens, self._limits.is_chunked)
        if not chunks:
            # All that ran were preempted, for more important ones that had no slot in the batch.
            self._start_waiting()
            chunks = self._plan_chunks(self._limits.prompt_tokens, self._limits.is_chunked)
        return self._with_moves(chunks, Transfers())

    def replan(self, prompt_tokens: int) -> StepPlan:
        """Plans the same step again with smaller prompt chunks; no waiting sequence starts.

        The moves of the previous plan are done; the new plan has only those requested since.
        """
        done = self._in_flight.pop().transfers if self._in_flight else Transfers()
        return self._with_moves(self._plan_chunks(prompt_tokens, is_chunked=True), done)

    def abandon(self) -> None:
        """Take back the only plan in flight: its moves are done, but it was not computed."""
        planned = self._in_flight.pop()
        if self.tiers:
            self.tiers.keep(planned.transfers)

    def _with_moves(self, chunks: list[Chunk], done: Transfers) -> StepPlan:
        """Make the plan of these chunks, which reports what is `done` with its own copies."""
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

    def is_awaited(self, request_id: str) -> bool:
        """Whether the oldest plan in flight computes the request, which was not cancelled since."""
        return bool(self._in_flight) and request_id in self._in_flight[0].entries

    def commit(self, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Advances the sequences of the oldest plan in flight by its sampled tokens.

        A token that ends its sequence is part of the output, stop tokens included. Tokens of
        sequences that were cancelled meanwhile are dropped.
        """
        oldest = self._in_flight.popleft() if self._in_flight else Planned({}, [])
        planned = oldest.entries
        if self.tiers:
            self.tiers.finish(oldest.transfers)
        before: dict[str, list[SampledToken]] = {}
        if self.speculation:
            sampled, before = self.speculation.verify(planned, sampled)
        # All blocks are cached before anybody forks: children then share the cached ones.
        for sequence, chunk in planned.values():
            self._advance(sequence, chunk)
        for sequence, _ in planned.values() if self._fork_groups else ():
            for child in self._fork_groups.take_ready(sequence):
                child.cached_prompt_tokens = sequence.cached_prompt_tokens
                self._fork(sequence, child, child.num_shared_tokens)
        # A step that computes nothing is no progress, or a hang would not be seen.
        self._statistics.num_steps += bool(planned)
        # Of the plan and not by id alone: a new request may have a cancelled one's id.
        return [
            self._append(entry[0], token, before.get(token.request_id) if before else None)
            for token in sampled
            if (entry := planned.get(token.request_id))
        ]

    def _advance(self, sequence: Sequence, chunk: Chunk) -> None:
        """Count a chunk's tokens as computed, and cache the blocks that they fill."""
        num_computed = chunk.start + len(chunk.token_ids)
        if sequence.is_decoding and chunk.sampling:
            sequence.num_computed = num_computed
        elif num_computed > sequence.num_computed:
            sequence.set_computed(num_computed)
        if self._conv_states.replay_tokens:
            self._conv_states.commit(sequence, chunk)
        sequence.last_step = self._statistics.num_steps
        num_uncached = num_computed - sequence.num_cached_blocks * self._block_tokens
        if num_uncached >= self._block_tokens:
            self._cache_full_blocks(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory; it waits until it can have all it needs at once."""
        # Before the blocks are freed: what to copy to the host is read from them.
        if not (self.tiers and self.tiers.forget(sequence)):
            self._swap.swap_out(sequence)
        self._conv_states.release_next(sequence)
        self._sequences.stop(sequence)
        sequence.num_preemptions += 1
        self._statistics.num_preemptions += 1
        self.events.on_preempted(sequence.request, sequence.num_preemptions, bool(sequence.swapped))
        # It outlived its estimate: reserve for what it has and as much again as is usual.
        sequence.expected_output = sequence.num_output + self._output_lengths.estimate
        self._reservations.defer(sequence)
        # Children cannot start before their parent does, so what is reserved for them
        # might be what it needs to start.
        for child in self._fork_groups.children(sequence):
            self._reservations.defer(child)

    def _start_waiting(self) -> None:
        """Start waiting sequences, the most important first, as far as the batch has slots."""
        # First what was revoked, by importance; only what remains may start anybody else.
        self._reservations.grant_deferred(self._sequences)
        num_slots = self._max_running - self._sequences.num_running
        if not self._sequences.num_waiting:
            return
        for sequence in self._sequences:
            if num_slots <= 0:
                return
            if not sequence.is_running and self._admission.can_start(sequence):
                self._start(sequence)
                num_slots -= 1

    def _plan_chunks(self, prompt_tokens: int, is_chunked: bool) -> list[Chunk]:
        running = self._sequences.running
        max_decodes = self._limits.max_decodes
        if self._limits.max_in_flight > 1:
            # All those that decode are shared out to the plans in flight.
            num_decoding = sum(each.is_decoding for each in running)
            max_decodes = min(max_decodes, -(-num_decoding // self._limits.max_in_flight))
            in_flight = self._sequences_in_flight()
            running = [each for each in running if each not in in_flight]
        running = self._present(running)
        decodable = [each.is_decoding for each in running]
        if self._conv_states.replay_tokens:
            decodable = [self._can_decode(each) for each in running]
        ready = list(compress(running, decodable))
        postponed = postponed_decodes(
            ready, max_decodes, self._max_read_bytes, self._profile.decode_read_bytes
        )
        drafts: dict[Sequence, list[int]] = {}
        if self.speculation and not postponed:
            drafts = self.speculation.draft(ready, self._sequences.num_running)
        budget = PromptBudget(prompt_tokens, is_chunked, self._limits.prompt_cost)
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        planned: dict[str, tuple[Sequence, Chunk]] = {}
        # Oldest first: whoever is preempted for another's block is newer, so not yet planned.
        for sequence, is_decode in zip(running, decodable, strict=True):
            # An older sequence of this loop may have preempted this one.
            if not sequence.is_running or sequence.request_id in postponed:
                continue
            if drafts and sequence in drafts:
                chunk = self._chunk(sequence, sequence.num_computed, 1, drafts[sequence])
            elif is_decode:
                chunk = self._decode(sequence)
            else:
                start = self._conv_states.next_position(sequence)
                count = budget.share(start, self._end(sequence) - start)
                chunk = self._chunk(sequence, start, count)
            if chunk is None:
                continue
            planned[sequence.request_id] = (sequence, chunk)
            if is_decode:
                decodes.append(chunk)
            else:
                prompts.append(chunk)
                budget.take(start, count)
        if planned:
            self._in_flight.append(Planned(planned, []))
        return decodes + prompts

    def _present(self, running: list[Sequence]) -> list[Sequence]:
        """Leave out sequences whose KV is still to come from outside the device."""
        if self.tiers:
            running = [each for each in running if not self.tiers.is_waiting(each)]
        # KV is copied in beside this step, unless there is nothing else to compute.
        present = running
        if self._swap.has_arriving:
            present = [each for each in present if not self._swap.is_arriving(each)]
        if self.tiers:
            present = [each for each in present if not self.tiers.is_arriving(each)]
        return present or running

    def _chunk(
        self, sequence: Sequence, start: int, count: int, draft: list[int] | None = None
    ) -> Chunk | None:
        """Make the chunk of `count` tokens; None where there are none, or no blocks for them."""
        end = start + count + len(draft or ())
        if not count or (end > sequence.num_writable and not self._allocate(sequence, start, end)):
            return None
        slots = self._conv_states.assign_slots(sequence)
        return make_chunk(sequence, start, count, slots, draft)

    def _decode(self, sequence: Sequence) -> Chunk | None:
        """Make the chunk of a decode; None where there is no block for it."""
        start = sequence.num_computed
        if start < sequence.num_writable and self._is_plain:
            return make_decode(sequence)
        return self._chunk(sequence, start, 1)

    def _sequences_in_flight(self) -> set[Sequence]:
        """Collect the sequences of plans that are not committed."""
        return {sequence for planned in self._in_flight for sequence, _ in planned.entries.values()}

    def _can_decode(self, sequence: Sequence) -> bool:
        """Whether one token gives the next; tokens to replay before it count as prompt tokens."""
        start = self._conv_states.next_position(sequence)
        return sequence.is_decoding and start == sequence.num_computed

    def _end(self, sequence: Sequence) -> int:
        """Position that this step may compute the sequence up to.

        A parent with a convolution state stops where its children begin, which is the only
        position from which they can continue with it; so does one whose later KV is being loaded.
        """
        end = self.tiers.end(sequence) if self.tiers else len(sequence.token_ids)
        children = self._fork_groups.children(sequence) if self._conv_states.replay_tokens else []
        if children and sequence.num_computed < children[0].num_shared_tokens:
            return min(end, children[0].num_shared_tokens)
        return end

    def _start(self, sequence: Sequence) -> None:
        # Cached blocks first: what the cache has need not be copied in from the host.
        self._reservations.add_cached(sequence)
        if sequence.cached_prompt_tokens is None:
            num_hits = sequence.num_computed
            sequence.cached_prompt_tokens = min(num_hits, sequence.request.num_prompt_tokens)
            self.figures.observe_start(sequence.request.accepted_at)
            if self._cache.has_cache:
                self._statistics.prefix_lookup_tokens += len(sequence.token_ids)
                self._statistics.prefix_hit_tokens += num_hits
        self.events.on_started(sequence.request, sequence.num_computed)
        if self.tiers and not sequence.swapped:
            self.tiers.ask(sequence)
        self._swap.swap_in(sequence, self._reservations)
        self._sequences.start(sequence)

    def _allocate(self, sequence: Sequence, start: int, end: int) -> bool:
        """Allocates blocks that tokens from `start` to `end` may be written to, preempting for
        them.

        Returns False where the sequence itself was the least important and was preempted, or where
        the least important one is in flight: it can be preempted when its plan is committed.
        """
        size = self._cache.block_tokens
        first = sequence.num_computed // size
        self._reservations.slide_window(sequence, start)
        windows = sequence.window_block_ids
        num_missing = max(0, -(-end // size) - len(sequence.block_ids))
        num_windows = max(0, -(-end // size) - sequence.num_window_covered)
        num_windows *= self._cache.is_windowed
        while True:
            # Asked again in every round: a preempted sequence may have been the other holder.
            is_shared = self._cache.is_shared_at(sequence.block_ids, first)
            is_window_shared = self._cache.is_shared_at(
                windows, first - sequence.first_window_block
            )
            count = num_missing + num_windows + is_shared + is_window_shared
            blocks = self._reservations.take(sequence, count, self._sequences)
            if blocks is not None:
                break
            victim = self._sequences.newest_running
            assert victim is not None, "a running sequence found none to preempt"
            if victim in self._sequences_in_flight():
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if is_shared:
            sequence.block_ids = self._swap.copy_shared(sequence.block_ids, first, blocks.pop(0))
        if is_window_shared:
            first -= sequence.first_window_block
            sequence.window_block_ids = self._swap.copy_shared(windows, first, blocks.pop(0))
        if blocks:
            sequence.block_ids += blocks[:num_missing]
            sequence.window_block_ids = sequence.window_block_ids + blocks[num_missing:]
        if not self._cache.is_windowed:
            sequence.num_writable = len(sequence.block_ids) * size
        return True

    # results -------------------------------------------------------------------------------------

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        first = sequence.num_cached_blocks
        full = sequence.num_computed // self._cache.block_tokens
        if self._cache.has_cache and full > first:
            num_merged = self._reservations.cache_blocks(sequence, first, full)
            self._statistics.prefix_merged_tokens += num_merged * self._cache.block_tokens
            if self.tiers:
                self.tiers.offer(sequence, first, full)

    def _fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        if self._reservations.fork(parent, child, num_tokens, self._sequences):
            self._conv_states.share(parent, child)

    def _append(
        self, sequence: Sequence, sampled: SampledToken, before: list[SampledToken] | None
    ) -> TokenOutput:
        """Append a token to its sequence; `before` are accepted ones, which it has already."""
        request = sequence.request
        tokens = sequence.token_ids
        token = sampled.token_id
        tokens.append(token)
        sequence.is_decoding = True
        finish: Finish = ""
        if token in request.stop_token_ids or len(tokens) >= sequence.max_length:
            finish = "stop" if token in request.stop_token_ids else "length"
            self._observe_output(sequence, finish)
            self._remove(sequence)
        return TokenOutput(
            sampled.request_id,
            [each.token_id for each in [*before, sampled]] if before else [token],
            finish,
            None if request.sampling.top_logprobs is None else logprobs_of(sampled, before),
            sequence.num_preemptions,
            sequence.cached_prompt_tokens or 0,
        )

    def _observe_output(self, sequence: Sequence, finish: Finish) -> None:
        # Output cut below the estimate by its own limit says nothing of how long outputs are.
        if finish == "stop" or sequence.num_output >= self._output_lengths.estimate:
            self._output_lengths.observe(sequence.num_output)

    def _remove(self, sequence: Sequence) -> None:
        path = sequence.block_ids[: sequence.num_cached_blocks]
        if self.speculation:
            self.speculation.forget(sequence)
        orphans = self._fork_groups.remove(sequence)
        if self.tiers:
            self.tiers.forget(sequence)
        self._swap.free_slots(sequence)
        self._reservations.release(sequence)
        if sequence.request.session_id and path:
            self._cache.keep_session(sequence.request.session_key, path)
        self._conv_states.release(sequence)
        self._sequences.remove(sequence)
        for planned in self._in_flight:
            entry = planned.entries.get(sequence.request_id)
            if entry and entry[0] is sequence:
                del planned.entries[sequence.request_id]
                planned.cancelled.append(sequence)
        # Their reservations counted on sharing with the parent that is gone.
        for child in orphans:
            self._reservations.defer(child)
