"""The engine's step loop, and its recovery when a step fails or runs out of memory.

One step, from the worker's loop to the tensor operations and back:

    Worker.run                              worker/loop.py
      _take_messages                          Submit and Cancel from the server over the Unix socket
      EngineCore.submit_group               worker/engine.py
        Scheduler.submit_group                scheduler/scheduler.py
          AdmissionControl.submit               scheduler/admission.py: admit or refuse by KV bytes
            BlockReservations.grant_deferred      scheduler/reservations.py
      EngineCore.step, PipelinedEngine.step worker/engine.py
        Scheduler.schedule                    scheduler/scheduler.py
          _start_waiting                        reservations granted, KV swapped in
          BatchPlanner.plan                     scheduler/planner.py: which tokens of which sequence
            _allocate                             blocks, preempting where none is left
              PrefixCache.allocate                  kv_cache/prefix_cache.py
          SwapManager.drain                     scheduler/swap.py: the plan's block copies
        Grammars.constrain                    worker/grammar.py: masks of allowed tokens
        ModelRunner.move                      runner/model_runner.py: block copies, host and device
        ModelRunner.execute                   runner/model_runner.py
          PipelineRank.split, transfers         parallel/pipeline.py: micro-batches between stages
          build_batch                           kernels/batch.py: index arrays, decodes first
          Decoder.forward                       layers/decoder.py: embed, then in each layer
            ForwardContext.upload                 kernels/staging.py: all indices in one copy
            rms_norm                              layers/attention.py, kernels/triton/layer.py
            AttentionLayer.run                    layers/attention.py
              Linear.forward                        layers/linear.py: plain, or by its format
              Rotary.run                            head norms, rotation, KV into its pages
              Attention.run                         kernels/attention.py (CPU, any device),
                                                    kernels/triton/attention.py (GPU), or
                                                    kernels/deterministic.py
              Linear.forward_add                    layers/linear.py
            or ConvLayer.run                      layers/attention.py
            MlpLayer.run or Experts.run           layers/decoder.py, layers/moe.py
          Decoder.logits                        layers/decoder.py: norm and head of sampled rows
          sample                                runner/sampler.py: penalties, masks, filters, noise
        Scheduler.commit                      scheduler/scheduler.py: tokens appended, blocks cached
        BeamSearches.filter_outputs           scheduler/beam_groups.py
      Link.send(StepDone)                   worker/loop.py: tokens to the server
      _report                               the worker's state, at most ten times a second
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import numpy as np

from ullage_engine.memory.out_of_memory import (
    OutOfMemoryFault,
    is_device_lost,
    is_out_of_memory,
)
from ullage_engine.protocol.errors import MemoryShortError
from ullage_engine.protocol.messages import Rejected, RequestFailed
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import EngineRequest, PromptLogprobs, TokenOutput
from ullage_engine.protocol.step_plan import (
    NO_TOKEN,
    NOTHING_ALLOWED,
    Chunk,
    Moves,
    SampledToken,
    StepPlan,
)
from ullage_engine.scheduler.batch_plan import Transfers
from ullage_engine.scheduler.beam_groups import BeamSearches
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler
from ullage_engine.scheduler.tiers import TierTransfers
from ullage_engine.worker.grammar import (
    GrammarError,
    Grammars,
    VocabularyError,
    no_vocabulary,
)

log = logging.getLogger("ullage.engine.worker")

SUSPICIOUS_STEPS = 1000
"""If NaN or infinite logits recur within this many steps, all cached KV is evicted.

A recurrence so soon suggests that the KV of more than one request is damaged.
"""

_RETRY_S = 0.25
"""Seconds between retries of a step while other processes hold the memory that it needs."""
_SHORTAGE_S = 5.0
"""If retries fail for this many seconds, the worker exits, and a new worker with a smaller KV pool
takes over."""


class Runner(Protocol):
    """The interface by which the engine executes step plans, on one device or on several ranks."""

    def move(self, moves: Moves) -> None:
        """Copy whole KV blocks: all of `swap_out`, then all of `swap_in`, then all of `copy`.

        The copies allocate no memory. Within each of these lists, copies behave as if all reads
        happened before any write.
        """
        ...

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a step. Return a token for each chunk with `sampling`, in plan order.

        Recomputing a plan after an error yields the same tokens.
        """
        ...

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        """Return the log-probabilities of prompt tokens that steps have computed, in their order.

        These are the results of all executed, or collected, steps since the last call.
        """
        ...

    def sync(self) -> None:
        """Wait until all ranks have finished their commands."""
        ...


