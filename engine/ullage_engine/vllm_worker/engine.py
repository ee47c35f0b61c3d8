"""Serves requests with vLLM: admits them by its blocks, feeds it, and takes what it produces.

vLLM schedules and computes. It is given a request only when the blocks of its prompt and expected
output are reserved, and before one outgrows its reservation a less important one is taken back
from vLLM, to go on later as its prompt and the tokens it has. So vLLM never preempts by itself.
"""

import bisect
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import structs

from ullage_common.request_cost import MemoryProfile, most_tokens, sample_blocks
from ullage_engine.protocol.figures import Figures
from ullage_engine.protocol.messages import Rejected, RequestFailed
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import Embedding, EngineRequest, TokenOutput
from ullage_engine.protocol.worker_state import ReleaseState, SchedulerStats
from ullage_engine.scheduler.common_prefix import shared_tokens
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.refusals import (
    refuse_duplicates,
    refuse_never_fits,
    refuse_now,
    soonest_releases,
)
from ullage_engine.vllm_worker.adapters import Adapters
from ullage_engine.vllm_worker.interface import AdapterError, Core, CoreOutput, InvalidRequestError
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.sequence import EngineLimits, Sequence, no_beams, rank_of
from ullage_engine.vllm_worker.tiers import TierTransfers

_MARGIN_TOKENS = 2
"""Tokens before the end of what it is charged for at which a sequence is charged for more."""
_QUEUE_BATCHES = 4
"""Size of the waiting queue in batches; later requests are better queued by the router."""


class OutOfMemoryFault(Exception):
    """An injected fault: what vLLM raises when a step runs out of memory."""


