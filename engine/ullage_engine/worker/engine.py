"""The engine's step loop, and what happens when a step fails or runs out of memory.

One step, from the worker's loop to the tensor operations and back:

    Worker.run                              worker/loop.py
      _take_messages                          Submit and Cancel from the server, by the Unix socket
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
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ullage_engine.memory.out_of_memory import is_device_lost, is_out_of_memory
from ullage_engine.protocol.errors import MemoryShortError
from ullage_engine.protocol.messages import Rejected, RequestFailed
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import EngineRequest, TokenOutput
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


class Runner(Protocol):
    """The executor of step plans on one device or on several ranks."""

    def move(self, moves: Moves) -> None:
        """Copy whole blocks: all of swap_out, then swap_in, then copy.

        Allocates nothing. Reads of one kind never see writes of the same kind.
        """
        ...

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a step; return one token for each chunk with `sampling`, in the plan's order.

        Computing a plan again after an error gives what it would have given.
        """
        ...

    def sync(self) -> None:
        """Wait until all ranks have done what they were asked for."""
        ...


class PipelinedRunner(Runner, Protocol):
    """A runner whose stages compute different plans at the same time."""

    def submit(self, plan: StepPlan) -> None:
        """Begin to compute a step; moves and steps are done in the order of their calls."""
        ...

    def collect(self) -> list[SampledToken]:
        """Wait for the oldest step that was submitted and not collected; see `execute`."""
        ...


SUSPICIOUS_STEPS = 1000
"""Steps after one with NaN or infinite logits in which another one costs the whole cache: more may
be damaged than what the first request had."""


_RETRY_S = 0.25
"""Seconds between two attempts to compute a step for which others hold the memory."""
_SHORTAGE_S = 5.0
"""Seconds of such attempts after which another worker does better, with a smaller KV pool."""


class _Timed(NamedTuple):
    """A computed step that is not committed, as its time is observed."""

    seconds: float
    num_decodes: int
    num_prompt_tokens: int


