"""Carries out admission decisions: shortens prompts, queues requests, reserves memory, or refuses.

For each request, `Admission.admit` gathers the current facts, asks `policy.decide` for the next
step, and executes that step. It repeats this until memory is reserved for the request or the
request is refused.
"""

import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RouterConfig, large_pool
from ullage_common.process.logs import MORE_FIELDS
from ullage_common.wire.continuation import Progress
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.limits import MAX_PRIORITY
from ullage_common.wire.request_fields import client_names
from ullage_router.admission.load_balancer import NO_PREFERENCE, LoadBalancer, Preferred
from ullage_router.admission.prefill_window import PrefillWindow, Reservation
from ullage_router.admission.queue import QueueEntry, RequestQueue, Waiter
from ullage_router.admission.queue_bounds import QueueFull
from ullage_router.call import Call, asked_of_engine, asked_tokens, num_samples
from ullage_router.engines.engines import Engines
from ullage_router.errors import refusal
from ullage_router.policy.affinity import CacheKey
from ullage_router.policy.decide import decide, decide_among, min_output, passes
from ullage_router.policy.decision import Decision
from ullage_router.policy.deferral import NOBODY, DeferralBook, Deferrals, Deferred
from ullage_router.policy.facts import (
    QueueState,
    RequestFacts,
    RoutingPolicy,
    Side,
    TimeLimits,
)
from ullage_router.policy.fair_queue import RESUMED
from ullage_router.policy.next_step import NextStep, Refuse, Run, ShrinkContext, Wait
from ullage_router.prompts.prompts import Prompt
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.prompts.truncate import truncate
from ullage_router.tokenizer.model import PromptError

log = logging.getLogger(__name__)

EMPTY: Mapping[str, int] = MappingProxyType({})
NO_PROGRESS = Progress(inference_pb2.GenerateRequest())


class NotOnCanary(Exception):
    """Raised if no canary engine can currently run the request unmodified.

    A stable engine should run it instead.
    """


@dataclass(slots=True, eq=False)
class AdmissionRequest:
    """A request during admission, with its current prompt, queue entry and preferred engine."""

    call: Call
    progress: Progress = NO_PROGRESS
    """The tokens received so far, if the request resumes an interrupted answer."""
    refused_by: Mapping[str, int] = field(default_factory=dict)
    """Engines that refused the request or failed while serving it, by engine key.

    Each value is the number of headroom reports that the router had received from the engine at
    that time. The engine becomes a candidate again as soon as it sends another report.
    """
    is_trial: bool = False
    """Whether to try only canary engines that have enough free memory right now.

    If no canary engine has room, the request falls back to the stable engines.
    """
    prompt: Prompt = field(init=False)
    """The prompt to send, without any conversation turns that were dropped to shorten it."""
    cache_key: CacheKey = field(init=False)
    preferred: Preferred = NO_PREFERENCE
    """The engine that probably has the prompt's prefix in its KV cache."""
    entry: QueueEntry | None = None
    """The request's place in the queue, or None while the request is not queued."""
    queue_state: QueueState = QueueState.OPEN
    deciding_s: float = 0.0
    """Time spent computing the latest decision, in seconds."""

    def __post_init__(self) -> None:
        self.prompt = self.call.prompt

    @property
    def is_resumed(self) -> bool:
        """Whether the request is an answer that lost its engine, and for which a client waits.

        Such an answer goes on before requests that have not started yet. Requests of the lowest
        priority, such as the lines of batches, give way to all others even then.
        """
        return self.progress.is_accepted and self.call.request.priority > -MAX_PRIORITY

    @property
    def priority(self) -> int:
        """The request's priority in the queue."""
        return RESUMED if self.is_resumed else self.call.request.priority

    def leave_queue(self) -> None:
        """Remove the request from the queue if it is queued."""
        if self.entry:
            self.entry.leave()
            self.entry = None


