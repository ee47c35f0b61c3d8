"""The vLLM engine: admits requests while KV blocks are available, and collects vLLM's outputs.

vLLM schedules and runs the steps. The engine passes a request to vLLM only after reserving blocks
for the prompt and the expected output. If a request outgrows its reservation, a less important
request is preempted (see `run_queue`). vLLM itself therefore never preempts.
"""

import time
from collections.abc import Callable, Iterator

from msgspec import structs

from ullage_common.request_cost import MemoryProfile
from ullage_engine.memory.out_of_memory import OutOfMemoryFault
from ullage_engine.protocol.messages import Rejected, RequestFailed
from ullage_engine.protocol.requests import (
    Embedding,
    EngineRequest,
    PromptLogprobs,
    TokenOutput,
)
from ullage_engine.protocol.worker_state import ReleaseState, SchedulerStats
from ullage_engine.scheduler.common_prefix import shared_tokens
from ullage_engine.scheduler.estimates import OutputLengthEstimator
from ullage_engine.scheduler.refusals import (
    refuse_duplicates,
    refuse_never_fits,
    refuse_now,
    soonest_releases,
)
from ullage_engine.vllm_worker.adapters import Adapters
from ullage_engine.vllm_worker.costs import BlockCosts
from ullage_engine.vllm_worker.interface import Core, CoreOutput
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.run_queue import RunQueue
from ullage_engine.vllm_worker.sequence import (
    EngineLimits,
    VllmSequence,
    no_bad_words,
    no_beams,
    no_prompt_logprobs,
)
from ullage_engine.vllm_worker.step_metrics import StepMetrics
from ullage_engine.vllm_worker.tiers import ConnectorTransfers

_QUEUE_BATCHES = 4
"""Capacity of the waiting queue, in batches. Further requests queue at the router."""