class EngineCore:
    """Serves requests with one runner: schedules, executes and commits steps.

    A step that runs out of memory is computed again with half the prompt tokens, then without the
    newest sequence, and only when a sequence alone still does not fit is that one request failed.
    That is so while the workspace is this process's own. Where others have taken memory of it no
    request is to blame: all of them wait, and if that lasts, another worker goes on with them.

    A step that fails otherwise is computed again chunk by chunk, and only requests whose own chunk
    fails are given up. So is a request whose logits are NaN or infinite.
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
        """
        Args:
            restore_workspace: takes back the memory of steps' temporaries after a step ran out of
                memory; False: others have it.
            clock: in seconds.
        """
        self.scheduler = scheduler
        self.grammars = grammars or Grammars(no_vocabulary)
        self.num_oom_events = 0
        self.num_nonfinite_logits = 0
        """Requests that failed because their logits were NaN or infinite."""
        self.num_overlapped_steps = 0
        """Steps that were begun while another one was computed."""
        self._damaged_at = -SUSPICIOUS_STEPS
        """Number of steps before the last one whose logits were NaN or infinite."""
        self._runner = runner
        self._throughput = throughput
        self._beams = BeamSearches(scheduler)
        self._failed: list[RequestFailed] = []
        self._faults: list[int] = []
        self._timed: _Timed | None = None
        self._restore_workspace = restore_workspace
        self._clock = clock
        self._short_since: float | None = None
        """When others began to hold memory that steps need; None: they do not."""
        self._retry_at = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_decodes(self) -> bool:
        """Whether the next step gives a running sequence its next token."""
        return self.scheduler.has_decodes

    @property
    def num_steps(self) -> int:
        """Steps with work that were committed."""
        return self.scheduler.num_steps

    @property
    def adapters(self) -> None:
        """None, since this engine serves no adapters."""
        return None

    @property
    def tiers(self) -> TierTransfers | None:
        """KV outside the device; None: there is none."""
        return self.scheduler.tiers

    @property
    def events(self) -> RequestEvents:
        """What becomes of requests, in the log and in spans."""
        return self.scheduler.events

    def is_compiled(self, request: EngineRequest) -> bool:
        """Whether a request's grammar is compiled; if not, begins to compile it."""
        return self.grammars.compile(request.grammar).done()

    def set_batch_share(self, share: float) -> None:
        """Limits the batch; see `Scheduler.set_batch_share`."""
        self.scheduler.set_batch_share(share)

    def submit(
        self, request: EngineRequest, *, resumed: bool = False
    ) -> Rejected | TokenOutput | None:
        """Admits a request or refuses it; see `Scheduler.submit`."""
        return self.scheduler.submit(request, resumed=resumed)

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admits samples of one prompt, or one beam search for all of them; or refuses them all.

        Waits for their grammar if it is not compiled yet; see `Grammars.compile`.
        """
        if requests[0].beam:
            return self._beams.start(requests, resumed=resumed)
        if requests[0].grammar:
            return self._submit_matched(requests, resumed)
        return self.scheduler.submit_group(requests, resumed=resumed)

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Drop a request; see `Scheduler.cancel`."""
        self.grammars.close(request_id)
        if not self._beams.cancel(request_id):
            self.scheduler.cancel(request_id, is_answered=is_answered)

    def inject_out_of_memory(self, after_steps: int) -> None:
        """Make one step run out of memory when `after_steps` more have been computed."""
        self._faults.append(self.scheduler.stats().num_steps + after_steps)

    def step(self) -> list[TokenOutput]:
        """Compute one step for all sequences that have a part in it.

        Raises:
            MemoryShortError: others hold memory that it needs, for too long.
        """
        if self._short_since is not None and self._clock() < self._retry_at:
            return []
        plan = self._constrained(self.scheduler.schedule())
        outputs = self._committed(self._execute(plan))
        if not plan.chunks:
            self._finish_moves()
        return outputs

    def _committed(self, sampled: list[SampledToken]) -> list[TokenOutput]:
        """Commit the oldest plan in flight; return what clients get of it."""
        outputs = self.scheduler.commit(self._with_token(sampled))
        if timed := self._timed:
            # All but one token of an output are draft tokens that were right.
            num_accepted = sum([len(output.token_ids) - 1 for output in outputs])
            self._throughput.observe(**timed._asdict(), num_accepted=num_accepted)
            self._timed = None
        for output in outputs:
            if output.finish:
                self.grammars.close(output.request_id)
        return self._beams.filter_outputs(outputs)

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests given up since the last call."""
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
        """Return the plan with grammars' masks; gives up requests whose grammar fails."""
        plan, failed = self.grammars.constrain(plan)
        for request_id, reason in failed.items():
            self.scheduler.cancel(request_id)
            self._failed.append(_unmatched(request_id, reason))
        return plan

    def _execute(self, plan: StepPlan) -> list[SampledToken]:
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
                    log.exception("a step failed; computing its %d chunks alone", len(plan.chunks))
                cause = error.with_traceback(None)
                reason = _first_line(error)
            if not is_out_of_memory(cause):
                return self._one_by_one(plan, cause)
            # Outside the handler: the exception's frames keep the step's tensors alive.
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
        """Do a plan's moves once, before it is computed as often as it takes."""
        if plan.moves:
            began = time.perf_counter()
            log.debug("KV is copied between device and host")
            self._runner.move(plan.moves)
            seconds = round(time.perf_counter() - began, 5)
            log.debug("KV was copied between device and host", extra={"seconds": seconds})

    def _finish_moves(self) -> None:
        """Reports copies of plans that computed nothing, when no other plan is in flight."""
        if self.tiers and (kept := self.tiers.take_kept()) != Transfers():
            self._runner.sync()
            self.tiers.finish(kept)

    def _measured(self, plan: StepPlan) -> list[SampledToken]:
        self._raise_fault()
        started = time.perf_counter()
        output = self._runner.execute(plan)
        self._observe(time.perf_counter() - started, [plan])
        return output

    def _observe(self, seconds: float, plans: list[StepPlan]) -> None:
        """Notes the time of a step, in which these plans were computed, and ends the first."""
        if chunks := plans[0].chunks:
            self.scheduler.figures.observe_step(seconds, plans[0].num_tokens, len(chunks))
            if self.events.wants_steps:
                self.events.on_step(plans[0], seconds)
        num_chunks = sum(len(plan.chunks) for plan in plans)
        prompts = [chunk for plan in plans for chunk in plan.prompts]
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in prompts)
        self._timed = _Timed(seconds, num_chunks - len(prompts), num_prompt_tokens)

    def _one_by_one(self, plan: StepPlan, cause: Exception) -> list[SampledToken]:
        """Compute a failed plan's chunks alone and gives up those that fail again.

        Raises:
            Exception: `cause`; every chunk fails, so it is not a request's fault, or a chunk alone
                meets an error that only a new process gets over.
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
        """Return the step's tokens; fail requests that have none, before the step is committed.

        KV of a request whose logits are NaN may be damaged as well, so its cached blocks are
        evicted with it, and all cached blocks if that happens again soon. The same holds for
        requests that were cancelled meanwhile, except that they get no error.
        """
        sampled = self._with_allowed_token(sampled)
        damaged = dict.fromkeys(each.request_id for each in sampled if each.token_id == NO_TOKEN)
        for request_id in damaged:
            is_awaited = self.scheduler.is_awaited(request_id)
            self.scheduler.discard(request_id)
            if not is_awaited:
                log.error("logits are NaN or infinite, of %s, which was cancelled", request_id)
                continue
            log.error("logits are NaN or infinite; failing the request %s", request_id)
            self._give_up(
                request_id,
                "its logits are NaN or infinite, so weights or device may be damaged; send it "
                "again, and if it fails again restart the engine",
            )
        if not damaged:
            return sampled
        self.num_nonfinite_logits += len(damaged)
        num_steps = self.scheduler.stats().num_steps
        if num_steps - self._damaged_at < SUSPICIOUS_STEPS:
            self.scheduler.evict_all()
        self._damaged_at = num_steps
        return [each for each in sampled if each.token_id != NO_TOKEN]

    def _with_allowed_token(self, sampled: list[SampledToken]) -> list[SampledToken]:
        """Return the step's tokens; fail requests that rule out every token."""
        refused = dict.fromkeys(
            each.request_id for each in sampled if each.token_id == NOTHING_ALLOWED
        )
        if not refused:
            return sampled
        for request_id in refused:
            if self.scheduler.is_awaited(request_id):
                self._give_up(
                    request_id,
                    "no token may come next: its grammar (response_format, tools), min_tokens and "
                    "logit_bias together rule out every one; loosen one of them",
                )
        return [each for each in sampled if each.request_id not in refused]

    def _give_up(self, request_id: str, message: str) -> None:
        self.scheduler.cancel(request_id)
        self._failed.append(RequestFailed(request_id=request_id, message=message))

    def _drop_newest(self, reason: str) -> None:
        if self.scheduler.stats().num_running > 1:
            self.scheduler.preempt_newest()
            return
        request_id = self.scheduler.fail_newest()
        assert request_id is not None, "a plan without a running sequence"
        message = f"out of memory although it ran alone: {reason}"
        self._failed.append(RequestFailed(request_id=request_id, message=message))

    def _wait_for_memory(self, reason: str) -> None:
        """Abandon the step for now, since other processes hold memory that it needs."""
        now = self._clock()
        # A shortage of long ago, which ended when its last request was cancelled, does not count.
        if self._short_since is None or now > self._retry_at + _SHORTAGE_S:
            self._short_since = now
            log.warning("other processes hold memory that steps need; they wait: %s", reason)

        if now - self._short_since >= _SHORTAGE_S:
            raise MemoryShortError(
                f"others have held memory that steps need for {_SHORTAGE_S:g} s ({reason}); "
                "end them, or give this engine a GPU of its own"
            )
        self._retry_at = now + _RETRY_S
        self.scheduler.abandon()

    def _raise_fault(self) -> None:
        if not self._faults:
            return
        num_steps = self.scheduler.stats().num_steps
        due = next((step for step in self._faults if step <= num_steps), None)
        if due is not None:
            self._faults.remove(due)
            raise torch.OutOfMemoryError("injected fault")