class VllmEngine:
    """Serves requests with one `Core`."""

    def __init__(
        self,
        core: Core,
        profile: MemoryProfile,
        limits: EngineLimits,
        reservations: Reservations,
        clock: Callable[[], float] = time.perf_counter,
        tiers: TierTransfers | None = None,
    ) -> None:
        """`clock` in seconds."""
        self.on_failed_step: Callable[[Exception], object] = lambda _: None
        """Called with the error of a step, after which vLLM is broken."""
        self.tiers = tiers
        self.throughput = ThroughputEstimator()
        self.reservations = reservations
        self.adapters = Adapters(core, limits.adapter_slots)
        self._core = core
        self._profile = profile
        self._limits = limits
        self._clock = clock
        self._output_lengths = OutputLengthEstimator(limits.max_model_len)
        self._by_id: dict[str, Sequence] = {}
        self._deferred: list[Sequence] = []
        """Sequences that wait for blocks or for an adapter's slot, the most important first."""
        self._growing: dict[str, Sequence] = {}
        """Running sequences that are not charged for all that they may become."""
        self._shrinking: dict[str, Sequence] = {}
        """Running sequences that have blocks reserved which only their prompts needed."""
        self._failed: list[RequestFailed] = []
        self._faults: list[int] = []
        self._num_submitted = 0
        self._figures = Figures()
        self.events = RequestEvents()
        self._num_steps = 0
        self._num_preemptions = 0
        self._prefix_lookup_tokens = 0
        self._prefix_hit_tokens = 0

    # what it holds -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._by_id) or (self.tiers is not None and self.tiers.has_moves)

    @property
    def has_decodes(self) -> bool:
        """Whether the next step gives a running sequence its next token."""
        return any(each.has_token for each in self._by_id.values())

    @property
    def num_steps(self) -> int:
        """Steps that were computed."""
        return self._num_steps

    def stats(self) -> SchedulerStats:
        """Collect the statistics."""
        size = self._profile.block_bytes
        reservations = self.reservations
        blocks = self._core.blocks
        num_free = blocks.num_free
        num_reclaimable = reservations.num_reclaimable
        num_taken = reservations.num_committed + self._num_spared
        num_tokens = backlog = num_started = 0
        for each in self._by_id.values():
            num_computed = blocks.num_computed(each.request_id) if each.is_running else 0
            num_started += num_computed > 0
            num_tokens += num_computed
            backlog += 0 if each.has_token else len(each.token_ids) - num_computed
        num_groups = max(1, len(self._profile.groups))
        return SchedulerStats(
            kv_pool_bytes=self._profile.kv_pool_bytes,
            kv_free_bytes=num_free * size,
            kv_reclaimable_bytes=num_reclaimable * size,
            kv_committed_bytes=min(num_taken, num_free + num_reclaimable) * size,
            kv_used_bytes=num_tokens * num_groups * size // max(1, self._profile.block_tokens),
            num_running=num_started,
            num_waiting=len(self._by_id) - num_started,
            num_steps=self._num_steps,
            expected_output_tokens=self._output_lengths.estimate,
            prefill_backlog_tokens=backlog,
            num_preemptions=self._num_preemptions,
            prefix_lookup_tokens=self._prefix_lookup_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_sessions=reservations.num_sessions,
            session_bytes=reservations.num_session_blocks * size,
            num_adapter_loads=self.adapters.num_loads,
            num_adapter_unloads=self.adapters.num_unloads,
            figures=self._figures.copy(),
        )

    def releases(self) -> list[ReleaseState]:
        """List predicted releases of memory, soonest first."""
        return soonest_releases(self._expected_releases())

    # requests in and out -------------------------------------------------------------------------

    def is_compiled(self, request: EngineRequest) -> bool:
        """Whether a request's grammar is compiled; if not, begins to compile it."""
        return self._core.is_compiled(request.grammar)

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admits samples of one prompt together, or refuses all of them and names the first.

        Resumed requests are refused only if they are invalid; they may have to wait for memory.
        """
        pool_bytes = self._profile.kv_pool_bytes
        if refusal := refuse_duplicates(requests, self._by_id, pool_bytes):
            return refusal
        if requests[0].beam is not None:
            self._failed += [no_beams(request) for request in requests]
            return []
        complete = [r for r in requests if r.is_complete(self._longest(r, 1), resumed)]
        remaining = [request for request in requests if request not in complete]
        if remaining and (refusal := self._admit(remaining, resumed)):
            return refusal
        return [
            TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
            for request in complete
        ]

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Drop a request and free its memory; an unknown id is no error.

        `is_answered`: a stop string ended the answer, whose length is observed like any other.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return
        if is_answered:
            self._output_lengths.observe(sequence.num_output)
        if sequence.is_running:
            # Kept before it is dropped: its blocks are still its own.
            self._keep_session(sequence)
            self._core.abort(request_id)
        self._remove(sequence)
        self._start_deferred()

    def set_batch_share(self, share: float) -> None:
        """Limits the batch to a share of `max_sequences`, 0 to 1, and to at least one request."""
        self._core.set_max_running(max(1, int(self._limits.max_sequences * min(1.0, share))))

    def withhold(self, num_bytes: int) -> None:
        """Withholds so much available KV from new requests; those admitted keep what they have."""
        size = self._profile.block_bytes
        self.reservations.num_withheld = -(-num_bytes // size) if size else 0

    def inject_out_of_memory(self, after_steps: int) -> None:
        """Make one step fail when `after_steps` more have been computed."""
        self._faults.append(self._num_steps + after_steps)

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests given up since the last call."""
        failed = self._failed
        self._failed = []
        return failed

    # a step --------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput | Embedding]:
        """Compute one step.

        Raises:
            Exception: vLLM's engine is broken; another worker resumes all requests.
        """
        started = self._clock()
        try:
            if any(step <= self._num_steps for step in self._faults):
                raise OutOfMemoryFault("injected fault")
            outputs = self._core.step()
        except Exception as error:
            self.on_failed_step(error)
            raise
        seconds = self._clock() - started
        self.reservations.on_step()
        # A step in which nothing was computed is no progress: the server looks for that.
        self._num_steps += self._observe(seconds, outputs)
        results = [each for output in outputs if (each := self._take(output)) is not None]
        self._shrink_reservations()
        self._extend_reservations()
        self._start_deferred()
        return results

    def _take(self, output: CoreOutput) -> TokenOutput | Embedding | None:
        """Advances a sequence by what vLLM produced; None if it was cancelled meanwhile."""
        sequence = self._by_id.get(output.request_id)
        if sequence is None or not sequence.is_running:
            return None
        if output.embedding:
            self._core.forget(sequence.request_id)
            self._remove(sequence)
            return Embedding(output.request_id, output.embedding, output.num_cached_tokens)
        sequence.token_ids += output.token_ids
        if not sequence.has_token:
            sequence.has_token = True
            if self._profile.windows:
                self._shrinking[sequence.request_id] = sequence
        if sequence.num_cached_tokens is None:
            num_prompt = sequence.request.num_prompt_tokens
            sequence.num_cached_tokens = min(num_prompt, output.num_cached_tokens)
            self._prefix_lookup_tokens += num_prompt
            self._prefix_hit_tokens += sequence.num_cached_tokens
        if output.finish == "error":
            self._remove(sequence)
            self._core.forget(output.request_id)
            message = output.error or "vLLM gave it up; see the engine's log"
            self._failed.append(
                RequestFailed(request_id=output.request_id, message=message, field=output.field)
            )
            return None
        if output.finish:
            if output.finish == "stop" or sequence.num_output >= self._output_lengths.estimate:
                self._output_lengths.observe(sequence.num_output)
            self._keep_session(sequence)
            self._core.forget(sequence.request_id)
            self._remove(sequence)
        else:
            self._start_children(sequence)
        return TokenOutput(
            request_id=output.request_id,
            token_ids=output.token_ids,
            finish=output.finish,
            logprobs=output.logprobs,
            num_preemptions=sequence.num_preemptions,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _observe(self, seconds: float, outputs: list[CoreOutput]) -> bool:
        """Count the time of a step and what was computed in it; return whether anything was."""
        num_decodes = num_prompts = 0
        is_advanced = bool(outputs)
        num_parts = len(outputs)
        for output in outputs:
            sequence = self._by_id.get(output.request_id)
            if sequence is not None and sequence.has_token:
                num_decodes += len(output.token_ids)
            elif sequence is not None:
                done = max(sequence.num_computed, output.num_reused_tokens)
                self._note_start(sequence, seconds)
                self.events.on_prefilled(sequence.request_id)
                num_prompts += len(sequence.token_ids) - done
                sequence.num_computed = len(sequence.token_ids)
        for each in self._by_id.values():
            if each.is_running and not each.has_token:
                num_computed = self._core.blocks.num_computed(each.request_id)
                if num_computed > each.num_computed:
                    is_advanced = True
                    self._note_start(each, seconds)
                    num_parts += 1
                    num_prompts += num_computed - each.num_computed
                    each.num_computed = num_computed
        self.throughput.observe(seconds, num_decodes=num_decodes, num_prompt_tokens=num_prompts)
        if is_advanced:
            self._figures.observe_step(seconds, num_decodes + num_prompts, num_parts)
            self.events.note_step(seconds, num_parts, num_decodes + num_prompts, num_prompts)
        return is_advanced

    def _note_start(self, sequence: Sequence, seconds: float) -> None:
        """Notes the start of a sequence whose first part took so many seconds, with a step."""
        if sequence.is_new:
            self._figures.observe_start(sequence.request.accepted_at, seconds)
        if not sequence.num_computed:
            self.events.on_started(sequence.request, sequence.num_cached_tokens or 0, seconds)

    # admission -----------------------------------------------------------------------------------

    @property
    def _num_spared(self) -> int:
        """Blocks that new requests may not have: withheld, or for sequences that wait for them."""
        return self._num_spared_for(self.adapters.with_slots(self._by_id.values(), self._deferred))

    def _num_spared_for(self, waiting: Iterable[Sequence]) -> int:
        num_blocks = sum(self._num_blocks(each, each.charged_tokens) for each in waiting)
        return self.reservations.num_withheld + num_blocks

    @property
    def _num_waiting(self) -> int:
        num_held = self._core.blocks.num_held
        return sum(
            not (each.is_running and num_held(each.request_id)) for each in self._by_id.values()
        )

    def _admit(self, requests: list[EngineRequest], resumed: bool) -> Rejected | None:
        group = self._group(requests)
        is_refusable = not resumed or not all(request.token_ids for request in requests)
        if is_refusable and (refusal := self._never_fits(requests, group)):
            return refusal
        for sequence in group:
            self._by_id[sequence.request_id] = sequence
        if not resumed:
            return self._start_group(group)
        for sequence in group:
            self._defer(sequence)
        self._start_deferred()
        return None

    def _group(self, requests: list[EngineRequest]) -> list[Sequence]:
        """Make sequences of one arrival; all but the first are children of the first if they have
        a common prefix that vLLM keeps."""
        self._num_submitted += 1
        if not self._limits.keeps_prompts:
            # vLLM shares KV among requests of one salt.
            salt = f"{requests[0].cache_salt}\0{self._num_submitted}"
            requests = [structs.replace(each, cache_salt=salt, session_id="") for each in requests]
        group = [
            Sequence(
                request=request,
                arrival=self._num_submitted,
                serial=serial,
                limit=self._longest(request, len(requests)),
                token_ids=list(request.token_ids),
            )
            for serial, request in enumerate(requests)
        ]
        for sequence in group:
            sequence.charged_tokens = sequence.request.charged_tokens(
                self._output_lengths.estimate, sequence.limit
            )
        parent, *others = group
        if others and self._limits.shares_prompts and shared_tokens(requests):
            parent.children = others
            for child in others:
                child.parent = parent
        return group

    def _longest(self, request: EngineRequest, num_samples: int) -> int:
        """Longest that one of so many samples of a request may become, tokens."""
        profile = self._profile
        longest = self._limits.max_model_len
        if not profile.block_bytes:
            return longest
        lookahead = self._limits.lookahead_tokens
        longest = min(longest, most_tokens(profile, profile.kv_pool_bytes) - lookahead)
        limit = profile.session_kv_bytes if request.session_id else 0
        if limit:
            num_prompt = request.num_prompt_tokens
            most = most_tokens(profile, limit, num_prompt, num_samples) - lookahead
            longest = min(longest, most)
        return longest

    def _num_blocks(self, sequence: Sequence, num_tokens: int, *, resumed: bool = False) -> int:
        """Count the blocks of a sequence of so many tokens, `resumed` of one that goes on with
        them after a preemption, less those that it is going to share with a parent."""
        shared = 0
        if sequence.parent is not None:
            shared = shared_tokens([sequence.parent.request, sequence.request])
        stored = num_tokens + self._limits.lookahead_tokens
        prompt = None if resumed else 0 if sequence.has_token else len(sequence.token_ids)
        return sample_blocks(self._profile, stored, prompt, shared_tokens=shared)

    def _never_fits(self, requests: list[EngineRequest], group: list[Sequence]) -> Rejected | None:
        has_output = any(each.num_output for each in group)
        new = 0 if requests[0].embed else 1
        least = [self._num_blocks(each, len(each.token_ids) + new, resumed=True) for each in group]
        # Samples that have parted may run in turns.
        needed_bytes = (max if has_output else sum)(least) * self._profile.block_bytes
        # A prompt that is only embedded needs no room for output.
        longest = self._limits.max_model_len + (1 - new)
        return refuse_never_fits(requests, self._profile, longest, needed_bytes)

    def _start_group(self, group: list[Sequence]) -> Rejected | None:
        """Give the first of new samples to vLLM and reserve the blocks of all; refuse them where
        they do not fit, and keep nothing."""
        needed = sum(self._num_blocks(each, each.charged_tokens) for each in group)
        together = group
        if needed > self._core.blocks.num_blocks:
            # An empty pool serves what it holds alone, one sample after the other.
            together = group[:1]
            for child in group[0].children:
                child.parent = None
            group[0].children = []
            needed = self._num_blocks(group[0], group[0].charged_tokens)
        num_waiting = self._num_waiting - len(group)
        slots = self._limits.max_sequences * _QUEUE_BATCHES - num_waiting
        spared = self._num_spared
        is_full = num_waiting > 0 and slots < len(group)
        fits = True
        if self._slot_for(group[0]) is None:
            # No more wait for slots than have room together.
            together = []
            spared = self._num_spared_for(self._deferred)
            fits = needed + spared <= self.reservations.num_unreserved
        if not is_full and fits and all(self._reserve_new(each, spared) for each in together):
            for sequence in group[len(together) :]:
                self._defer(sequence)
            return None
        for sequence in reversed(group):
            self._remove(sequence)
        size = self._profile.block_bytes
        available = max(0, self.reservations.num_unreserved - spared)
        if not is_full:
            # What is refused for memory lacks a block, if only by what one or the other shares.
            needed = max(needed, 1)
            available = min(available, needed - 1)
        return refuse_now(
            [each.request for each in group],
            needed * size,
            available * size,
            None,
            slots if is_full else len(group),
            [(each.after_s, each.num_bytes) for each in self.releases()],
        )

    def _reserve_new(self, sequence: Sequence, spared: int) -> bool:
        if sequence in self._deferred:  # its parent has just failed
            return True
        if sequence.parent is None:
            return self._start(sequence, spared)
        num_blocks = self._num_blocks(sequence, sequence.charged_tokens)
        return self.reservations.reserve(sequence.request_id, num_blocks, spared)

    # running and waiting -------------------------------------------------------------------------

    def _start(self, sequence: Sequence, spared: int = 0, *, is_cached: bool = False) -> bool:
        """Give a sequence to vLLM with all its blocks reserved; False where they do not fit.

        `is_cached`: what vLLM keeps of it is likely to matter; otherwise it is looked for only if
        the sequence does not fit without.
        """
        request_id = sequence.request_id
        reservations = self.reservations
        num_blocks = self._num_blocks(sequence, sequence.charged_tokens)
        key = sequence.session_key
        is_cached = (bool(key) and reservations.use_session(key)) or is_cached
        if not is_cached and reservations.reserve(request_id, num_blocks, spared):
            return self._give(sequence)
        if not self._limits.shares_prompts:
            return False
        self._give(sequence)
        if not sequence.is_running or reservations.reserve_with_prefix(
            request_id, num_blocks, spared
        ):
            return True
        self._core.abort(request_id)
        sequence.is_running = False
        return False

    def _give(self, sequence: Sequence) -> bool:
        """Give a sequence to vLLM; one that vLLM refuses has failed and does not run."""
        request = sequence.request
        if len(sequence.token_ids) > len(request.token_ids):
            request = structs.replace(request, token_ids=list(sequence.token_ids))
        try:
            if (slot := self._slot_for(sequence)) is not None:
                self.adapters.use(request.adapter, slot)
            # None: for a sample of one that runs, which uses the adapter that is to give way.
            self._core.add(request, sequence.final_tokens - len(sequence.token_ids))
        except (InvalidRequestError, AdapterError) as error:
            self._remove(sequence)
            failed = RequestFailed(
                request_id=sequence.request_id, message=str(error), field=error.field
            )
            self._failed.append(failed)
            return True
        sequence.is_running = True
        sequence.has_token = False
        sequence.num_computed = 0
        if sequence.charged_tokens < sequence.final_tokens:
            self._growing[sequence.request_id] = sequence
        return True

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence back from vLLM, if it has it, and end its reservation. Samples that
        waited for it wait for blocks now."""
        if sequence.is_running:
            self._core.abort(sequence.request_id)
            sequence.is_running = sequence.has_token = False
        if sequence.parent is not None:
            sequence.parent.children.remove(sequence)
            sequence.parent = None
        self._growing.pop(sequence.request_id, None)
        self._shrinking.pop(sequence.request_id, None)
        self.reservations.release(sequence.request_id)
        children = sequence.children
        sequence.children = []
        for child in children:
            child.parent = None
            self.reservations.release(child.request_id)
            self._defer(child)

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._stop(sequence)
        if sequence in self._deferred:
            self._deferred.remove(sequence)
        self._by_id.pop(sequence.request_id, None)

    def _start_children(self, parent: Sequence) -> None:
        """Start the samples that waited until vLLM has the blocks of their prompt."""
        children = parent.children
        parent.children = []
        for child in children:
            child.parent = None
            self.reservations.release(child.request_id)
            if not self._start(child, is_cached=True):
                self._defer(child)

    def _defer(self, sequence: Sequence) -> None:
        sequence.parent = None
        sequence.children = []
        bisect.insort(self._deferred, sequence, key=rank_of)

    def _slot_for(self, sequence: Sequence) -> str | None:
        return self.adapters.slot_for(sequence, self._by_id.values(), self._deferred)

    def _start_deferred(self) -> None:
        """Start those that wait, the most important first. Nobody overtakes for blocks: small ones
        would starve a large one. Those that wait for an adapter's slot are passed over."""
        while first := next(self.adapters.with_slots(self._by_id.values(), self._deferred), None):
            self._deferred.remove(first)
            if not self._start(first):
                self._defer(first)
                return

    def _shrink_reservations(self) -> None:
        """Reserve only what decodes need, once windows have slid past the steps of prompts."""
        for request_id, sequence in list(self._shrinking.items()):
            num_blocks = self._num_blocks(sequence, sequence.charged_tokens)
            if self.reservations.shrink(request_id, num_blocks):
                del self._shrinking[request_id]

    def _extend_reservations(self) -> None:
        """Reserve a block more for each sequence that comes near the end of what it has."""
        for sequence in list(self._growing.values()):
            if not sequence.is_running or sequence.num_left > _MARGIN_TOKENS:
                continue
            charged = sequence.charged_tokens + self._profile.block_tokens
            sequence.charged_tokens = min(charged, sequence.final_tokens)
            self._make_room(sequence)
            if sequence.charged_tokens == sequence.final_tokens:
                self._growing.pop(sequence.request_id, None)

    def _make_room(self, sequence: Sequence) -> None:
        """Reserve what a sequence is charged for, preempting the least important, maybe itself."""
        num_blocks = self._num_blocks(sequence, sequence.charged_tokens)
        while not self.reservations.extend(sequence.request_id, num_blocks):
            holders = (each for each in self._by_id.values() if each.is_running or each.parent)
            victim = max(holders, key=rank_of)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks, to go on when they can be had again."""
        if sequence.is_running:
            sequence.num_preemptions += 1
            self.events.on_preempted(sequence.request, sequence.num_preemptions, False)
            self._num_preemptions += 1
        self._stop(sequence)
        self._defer(sequence)

    def _keep_session(self, sequence: Sequence) -> None:
        key = sequence.session_key
        if key:
            self.reservations.keep_session(key, sequence.request_id)

    def _expected_releases(self) -> Iterator[tuple[float, int]]:
        """Yield for each sequence in how many seconds it is expected to release how many bytes."""
        expected = self._output_lengths.estimate
        for each in self._by_id.values():
            num_prompt = 0 if each.has_token else len(each.token_ids)
            output = max(1, min(each.request.max_tokens, expected) - each.num_output)
            num_blocks = self._num_blocks(each, each.charged_tokens)
            after_s = self.throughput.seconds_until(num_prompt, output)
            yield after_s, num_blocks * self._profile.block_bytes