class VllmEngine:
    """Serves requests with vLLM's engine (`Core`)."""

    def __init__(
        self,
        core: Core,
        profile: MemoryProfile,
        limits: EngineLimits,
        reservations: Reservations,
        clock: Callable[[], float] = time.perf_counter,
        tiers: ConnectorTransfers | None = None,
    ) -> None:
        """Create an engine that has no requests yet.

        Args:
            core: vLLM's engine.
            profile: memory profile, which gives the size of the model's KV.
            limits: this engine's limits.
            reservations: block reservations in vLLM's pool.
            clock: returns the time in seconds.
            tiers: transfers KV to and from tiers outside the device. None without tiers.
        """
        self.on_failed_step: Callable[[Exception], object] = lambda _: None
        """Called with the error after a failed step has broken vLLM."""
        self.tiers = tiers
        self.reservations = reservations
        self.adapters = Adapters(core, limits.adapter_slots)

        self._core = core
        self._profile = profile
        self._limits = limits
        self._clock = clock
        self._output_lengths = OutputLengthEstimator(limits.max_model_len)
        self._metrics = StepMetrics(core.blocks)
        self.throughput = self._metrics.throughput
        self.events = self._metrics.events
        self._costs = BlockCosts(profile, limits)
        self._queue = RunQueue(
            core, profile, limits, self._costs, reservations, self.adapters, self.events
        )
        self._num_submitted = 0
        self._faults: list[int] = []
        """Step numbers at which an out-of-memory error is injected."""

    # figures -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or copy anything."""
        return bool(self._queue.by_id) or (self.tiers is not None and self.tiers.has_moves)

    @property
    def has_decodes(self) -> bool:
        """Whether the next step will produce a token for a running sequence."""
        return any(each.has_token for each in self._queue.by_id.values())

    @property
    def num_steps(self) -> int:
        """Number of steps in which vLLM processed at least one request."""
        return self._metrics.num_steps

    def stats(self) -> SchedulerStats:
        """Return statistics on the queue, the KV pool and the steps."""
        size = self._profile.block_bytes
        metrics = self._metrics
        reservations = self.reservations
        blocks = self._core.blocks
        num_free = blocks.num_free
        num_reclaimable = reservations.num_reclaimable
        num_taken = reservations.num_committed + self._queue.num_spared

        sequences = self._queue.by_id
        num_tokens = 0
        num_started = 0
        for each in sequences.values():
            num_computed = blocks.num_computed(each.request_id) if each.is_running else 0
            num_started += num_computed > 0
            num_tokens += num_computed

        num_groups = max(1, len(self._profile.groups))
        return SchedulerStats(
            kv_pool_bytes=self._profile.kv_pool_bytes,
            kv_free_bytes=num_free * size,
            kv_reclaimable_bytes=num_reclaimable * size,
            kv_committed_bytes=min(num_taken, num_free + num_reclaimable) * size,
            kv_used_bytes=num_tokens * num_groups * size // max(1, self._profile.block_tokens),
            num_running=num_started,
            num_waiting=len(sequences) - num_started,
            num_steps=metrics.num_steps,
            expected_output_tokens=self._output_lengths.estimate,
            prefill_backlog_tokens=self._num_backlog_tokens,
            num_preemptions=self._queue.num_preemptions,
            prefix_lookup_tokens=metrics.prefix_lookup_tokens,
            prefix_hit_tokens=metrics.prefix_hit_tokens,
            num_sessions=reservations.num_sessions,
            session_bytes=reservations.num_session_blocks * size,
            num_adapter_loads=self.adapters.num_loads,
            num_adapter_unloads=self.adapters.num_unloads,
            figures=metrics.figures.copy(),
        )

    @property
    def _num_backlog_tokens(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        blocks = self._core.blocks
        return sum(
            len(each.token_ids) - (blocks.num_computed(each.request_id) if each.is_running else 0)
            for each in self._queue.by_id.values()
            if not each.has_token
        )

    def releases(self) -> list[ReleaseState]:
        """Return the predicted releases of KV memory, earliest first."""
        return soonest_releases(self._expected_releases())

    # requests in and out -------------------------------------------------------------------------

    def is_compiled(self, request: EngineRequest) -> bool:
        """Return whether a request's grammar is compiled. If not, start compiling it."""
        return self._core.is_compiled(request.grammar)

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admit all samples of one prompt, or reject all of them.

        A resumed request is rejected only if it is invalid. A valid one may have to wait for
        memory.

        Returns:
            The rejection, which names the first sample, or the outputs of samples that are already
            complete.
        """
        pool_bytes = self._profile.kv_pool_bytes
        if refusal := refuse_duplicates(requests, self._queue.by_id, pool_bytes):
            return refusal
        if requests[0].beam is not None:
            self._queue.failed += [no_beams(request) for request in requests]
            return []
        if requests[0].prompt_logprobs is not None:
            self._queue.failed += [no_prompt_logprobs(request) for request in requests]
            return []

        if requests[0].bad_words:
            self._queue.failed += [no_bad_words(request) for request in requests]
            return []

        complete = [r for r in requests if r.is_complete(self._costs.longest(r, 1), resumed)]
        remaining = [request for request in requests if request not in complete]
        if remaining and (refusal := self._admit(remaining, resumed)):
            return refusal
        return [
            TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
            for request in complete
        ]

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Drop a request and free its memory. Unknown ids are ignored.

        Args:
            request_id: the request.
            is_answered: whether a stop string completed the answer, so that its length counts
                towards the estimate of output lengths.
        """
        sequence = self._queue.by_id.get(request_id)
        if sequence is None:
            return
        if is_answered:
            self._output_lengths.observe(sequence.num_output)
        self._queue.abort(sequence)
        self._queue.start_deferred()

    def take_scored(self) -> list[PromptLogprobs]:
        """Return an empty list, because this engine refuses to score prompt tokens."""
        return []

    def set_batch_share(self, share: float) -> None:
        """Limit batches to a fraction (0 to 1) of `max_sequences`, but to at least one request."""
        self._core.set_max_running(max(1, int(self._limits.max_sequences * min(1.0, share))))

    def withhold(self, num_bytes: int) -> None:
        """Withhold `num_bytes` of KV memory from new requests.

        Admitted requests keep their blocks.
        """
        size = self._profile.block_bytes
        self.reservations.num_withheld = -(-num_bytes // size) if size else 0

    def inject_out_of_memory(self, after_steps: int) -> None:
        """Make a step fail with an out-of-memory error, once `after_steps` more steps have run."""
        self._faults.append(self._metrics.num_steps + after_steps)

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests that have failed since the last call."""
        failed = self._queue.failed
        self._queue.failed = []
        return failed

    # a step --------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput | Embedding]:
        """Compute one step and return its outputs.

        Raises:
            Exception: vLLM's engine is broken. Another worker must resume all requests.
        """
        started = self._clock()
        try:
            if any(step <= self._metrics.num_steps for step in self._faults):
                raise OutOfMemoryFault("injected fault")
            outputs = self._core.step()
        except Exception as error:
            self.on_failed_step(error)
            raise
        seconds = self._clock() - started

        self.reservations.on_step()
        self._metrics.observe(seconds, outputs, self._queue.by_id)
        results = [each for output in outputs if (each := self._take(output)) is not None]

        # Running sequences take blocks before waiting ones do.
        self._queue.adjust_reservations()
        self._queue.start_deferred()
        return results

    def _take(self, output: CoreOutput) -> TokenOutput | Embedding | None:
        """Append a step's output to its sequence, and return the message for the client.

        Returns:
            The message, or None if the sequence has been cancelled or has failed.
        """
        sequence = self._queue.by_id.get(output.request_id)
        if sequence is None or not sequence.is_running:
            return None
        if output.embedding:
            self._queue.finish(sequence)
            return Embedding(output.request_id, output.embedding, output.num_cached_tokens)

        sequence.token_ids += output.token_ids
        self._queue.on_token(sequence)
        num_cached = self._metrics.observe_prefix(sequence, output.num_cached_tokens)
        if output.finish == "error":
            self._fail(sequence, output)
            return None
        if output.finish:
            if output.finish == "stop" or sequence.num_output >= self._output_lengths.estimate:
                self._output_lengths.observe(sequence.num_output)
            self._queue.finish(sequence, keeps_session=True)
        else:
            self._queue.start_children(sequence)
        return TokenOutput(
            request_id=output.request_id,
            token_ids=output.token_ids,
            finish=output.finish,
            logprobs=output.logprobs,
            num_preemptions=sequence.num_preemptions,
            num_cached_tokens=num_cached,
        )

    def _fail(self, sequence: VllmSequence, output: CoreOutput) -> None:
        """Fail a sequence for which vLLM reported an error."""
        self._queue.remove(sequence)
        self._core.forget(output.request_id)
        message = output.error or "vLLM gave it up; see the engine's log"
        self._queue.failed.append(
            RequestFailed(request_id=output.request_id, message=message, field=output.field)
        )

    # admission -----------------------------------------------------------------------------------

    def _admit(self, requests: list[EngineRequest], resumed: bool) -> Rejected | None:
        group = self._group(requests)
        is_refusable = not resumed or not all(request.token_ids for request in requests)
        if is_refusable and (refusal := self._never_fits(requests, group)):
            return refusal
        for sequence in group:
            self._queue.by_id[sequence.request_id] = sequence
        if not resumed:
            return self._start_group(group)

        for sequence in group:
            self._queue.defer(sequence)
        self._queue.start_deferred()
        return None

    def _group(self, requests: list[EngineRequest]) -> list[VllmSequence]:
        """Create the sequences of requests that arrived together.

        If vLLM can cache their common prefix, the first sequence becomes the parent of the others.
        """
        self._num_submitted += 1
        if not self._limits.keeps_prompts:
            # vLLM shares KV only among requests with the same salt.
            salt = f"{requests[0].cache_salt}\0{self._num_submitted}"
            requests = [structs.replace(each, cache_salt=salt, session_id="") for each in requests]

        group = [
            VllmSequence(
                request=request,
                arrival=self._num_submitted,
                serial=serial,
                limit=self._costs.longest(request, len(requests)),
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

    def _never_fits(
        self, requests: list[EngineRequest], group: list[VllmSequence]
    ) -> Rejected | None:
        has_output = any(each.num_output for each in group)
        new = 0 if requests[0].embed else 1
        least = [
            self._costs.num_blocks(each, len(each.token_ids) + new, resumed=True) for each in group
        ]
        # Samples that no longer share blocks may run one after the other.
        needed_bytes = (max if has_output else sum)(least) * self._profile.block_bytes
        # A prompt that is only embedded needs no memory for output.
        longest = self._limits.max_model_len + (1 - new)
        return refuse_never_fits(requests, self._profile, longest, needed_bytes)

    def _start_group(self, group: list[VllmSequence]) -> Rejected | None:
        """Reserve blocks for all new samples, and pass the first sample to vLLM.

        Returns:
            None if all samples were accepted. The rejection if the waiting queue is full or the
            blocks do not fit, in which case no sample is kept.
        """
        queue = self._queue
        needed = sum(self._costs.charged_blocks(each) for each in group)
        together = group
        if needed > self._core.blocks.num_blocks:
            # An empty pool accepts samples that fit only one at a time, and serves them one by one.
            together = group[:1]
            for child in group[0].children:
                child.parent = None
            group[0].children = []
            needed = self._costs.charged_blocks(group[0])

        num_waiting = queue.num_waiting - len(group)
        slots = self._limits.max_sequences * _QUEUE_BATCHES - num_waiting
        is_full = num_waiting > 0 and slots < len(group)

        spared = queue.num_spared
        fits = True
        if queue.slot_for(group[0]) is None:
            # Sequences wait for adapter slots only while the pool has room for all of them
            # together.
            together = []
            spared = queue.num_spared_for(queue.deferred)
            fits = needed + spared <= self.reservations.num_unreserved

        if not is_full and fits and all(queue.reserve_new(each, spared) for each in together):
            for sequence in group[len(together) :]:
                queue.defer(sequence)
            return None

        for sequence in reversed(group):
            queue.remove(sequence)
        available = max(0, self.reservations.num_unreserved - spared)
        if not is_full:
            # A group refused for memory lacks at least one block, if only one that it would share.
            needed = max(needed, 1)
            available = min(available, needed - 1)
        size = self._profile.block_bytes
        return refuse_now(
            [each.request for each in group],
            needed * size,
            available * size,
            None,
            slots if is_full else len(group),
            [(each.after_s, each.num_bytes) for each in self.releases()],
        )

    def _expected_releases(self) -> Iterator[tuple[float, int]]:
        """Yield in how many seconds each sequence is expected to end, and the bytes it frees.

        The prompts of all sequences delay each of them: those ahead are computed before its own
        prompt, and those behind it share the steps in which it decodes.
        """
        num_prompt = self._num_backlog_tokens
        expected = self._output_lengths.estimate
        for each in self._queue.by_id.values():
            output = max(1, min(each.request.max_tokens, expected) - each.num_output)
            num_blocks = self._costs.charged_blocks(each)
            after_s = self.throughput.seconds_until(num_prompt, output)
            yield after_s, num_blocks * self._profile.block_bytes