class Admission:
    """Admits requests to engines.

    Args:
        config: the routing policy and the limits.
        engines: the engines that may serve requests.
        queue: the queue in which requests wait for memory.
        threads: the thread pool that renders shortened conversations.
        balancer: finds the engine that has a request's prefix cached.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        queue: RequestQueue,
        threads: TokenizerThreads,
        balancer: LoadBalancer,
    ) -> None:
        routing = config.routing
        self.policy = RoutingPolicy(
            tuple(pool.name for pool in config.pools),
            routing.large_request_tokens,
            routing.large_request_kv,
            routing.ladder,
            routing.rungs,
            routing.placement.affinity.max_extra_load,
            routing.prefill,
            large_pool(config.pools),
        )

        self.window = PrefillWindow(routing.prefill, engines)
        self._max_output_tokens = config.limits.max_output_tokens
        self._queue_timeout_s = routing.queue.timeout
        self._slo = config.slo

        self._engines = engines
        self._queue = queue
        self._threads = threads
        self._balancer = balancer
        self._deferrals = DeferralBook()

    async def admit(self, request: AdmissionRequest) -> Reservation:
        """Carry out one admission step after another until memory is reserved for the request.

        Raises:
            ServiceError: the request can never fit, does not fit now, or no engine is ready.
            NotOnCanary: a stable engine should take the request.
        """
        request.cache_key = self._cache_key(request)
        try:
            while True:
                match self._decide(request):
                    case Run() as run:
                        return await self._reserve(request, run)
                    case ShrinkContext() as shrink:
                        await self._shrink(request, shrink)
                    case Wait() as wait:
                        await self._wait(request, wait)
                    case Refuse() as refuse:
                        raise self._refusal(request, refuse)
        finally:
            request.leave_queue()

    @property
    def has_engine(self) -> bool:
        """Whether any engine currently accepts requests."""
        return self._engines.is_ready

    def has_stable_engine(self, call: Call) -> bool:
        """Return whether a ready stable engine has the tokenizer, adapter and fields of a call."""
        model = self._engines.model_of(Side.STABLE)
        is_same = model is not None and model.fingerprint == call.prompt.model.fingerprint
        needed = self._needed_fields(call, call.prompt)
        return is_same and self._engines.is_ready_on(Side.STABLE, call.adapter, needed)

    def facts(self, request: AdmissionRequest) -> RequestFacts:
        """Gather the current facts about the request, as input for `decide`."""
        call = request.call
        prompt = request.prompt
        entry = request.entry
        rungs = self.policy.rungs

        asked = asked_tokens(call.request)
        limit = min(
            call.tenant.rules.max_tokens or self._max_output_tokens, self._max_output_tokens
        )
        most = min(asked or limit, limit)
        least = min_output(most if asked else None, most, rungs.shrink_output)
        received = 0
        progress = request.progress
        if progress.has_begun:
            # The rest of an answer needs the whole granted limit, or the answer would be cut short.
            received = progress.longest
            most = least = max(1, min(progress.max_tokens, limit) - received)
        if call.request.embed:
            most = least = 0

        queue = self._queue
        ahead = waiting = passable = claimed = EMPTY
        refused_by = self._still_refusing(request) if request.refused_by else frozenset()
        if len(queue):  # usually nobody waits
            waiting = queue.lengths(RESUMED if request.is_resumed else None)
            if not request.is_trial:
                adapter = self._rare_adapter(call)
                priority = request.priority
                ahead = queue.ahead(priority, entry, adapter)
                passable = queue.passable(entry, adapter, priority)
                claimed = self._engines.claimed(queue.claims(entry, adapter, priority))

        return RequestFacts(
            prompt_tokens=len(prompt.token_ids) + received,
            max_tokens=most,
            min_tokens=least,
            samples=num_samples(call.request.samples),
            has_session=bool(call.request.session_id),
            droppable=not received and prompt.can_shrink(rungs.shrink_context.keep_turns),
            queue=request.queue_state,
            ahead=ahead,
            passable=passable,
            refused_by=refused_by,
            claimed=claimed,
            waiting=waiting,
            patience_s=self._patience_s(request),
            limits=self._limits(request),
            preferred=request.preferred.engine,
            deferrals=self._seen_by(request) if self._deferrals else NOBODY,
            draw=random.getrandbits(30),
        )

    def _patience_s(self, request: AdmissionRequest) -> float:
        """Return how many more seconds the request may wait in the queue.

        The result is infinity for the rest of an answer, since no client would retry that.
        """
        if request.progress.is_accepted:
            return math.inf
        return self._queue_timeout_s - request.call.decisions.latest.queued_s

    def _seen_by(self, request: AdmissionRequest) -> Deferrals:
        """Return what this request must know about recently refused requests.

        The result tells how much memory to leave for retries that take precedence over this
        request, and when all refused requests of a pool will be retried. Refused clients are told
        to retry after a delay. Until then, later requests should not take the memory that a retry
        will need.
        """
        now = time.monotonic()
        self._deferrals.expire(now)

        tenant = request.call.tenant
        return Deferrals(self._deferrals, now, tenant.name, tenant.rules.weight, request.priority)

    def _rare_adapter(self, call: Call) -> str:
        """Return the request's adapter if some engines lack it, or an empty string otherwise.

        Requests for such an adapter wait in a separate subqueue. Otherwise, they would block
        requests behind them that could run on the engines without the adapter.
        """
        return "" if self._engines.have_all(call.adapter) else call.adapter

    def _needed_fields(self, call: Call, prompt: Prompt) -> frozenset[str]:
        """Return the paths of the request's fields that some engines do not know."""
        return self._engines.needed_fields(partial(asked_of_engine, call.request, prompt))

    def _limits(self, request: AdmissionRequest) -> TimeLimits:
        """Return the request's time limits.

        The latency objectives (SLOs) apply only until the answer has started.
        """
        now = time.monotonic()
        deadline = request.call.deadline
        if request.progress.is_accepted:
            return TimeLimits(
                first_token_s=deadline.first_token_at - now, may_delay_others=request.is_resumed
            )
        return TimeLimits(
            self._slo.ttft_p95,
            self._slo.e2e_p95,
            now - request.call.record.arrived - deadline.held_s,
            deadline.first_token_at - now,
            deadline.at - now,
        )

    def _decide(self, request: AdmissionRequest) -> NextStep:
        call = request.call
        began = time.perf_counter()
        request.preferred = self._preferred(request)
        facts = self.facts(request)
        model = request.prompt.model

        # Most requests fit on one of a few sampled engines. The others need all engines.
        draw = facts.draw
        preferred = facts.preferred
        needed = self._needed_fields(call, request.prompt)
        sample = self._engines.sample(model, call.side, draw, preferred, call.adapter, needed)
        step: NextStep | None = decide_among(facts, sample, self.policy)
        if step is None:
            views = self._engines.views(model, call.side, call.adapter, needed)
            step = decide(facts, views, self.policy)
        request.deciding_s = time.perf_counter() - began

        # A canary only takes requests that run unchanged in their home pool.
        if request.is_trial and not (isinstance(step, Run) and step.step == "accept"):
            raise NotOnCanary
        return step

    def _preferred(self, request: AdmissionRequest) -> Preferred:
        """Return the engine that probably has the request's prefix cached.

        For a resumed answer, engines whose results are bit-identical to those of the engines that
        generated the answer so far are preferred instead.
        """
        call = request.call
        preferred = self._balancer.preferred(request.cache_key, call.side)
        fingerprints = request.progress.fingerprints
        if len(fingerprints) != 1:
            return preferred
        refusing = self._still_refusing(request)
        return self._balancer.alike(preferred, fingerprints, call.side, refusing, call.adapter)

    def _passes(self, request: AdmissionRequest) -> bool:
        """Return whether the request can run now by overtaking the head of its subqueue."""
        call = request.call
        model = request.prompt.model
        needed = self._needed_fields(call, request.prompt)
        views = self._engines.views(model, call.side, call.adapter, needed)
        return passes(self.facts(request), views, self.policy)

    def _still_refusing(self, request: AdmissionRequest) -> frozenset[str]:
        """Return the keys of engines that would probably refuse the request again.

        These are the engines that have sent no new report since they refused it.
        """
        engines = ((self._engines.get(key), then) for key, then in request.refused_by.items())
        return frozenset(e.key for e, then in engines if e and e.reports == then)

    def _cache_key(self, request: AdmissionRequest) -> CacheKey:
        call = request.call
        name = call.request.session_id or call.prompt_cache_key
        token_ids = request.prompt.token_ids
        return self._balancer.cache_key(name, token_ids, call.tenant.name, call.adapter)

    async def _reserve(self, request: AdmissionRequest, run: Run) -> Reservation:
        """Reserve memory on the chosen engine, and return the reservation.

        The request leaves the queue. If it may still move to another engine, it may first have to
        wait in the prefill window.
        """
        engine = self._engines.at(run.engine)
        prompt = request.prompt
        available = engine.available

        if len(self._queue) and not request.is_trial:
            self._queue.on_passed(run.pool, request.entry, engine.adapters, request.priority)
        if request.entry and run.pool == request.entry.pool:
            request.entry.serve()

        credit = engine.reserve(run.demand.kv_bytes, len(prompt.token_ids), run.step_limit_s)
        reservation = Reservation(engine, credit, prompt, run.max_tokens, run.choices)
        if run.choices:
            await self.window.settle(reservation)
            if reservation.engine is not engine:
                available = reservation.engine.available + reservation.credit.size

        self._balancer.on_placed(request.cache_key, request.preferred, reservation.engine)
        request.call.decisions.adopt(_accepted(request, run, reservation, available))
        _log_decision(request)
        return reservation

    async def _shrink(self, request: AdmissionRequest, shrink: ShrinkContext) -> None:
        """Try to shorten the prompt by dropping conversation turns, at most once per prompt."""
        call = request.call
        prompt = request.prompt
        call.decisions.change(action="shrink", reason=shrink.reason)
        keep = self.policy.rungs.shrink_context.keep_turns
        most = shrink.prompt_tokens
        request.prompt = replace(prompt, is_spent=True)

        try:
            result = await self._threads.run(
                prompt.weight,
                lambda: truncate(prompt.turns, most, prompt.render, keep),
                call.tenant.name,
            )
        except PromptError:  # the template rejects the remaining turns
            return

        is_short = len(result.token_ids) <= most or shrink.reason == "CONTEXT_TOO_LONG"
        if is_short and len(result.token_ids) >= shrink.fewest:
            turns = tuple(result.turns)
            request.prompt = replace(request.prompt, token_ids=result.token_ids, turns=turns)
            request.cache_key = self._cache_key(request)
            degraded = (*call.decisions.latest.degraded, *result.degraded)
            call.decisions.add_step("shrinkContext", shrink.reason, degraded=degraded)
        _log_decision(request)

    async def _wait(self, request: AdmissionRequest, wait: Wait) -> None:
        """Wait for the request's turn in the queue while its answer can still meet its deadline.

        If the wait ends early, `queue_state` records the reason. The wait also ends when the
        decision is to be reviewed. The request then keeps its place.
        """
        call = request.call
        started = time.monotonic()
        queued_s = call.decisions.latest.queued_s
        try:
            entry = self._join(request, wait)
        except QueueFull:
            request.queue_state = QueueState.FULL
            return

        allowed_s = self._queue_timeout_s - queued_s
        if request.progress.is_accepted:
            allowed_s = call.deadline.first_token_remaining_s

        try:
            if entry.is_head:
                self._queue.wake_followers(entry, wait.available)
            until = started + min(allowed_s, wait.longest_s, wait.review_s)
            while await entry.wait_turn(until - time.monotonic()):
                if entry.is_evicted:
                    request.queue_state = QueueState.FULL
                if entry.is_evicted or entry.is_head or self._passes(request):
                    break
            else:
                if wait.review_s < min(allowed_s, wait.longest_s):
                    return
                is_late = wait.longest_s < allowed_s
                request.queue_state = QueueState.LATE if is_late else QueueState.SPENT
        finally:
            waited_s = time.monotonic() - started
            call.decisions.change(queued_s=queued_s + waited_s)
            call.record.note_queued(waited_s, wait.pool)

    def _join(self, request: AdmissionRequest, wait: Wait) -> QueueEntry:
        """Return the request's queue entry, after joining the right subqueue if necessary.

        A request that is already in the right subqueue keeps its place.
        """
        adapter = self._rare_adapter(request.call)
        if request.entry and request.entry.line == (wait.pool, adapter):
            return request.entry

        request.leave_queue()
        request.entry = self._queue.join(wait.pool, _waiter(request, wait, adapter))
        request.call.decisions.add_step(
            "queue",
            wait.reason,
            action="queue",
            reason=wait.reason,
            pool=wait.pool,
            route=self._engines.route(wait.pool),
            predicted_bytes=wait.demand.kv_bytes,
            available_bytes=wait.available,
        )
        _log_decision(request)
        return request.entry

    def _refusal(self, request: AdmissionRequest, refuse: Refuse) -> ServiceError:
        """Record the refusal of a request, and return the error for the client."""
        call = request.call
        demand = refuse.demand
        if call.adapter and refuse.reason == "NO_ENGINE":
            # If the adapter was removed in the meantime, this raises another error.
            self._engines.adapter_of(call.adapter, call.tenant.rules.models)
            message = f"no engine with adapter {call.adapter!r} is ready; retry when one is"
            refuse = replace(refuse, message=message)
        if refuse.reason == "NO_ENGINE":
            refuse = self._name_unknown_fields(request, refuse)

        call.decisions.add_step(
            "reject",
            refuse.reason,
            action="reject",
            reason=refuse.reason,
            pool=refuse.pool,
            route=self._engines.route(refuse.pool),
            prompt_tokens=len(request.prompt.token_ids),
            predicted_bytes=demand.kv_bytes if demand else call.decisions.latest.predicted_bytes,
            available_bytes=refuse.available if demand else None,
        )
        _log_decision(request, logging.WARNING if refuse.kind == "unavailable" else logging.INFO)
        # A resumed answer is tried again in any case. No client returns for it.
        if refuse.kind == "busy" and not (call.hands_on or request.progress.is_accepted):
            self._defer(call, refuse)
        return refusal(refuse)

    def _name_unknown_fields(self, request: AdmissionRequest, refuse: Refuse) -> Refuse:
        """Return the refusal with the request's fields in it if engines were left out for them."""
        needed = self._needed_fields(request.call, request.prompt)
        if not needed:
            return refuse
        unknown = self._engines.unknown_to_all(needed)
        if not unknown or request.progress.has_begun:
            message = f"no engine that knows {client_names(needed)} is ready; retry when one is"
            return replace(refuse, message=message)
        names = client_names(unknown)
        message = (
            f"the engines of this service are older than its router and do not know {names}; "
            "leave it out, or upgrade the engines"
        )
        return replace(
            refuse,
            kind="invalid",
            reason="FIELD_NOT_SUPPORTED",
            message=message,
            field=names.partition(",")[0],
            retry_after_s=None,
        )

    def _defer(self, call: Call, refuse: Refuse) -> None:
        """Remember a refused request, so that later requests leave memory for its retry.

        The memory stays set aside until the request's Retry-After expires.
        """
        assert refuse.demand
        assert refuse.retry_after_s
        kind = Deferred(refuse.pool, call.tenant.name, call.request.priority)
        due = time.monotonic() + refuse.retry_after_s
        self._deferrals.add(kind, call.tenant.rules.weight, refuse.demand.kv_bytes, due)