class _InFlight(NamedTuple):
    plan: StepPlan
    submitted_at: float
    """Time by `time.perf_counter`."""


class PipelinedEngine(EngineCore):
    """Serves requests with a group of pipeline stages, each of which computes another plan.

    Up to `SchedulerLimits.max_in_flight` plans of different sequences are submitted before the
    first result is taken; results are taken in the order of submission. A step that fails on a
    rank ends the group and with it all plans in flight, whose requests another worker resumes.
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
        """Whether there is anything to compute, or to collect of requests cancelled meanwhile."""
        return bool(self._in_flight) or super().has_work

    def step(self) -> list[TokenOutput]:
        """Submits as many plans as may be in flight; commits the oldest."""
        # A step that is to fail is computed alone, as it can then be computed again.
        if self._faults and not self._in_flight:
            return super().step()
        while not self._faults and len(self._in_flight) < self._max_in_flight:
            if not self._submit_next():
                break
        return self._collect_oldest() if self._in_flight else []

    def _submit_next(self) -> bool:
        """Submit the next plan; returns False if there is nothing more to compute now."""
        scheduled = self.scheduler.schedule()
        plan = self._constrained(scheduled)
        self._move(plan)
        if not scheduled.chunks:
            if not self._in_flight:
                self._finish_moves()
            return False
        submitted_at = time.perf_counter()
        # Grammars may have failed all of its chunks: it is in flight for the scheduler even so.
        if plan.chunks:
            self.num_overlapped_steps += any(each.plan.chunks for each in self._in_flight)
            self._stages.submit(plan)
        self._in_flight.append(_InFlight(plan, submitted_at))
        return True

    def _collect_oldest(self) -> list[TokenOutput]:
        oldest = self._in_flight[0]
        sampled = self._stages.collect() if oldest.plan.chunks else []
        # A sequence's next token takes as long as its plan was in flight, and all of them together
        # are the batch that this is the time of.
        seconds = time.perf_counter() - oldest.submitted_at
        self._observe(seconds, [each.plan for each in self._in_flight])
        self._in_flight.popleft()
        return self._committed(sampled)


def _unmatched(request_id: str, reason: str) -> RequestFailed:
    message = f"the grammar cannot be followed: {reason}; simplify it"
    return RequestFailed(request_id=request_id, message=message, field="grammar")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