class PipelinedRunner(Runner, Protocol):
    """A runner with several pipeline stages, which compute different plans concurrently."""

    def submit(self, plan: StepPlan) -> None:
        """Start computing a step. Moves and steps are executed in call order."""
        ...

    def collect(self) -> list[SampledToken]:
        """Wait for the oldest uncollected step, and return its tokens as `execute` does."""
        ...


class _Timed(NamedTuple):
    """The duration and size of a computed step, recorded when the step is committed."""

    seconds: float
    num_decodes: int
    num_prompt_tokens: int


class EngineCore:
    """Schedules, executes and commits steps, one after another.

    A step that runs out of memory is retried with half the prompt tokens. Each further retry halves
    them again and also leaves out the newest sequence. A request fails only if its sequence does
    not fit even when running alone. However, if other processes have taken memory from this
    process's workspace, no request is to blame. In that case, all requests wait, and if the
    shortage persists, a new worker resumes them.

    A step that fails for any other reason is retried one chunk at a time. A request fails only if
    its own chunk fails again, or if its logits are NaN or infinite.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        throughput: ThroughputEstimator,
        grammars: Grammars | None = None,
        restore_workspace: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an engine that computes requests with a runner.

        Args:
            scheduler: decides what each step computes.
            runner: computes the steps.
            throughput: throughput estimator to update with the duration of each step.
            grammars: grammars of requests, or None if the engine has no vocabulary.
            restore_workspace: reallocates the memory for temporary tensors after a step has run out
                of memory. Returns False if other processes have taken the memory.
            clock: returns monotonic time in seconds.
        """
        self.scheduler = scheduler
        self.grammars = grammars or Grammars(no_vocabulary)
        self._runner = runner
        self._throughput = throughput
        self._beams = BeamSearches(scheduler)
        self._failed: list[RequestFailed] = []
        self._scored: list[PromptLogprobs] = []
        self._timed: _Timed | None = None

        self.num_oom_events = 0
        """Number of steps that ran out of memory."""
        self.num_nonfinite_logits = 0
        """Number of requests that failed because their logits were NaN or infinite."""
        self.num_overlapped_steps = 0
        """Number of steps that started while another step was being computed."""

        self._damaged_at = -SUSPICIOUS_STEPS
        """Number of steps that had been committed when logits were last NaN or infinite."""
        self._faults: list[int] = []
        """Injected faults: once this many steps have been committed, the next step runs out of
        memory."""

        self._restore_workspace = restore_workspace
        self._clock = clock
        self._short_since: float | None = None
        """Time at which the current memory shortage began, or None if there is none."""
        self._retry_at = 0.0
        """Time of the next retry during a memory shortage."""

    @property
    def has_work(self) -> bool:
        """Whether the next step has anything to compute."""
        return self.scheduler.has_work

    @property
    def has_decodes(self) -> bool:
        """Whether the next step produces a token for a running sequence."""
        return self.scheduler.has_decodes

    @property
    def num_steps(self) -> int:
        """Number of committed steps that computed at least one chunk."""
        return self.scheduler.num_steps

    @property
    def adapters(self) -> None:
        """Always None, because this engine does not serve LoRA adapters."""
        return None

    @property
    def tiers(self) -> TierTransfers | None:
        """Offloads KV to tiers outside the device and loads it back. None without tiers."""
        return self.scheduler.tiers

    @property
    def events(self) -> RequestEvents:
        """Request lifecycle events, for logging and tracing."""
        return self.scheduler.events

    def is_compiled(self, request: EngineRequest) -> bool:
        """Return whether a request's grammar is compiled. If not, start compiling it."""
        return self.grammars.compile(request.grammar).done()

    def set_batch_share(self, share: float) -> None:
        """Limit the batch size. See `Scheduler.set_batch_share`."""
        self.scheduler.set_batch_share(share)

    def submit(
        self, request: EngineRequest, *, resumed: bool = False
    ) -> Rejected | TokenOutput | None:
        """Admit a request or refuse it. See `Scheduler.submit`."""
        return self.scheduler.submit(request, resumed=resumed)

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admit all samples of one prompt, possibly as a beam search, or refuse all of them.

        If the samples have a grammar, block until it is compiled. See `Grammars.compile`.
        """
        if requests[0].beam:
            return self._beams.start(requests, resumed=resumed)
        if requests[0].grammar:
            return self._submit_matched(requests, resumed)
        return self.scheduler.submit_group(requests, resumed=resumed)

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Cancel a request. See `Scheduler.cancel`."""
        self.grammars.close(request_id)
        if not self._beams.cancel(request_id):
            self.scheduler.cancel(request_id, is_answered=is_answered)

    def inject_out_of_memory(self, after_steps: int) -> None:
        """Inject a fault: after `after_steps` more steps, make a step run out of memory."""
        self._faults.append(self.scheduler.stats().num_steps + after_steps)

    def step(self) -> list[TokenOutput]:
        """Schedule and compute one step, and return its outputs.

        Raises:
            MemoryShortError: other processes have held the memory that the step needs for too long.
        """
        if self._short_since is not None and self._clock() < self._retry_at:
            return []

        plan = self._constrained(self.scheduler.schedule())
        outputs = self._committed(self._execute(plan))
        if not plan.chunks:
            self._finish_moves()
        return outputs

    def _committed(self, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Commit the oldest plan in flight, and return the outputs to send to clients."""
        if self.scheduler.is_scoring:
            scored = self.scheduler.score(self._runner.take_prompt_logprobs())
            damaged = [each.request_id for each in scored if not _is_finite(each)]
            self._discard(dict.fromkeys(damaged))
            self._scored += [each for each in scored if each.request_id not in damaged]
            sampled = [each for each in sampled if each.request_id not in damaged]
        outputs = self.scheduler.commit(self._with_token(sampled))
        if timed := self._timed:
            # All tokens of an output except one are accepted draft tokens.
            num_accepted = sum([len(output.token_ids) - 1 for output in outputs])
            self._throughput.observe(**timed._asdict(), num_accepted=num_accepted)
            self._timed = None

        for output in outputs:
            if output.finish:
                self.grammars.close(output.request_id)
        return self._beams.filter_outputs(outputs)

    def take_scored(self) -> list[PromptLogprobs]:
        """Return the log-probabilities of prompt tokens since the last call."""
        scored = self._scored
        self._scored = []
        return scored

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests that have failed since the last call, each with its error message."""
        failed = self._failed
        self._failed = []
        for each in failed:
            self.grammars.close(each.request_id)
        return [each for one in failed for each in self._beams.on_failed(one)]

    def _submit_matched(
        self, requests: list[EngineRequest], resumed: bool
    ) -> Rejected | list[TokenOutput]:
        try:
            compiled = self.grammars.compile(requests[0].grammar).result()
        except VocabularyError as error:
            message = f"{error}; see the engine's log"
            self._failed += [
                RequestFailed(request_id=r.request_id, message=message) for r in requests
            ]
            return []
        except GrammarError as error:
            self._failed += [_unmatched(request.request_id, str(error)) for request in requests]
            return []

        answer = self.scheduler.submit_group(requests, resumed=resumed)
        if not isinstance(answer, Rejected):
            done = {output.request_id for output in answer}
            for request in requests:
                if request.request_id not in done:
                    self.grammars.open(request, compiled)
        return answer

    def _constrained(self, plan: StepPlan) -> StepPlan:
        """Add grammar masks to a plan, and fail requests whose grammars cannot be enforced.

        If no chunk remains, the plan is no longer in flight, but its moves must still be performed.
        """
        constrained, failed = self.grammars.constrain(plan)
        for request_id, reason in failed.items():
            self.scheduler.cancel(request_id)
            self._failed.append(_unmatched(request_id, reason))

        if plan.chunks and not constrained.chunks:
            # Without a step, nothing shows when the moves are complete on all ranks.
            self.scheduler.abandon()
        return constrained

    def _execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a plan. If it runs out of memory, retry with smaller plans."""
        prompt_tokens = 0
        is_retried = False
        self._move(plan)

        while plan.chunks:
            try:
                sampled = self._measured(plan)
                self._short_since = None
                return sampled
            except Exception as error:
                if is_device_lost(error):
                    raise
                if not is_out_of_memory(error):
                    log.exception("a step failed, so its %d chunks run alone", len(plan.chunks))
                cause = error.with_traceback(None)
                reason = _first_line(error)

            # Recovery is outside the handler: the exception's frames keep the step's tensors alive.
            if not is_out_of_memory(cause):
                return self._one_by_one(plan, cause)

            self.num_oom_events += 1
            is_whole = self._restore_workspace()
            if is_retried and not is_whole:
                self._wait_for_memory(reason)
                return []
            if is_retried:
                self._drop_newest(reason)

            prompt_tokens = prompt_tokens or sum(len(chunk.token_ids) for chunk in plan.prompts)
            prompt_tokens = max(1, prompt_tokens // 2)
            is_retried = True
            plan = self._constrained(self.scheduler.replan(prompt_tokens))
            self._move(plan)

        return []

    def _move(self, plan: StepPlan) -> None:
        """Perform a plan's block copies. If the step is retried, they are not repeated."""
        if plan.moves:
            began = time.perf_counter()
            log.debug("KV is copied between device and host")
            self._runner.move(plan.moves)
            seconds = round(time.perf_counter() - began, 5)
            log.debug("KV was copied between device and host", extra={"seconds": seconds})

    def _finish_moves(self) -> None:
        """Wait for the block copies of plans without chunks, and report that they are complete.

        Call this only while no plan is in flight.
        """
        if self.tiers and (kept := self.tiers.take_kept()) != Transfers():
            self._runner.sync()
            self.tiers.finish(kept)

    def _measured(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a plan, and record the duration of the step."""
        self._raise_fault()
        started = self._clock()
        output = self._runner.execute(plan)
        self._observe(self._clock() - started, [plan])
        return output

    def _observe(self, seconds: float, plans: list[StepPlan]) -> None:
        """Record the duration of a step.

        Args:
            seconds: time from submitting the first plan to receiving its result.
            plans: plans that were in flight during that time. Only the first one has finished.
        """
        if chunks := plans[0].chunks:
            self.scheduler.figures.observe_step(seconds, plans[0].num_tokens, len(chunks))
            if self.events.wants_steps:
                self.events.on_step(plans[0], seconds)

        num_chunks = sum(len(plan.chunks) for plan in plans)
        prompts = [chunk for plan in plans for chunk in plan.prompts]
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in prompts)
        self._timed = _Timed(seconds, num_chunks - len(prompts), num_prompt_tokens)

    def _one_by_one(self, plan: StepPlan, cause: Exception) -> list[SampledToken]:
        """Retry each chunk of a failed plan by itself, and fail requests whose chunks fail again.

        Raises:
            Exception: `cause`, if every chunk fails, a chunk runs out of memory, or the device is
                lost. If every chunk fails, no single request is to blame.
        """
        sampled: list[SampledToken] = []
        failed: list[tuple[Chunk, str]] = []
        for chunk in plan.chunks:
            try:
                sampled += self._runner.execute(StepPlan(chunks=[chunk]))
            except Exception as error:
                if is_device_lost(error) or is_out_of_memory(error):
                    raise cause from error
                failed.append((chunk, _first_line(error)))

        if len(failed) == len(plan.chunks):
            raise cause

        for chunk, reason in failed:
            self._give_up(chunk.request_id, f"its step cannot be computed: {reason}")
        return sampled

    def _with_token(self, sampled: list[SampledToken]) -> list[SampledToken]:
        """Filter out invalid tokens, and fail the requests whose tokens are invalid.

        Call this before the step is committed.

        If a request has NaN or infinite logits, its KV may be damaged as well, so its cached blocks
        are evicted. If this happens again soon, all cached blocks are evicted. Requests that
        have been cancelled in the meantime are treated the same, but do not get an error.
        """
        sampled = self._with_allowed_token(sampled)
        damaged = dict.fromkeys(each.request_id for each in sampled if each.token_id == NO_TOKEN)
        if not damaged:
            return sampled

        self._discard(damaged)
        return [each for each in sampled if each.token_id != NO_TOKEN]

    def _discard(self, damaged: Collection[str]) -> None:
        """Fail requests whose logits are NaN or infinite, and evict their blocks."""
        for request_id in damaged:
            is_awaited = self.scheduler.is_awaited(request_id)
            self.scheduler.discard(request_id)
            if not is_awaited:
                log.error("logits are NaN or infinite, of %s, which was cancelled", request_id)
                continue
            log.error("logits are NaN or infinite, so the request %s fails", request_id)
            self._give_up(
                request_id,
                "its logits are NaN or infinite, so weights or device may be damaged; send it "
                "again, and if it fails again restart the engine",
            )
        if not damaged:
            return

        self.num_nonfinite_logits += len(damaged)
        num_steps = self.scheduler.stats().num_steps
        if num_steps - self._damaged_at < SUSPICIOUS_STEPS:
            self.scheduler.evict_all()
        self._damaged_at = num_steps

    def _with_allowed_token(self, sampled: list[SampledToken]) -> list[SampledToken]:
        """Fail requests whose constraints rule out every token, and return the other samples."""
        refused = dict.fromkeys(
            each.request_id for each in sampled if each.token_id == NOTHING_ALLOWED
        )
        if not refused:
            return sampled

        for request_id in refused:
            if self.scheduler.is_awaited(request_id):
                self._give_up(
                    request_id,
                    "no token may come next: its grammar (response_format, tools), min_tokens, "
                    "allowed_token_ids, bad_words and logit_bias together rule out every one; "
                    "loosen one of them",
                )
        return [each for each in sampled if each.request_id not in refused]

    def _give_up(self, request_id: str, message: str) -> None:
        """Fail a request with an error."""
        self.scheduler.cancel(request_id)
        self._failed.append(RequestFailed(request_id=request_id, message=message))

    def _drop_newest(self, reason: str) -> None:
        """Preempt the newest sequence. If no other one is running, fail its request instead."""
        if self.scheduler.stats().num_running > 1:
            self.scheduler.preempt_newest()
            return

        request_id = self.scheduler.fail_newest()
        assert request_id is not None, "a plan without a running sequence"
        message = f"out of memory although it ran alone: {reason}"
        self._failed.append(RequestFailed(request_id=request_id, message=message))

    def _wait_for_memory(self, reason: str) -> None:
        """Drop the plan and retry later, because other processes hold memory that the step needs.

        Raises:
            MemoryShortError: the shortage has lasted too long.
        """
        now = self._clock()
        # An old shortage that ended when its last request was cancelled does not count.
        if self._short_since is None or now > self._retry_at + _SHORTAGE_S:
            self._short_since = now
            log.warning("steps wait for memory that other processes hold: %s", reason)

        if now - self._short_since >= _SHORTAGE_S:
            raise MemoryShortError(
                f"others have held memory that steps need for {_SHORTAGE_S:g} s ({reason}); "
                "end them, or give this engine a GPU of its own"
            )
        self._retry_at = now + _RETRY_S
        self.scheduler.abandon()

    def _raise_fault(self) -> None:
        """Raise an injected fault if one is due. See `inject_out_of_memory`."""
        if not self._faults:
            return

        num_steps = self.scheduler.stats().num_steps
        due = next((step for step in self._faults if step <= num_steps), None)
        if due is not None:
            self._faults.remove(due)
            raise OutOfMemoryFault("injected fault")


class _InFlight(NamedTuple):
    """A submitted plan whose result has not been collected yet."""

    plan: StepPlan
    submitted_at: float
    """Time of submission, from `time.perf_counter`."""


class PipelinedEngine(EngineCore):
    """The step loop for several pipeline stages, which compute different plans concurrently.

    Up to `SchedulerLimits.max_in_flight` plans with different sequences are submitted before the
    first result is collected. Results are collected in submission order. If a step fails on any
    rank, all plans in flight are lost, and all processes of the group exit. Another worker then
    resumes the requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: PipelinedRunner,
        throughput: ThroughputEstimator,
        grammars: Grammars | None = None,
        *,
        max_in_flight: int,
    ) -> None:
        # A step that fails on a rank ends the group, so there is no workspace to restore here.
        super().__init__(scheduler, runner, throughput, grammars)
        self._stages = runner
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_InFlight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether there are steps to compute or results to collect, even for cancelled requests."""
        return bool(self._in_flight) or super().has_work

    def step(self) -> list[TokenOutput]:
        """Submit plans up to the in-flight limit, then collect and commit the oldest one."""
        # A step with an injected fault is computed alone, so that it can be computed again.
        if self._faults and not self._in_flight:
            return super().step()

        while not self._faults and len(self._in_flight) < self._max_in_flight:
            if not self._submit_next():
                break

        return self._collect_oldest() if self._in_flight else []

    def _submit_next(self) -> bool:
        """Submit the next plan. Return False if there is nothing to compute at the moment."""
        plan = self._constrained(self.scheduler.schedule())
        self._move(plan)
        if not plan.chunks:
            if not self._in_flight:
                self._finish_moves()
            return False

        submitted_at = time.perf_counter()
        self.num_overlapped_steps += bool(self._in_flight)
        self._stages.submit(plan)
        self._in_flight.append(_InFlight(plan, submitted_at))
        return True

    def _collect_oldest(self) -> list[TokenOutput]:
        """Wait for the result of the oldest plan in flight, and commit it."""
        oldest = self._in_flight[0]
        sampled = self._stages.collect()

        # A sequence waits for its next token as long as its plan is in flight. All plans in flight
        # together are the batch of that time.
        seconds = time.perf_counter() - oldest.submitted_at
        self._observe(seconds, [each.plan for each in self._in_flight])
        self._in_flight.popleft()
        return self._committed(sampled)


def _unmatched(request_id: str, reason: str) -> RequestFailed:
    message = f"the grammar cannot be followed: {reason}; simplify it"
    return RequestFailed(request_id=request_id, message=message, field="grammar")


def _is_finite(scored: PromptLogprobs) -> bool:
    return bool(np.isfinite(np.frombuffer(scored.logprobs, "<f4")).all())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