def _waiter(request: AdmissionRequest, wait: Wait, adapter: str) -> Waiter:
    call = request.call
    return Waiter(
        size=wait.demand.kv_bytes,
        arrival=call.record.arrived,
        deadline=call.deadline.first_token_at,
        prompt_bytes=request.prompt.memory_bytes,
        priority=request.priority,
        tenant=call.tenant.name,
        weight=call.tenant.rules.weight,
        is_charged=bool(request.refused_by),
        adapter=adapter,
    )


def _accepted(
    request: AdmissionRequest, run: Run, reservation: Reservation, available: int
) -> Decision:
    """Return the decision to log for an accepted request.

    The decision's action names the fallback that was needed (`route4`, `queue` or `shrink`). If
    none was needed, the action is `accept`.

    Args:
        available: bytes that were available on the engine.
    """
    before = request.call.decisions.latest
    degraded = before.degraded
    # An answer that another engine continues needs the rest of its tokens alone.
    asked = 0 if request.progress.has_begun else asked_tokens(request.call.request)
    if run.is_shrunk or (asked and run.max_tokens < asked):
        degraded = (*degraded, f"max_tokens={run.max_tokens}")

    action = "route4" if run.action == "route4" else "queue" if before.queued_s else ""
    return replace(
        before,
        action=action or ("shrink" if degraded else "accept"),
        pool=run.pool,
        route=reservation.engine.route,
        reason=run.reason,
        engine=reservation.engine.id,
        side=reservation.engine.side.value,
        prompt_tokens=reservation.credit.tokens,
        predicted_bytes=reservation.credit.size,
        available_bytes=available,
        degraded=degraded,
        trail=before.next_trail(run.step, run.reason),
    )


def _log_decision(request: AdmissionRequest, level: int = logging.INFO) -> None:
    """Record the request's decision in its timeline and in the log.

    Most requests are accepted immediately. Such decisions are logged only at DEBUG, because the log
    line at the end of each request includes the same timeline.
    """
    record = request.call.record
    decision = request.call.decisions.latest
    fields: dict[str, object] = {
        "pred_kv_mb": decision.predicted_mib,
        "admission_action": decision.action,
        "route": decision.route,
        "reason": decision.reason,
        "needed_bytes": decision.predicted_bytes,
        "available_bytes": decision.available_bytes,
        "engine": decision.engine,
    }

    record.note("decided", request.deciding_s, **fields)
    if decision.action == "accept":
        level = logging.DEBUG
    if log.isEnabledFor(level):
        own = {"request_id": record.request_id, "event": "decided"}
        more = fields | {"degraded": list(decision.degraded)}
        log.log(level, "decided", extra={MORE_FIELDS: own | more})
