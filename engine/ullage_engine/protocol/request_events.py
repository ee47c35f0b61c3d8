"""Log lines and trace spans for request events, in the engine's server and worker.

Both processes log the client's request id, so that their log lines can be correlated with the
router's. The server creates a span for each RPC to its service. Only the worker knows when tokens
are computed, so it creates the inner spans (queue, prefill and decode) as each phase ends. If
a worker is killed, its open spans are lost, and the server's span records that another worker
resumed the request. Log lines and spans never contain prompts or answers.

Each worker has its own tracer, which sends spans from a single thread. Otherwise, the worker would
have to send a message to the server for each span, even if tracing is off.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ullage_common.process import tracing
from ullage_common.process.logs import MORE_FIELDS
from ullage_common.process.tracing import Span, Tracer, Value, known_values
from ullage_engine.protocol.requests import EngineRequest, TokenOutput
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.protocol.timeline import Timeline

MAX_CHUNKS = 64
"""Maximum number of prompt chunks that a span records as events. Further chunks are omitted."""

# Fields of log lines that are attributes of the call's span under OpenTelemetry's names.
_NAMES = {
    "prompt_tokens": tracing.INPUT_TOKENS,
    "output_tokens": tracing.OUTPUT_TOKENS,
    "max_tokens": tracing.MAX_TOKENS,
}

server_log = logging.getLogger("ullage.engine.requests")
log = logging.getLogger("ullage.engine.worker.requests")


def _log(logger: logging.Logger, request_id: str, event: str, fields: Mapping[str, object]) -> None:
    if logger.isEnabledFor(logging.INFO):
        own = {"request_id": request_id, "event": event}
        logger.info(event, extra={MORE_FIELDS: {**own, **fields}})


class ServedRequest:
    """One RPC to the engine's service, logged and traced as a span.

    Args:
        tracer: the server's tracer, or None if tracing is off.
        client_id: the client's request id, for the logs.
        metadata: the RPC's metadata, which may contain the client's trace context.
        attributes: attributes of the span.
    """

    def __init__(
        self,
        tracer: Tracer | None,
        client_id: str,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        self.client_id = client_id
        self._span: Span | None = None
        self._began = time.monotonic()
        if tracer:
            trace = [(k, v) for k, v in metadata if isinstance(v, str) and k.startswith("trace")]
            self._span = tracer.span("generate", parent=trace, kind="server", attributes=attributes)
            self._span.set({tracing.REQUEST_ID: client_id})

    @property
    def traceparent(self) -> str:
        """Trace context for the worker's spans, or "" if the request is not traced."""
        return self._span.traceparent if self._span and self._span.is_recording else ""

    @property
    def seconds(self) -> float:
        """Return the seconds since the RPC began, rounded for display."""
        return round(time.monotonic() - self._began, 4)

    def happened(self, event: str, **fields: object) -> None:
        """Log a request event, and add it to the span."""
        _log(server_log, self.client_id, event, fields)
        if self._span:
            values = known_values(fields)
            self._span.event(event, values)
            self._span.set({_NAMES[name]: values[name] for name in _NAMES.keys() & values.keys()})

    def loaded(self, tier: str, num_tokens: int, seconds: float) -> None:
        """Add a span for loading KV from `tier`, which just ended and took `seconds` seconds."""
        if self._span and self._span.is_recording:
            attributes: dict[str, Value] = {"ullage.kv.tier": tier, "ullage.kv.tokens": num_tokens}
            now = time.time()
            child = self._span.child("kv load", start_unix_s=now - seconds, attributes=attributes)
            child.end(now)

    def end(self, event: str, fields: Mapping[str, object], *, error: str = "") -> None:
        """Log the end of the request and end the span.

        Args:
            event: name of the event.
            fields: fields of the log line.
            error: kind of the failure, or "" if there was none.
        """
        _log(server_log, self.client_id, event, {**fields, "reason": error} if error else fields)
        if self._span:
            self._span.set(known_values({_NAMES.get(name, name): v for name, v in fields.items()}))
            self._span.end(error=error)


@dataclass(slots=True)
class _Computed:
    """Tracks the current phase of one request in the worker, for logs and traces.

    A request goes through the phases queue, prefill and decode.
    """

    request: EngineRequest
    since: float
    """Unix time at which the phase began."""
    phase: str = "queue"
    is_again: bool = False
    """Whether the phase is being repeated because the request was preempted."""
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """Unix time and number of tokens of each prompt chunk."""


class RequestEvents:
    """Logs and traces the requests that a worker processes.

    Both engines (native and vLLM) and their schedulers report every state transition of a request.
    """

    def __init__(self) -> None:
        self.requests: dict[str, _Computed] = {}
        """Active requests by id."""
        self._tracer: Tracer | None = None
        self._timeline: Timeline | None = None
        self._num_preemptions = 0
        self._is_debugging = log.isEnabledFor(logging.DEBUG)
        self.wants_steps = self._is_debugging
        """Whether callers must call `on_step` after each step."""
        self.about: Mapping[str, object] = {}
        """Facts about the worker, such as its limits, that are written into every timeline."""

    def trace_to(self, tracer: Tracer) -> None:
        """Start creating spans."""
        self._tracer = tracer
        self.wants_steps = True

    def record_to(self, timeline: Timeline | None) -> None:
        """Start recording steps and phases in a timeline.

        If `timeline` is None, add the phases that are still open to the previous timeline and stop
        recording.
        """
        if timeline is None:
            for request_id, computed in self.requests.items():
                self._record(request_id, computed, time.time(), {})
        if timeline is not None:
            timeline.about = self.about
        self._timeline = timeline
        self.wants_steps = bool(timeline or self._tracer or self._is_debugging)

    def on_admitted(self, request: EngineRequest) -> None:
        """Record that a request was admitted and is waiting to start."""
        since = time.time()
        if request.accepted_at:
            since -= time.monotonic() - request.accepted_at
        self.requests[request.request_id] = _Computed(request, since)
        self._say(request, "admitted", prompt_tokens=request.num_prompt_tokens)

    def on_started(self, request: EngineRequest, num_cached: int, ago_s: float = 0.0) -> None:
        """Record that a request starts prefilling, for the first time or after a preemption.

        Args:
            request: the request.
            num_cached: number of tokens whose KV was cached.
            ago_s: how many seconds ago the prefill started.
        """
        computed = self.requests.get(request.request_id)
        if computed is None:
            # A beam of a search. Events are recorded of the search's requests alone.
            return

        is_again = computed.is_again
        event = "resumed" if is_again else "first_chunk"
        self._say(request, event, cached_tokens=num_cached, tokens=len(request.token_ids))
        self._enter(request.request_id, "prefill", is_again=is_again, ago_s=ago_s)

    def on_preempted(self, request: EngineRequest, count: int, is_swapped: bool) -> None:
        """Record that a running request was preempted to free its memory for another request.

        Args:
            request: the request.
            count: how often the request has been preempted.
            is_swapped: whether the request's KV was copied to host memory. If not, the KV is
                recomputed.
        """
        self._num_preemptions += 1
        total = self._num_preemptions
        mode = "swap" if is_swapped else "recompute"
        self._say(request, "preempted", mode=mode, preemptions=count, preemptions_of_all=total)
        self._enter(request.request_id, "queue", is_again=True, ended="preempted")

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a completed step and its prompt chunks. Call this only if `wants_steps` is set."""
        now = time.time()
        prompts = 0
        num_prompt_tokens = 0
        prompt_context = 0.0

        for chunk in plan.chunks:
            computed = self.requests.get(chunk.request_id)
            if computed is None or computed.phase != "prefill":
                continue
            if chunk.is_decode and chunk.start >= computed.request.num_prompt_tokens:
                # Its prefill ended in a step that was not recorded.
                self.on_prefilled(chunk.request_id)
                continue

            prompts += 1
            count = len(chunk.token_ids)
            num_prompt_tokens += count
            prompt_context += count * (chunk.start + count / 2)
            if len(computed.chunks) < MAX_CHUNKS:
                computed.chunks.append((now, len(chunk.token_ids)))
            if chunk.sampling is not None:
                self.on_prefilled(chunk.request_id)

        if self._timeline or self._is_debugging:
            ids = [self._client_id(chunk.request_id) for chunk in plan.chunks]
            context = sum(chunk.start for chunk in plan.chunks if chunk.is_decode)
            more = {
                "decodes": len(plan.chunks) - prompts,
                "decode_context": context,
                "prompt_context": prompt_context,
                "request_ids": ids,
            }
            self.note_step(seconds, len(plan.chunks), plan.num_tokens, num_prompt_tokens, **more)

    def note_step(
        self, seconds: float, sequences: int, tokens: int, prompt_tokens: int, **more: object
    ) -> None:
        """Add a completed step to the timeline and, at debug level, to the log."""
        if not (self._timeline or self._is_debugging):
            return
        fields = {"sequences": sequences, "tokens": tokens, "prompt_tokens": prompt_tokens, **more}
        if self._timeline:
            self._timeline.add_step(time.time(), seconds, fields)
        if self._is_debugging:
            log.debug("step", extra={MORE_FIELDS: fields | {"seconds": round(seconds, 5)}})

    def on_prefilled(self, request_id: str) -> None:
        """Record that a request has finished prefilling."""
        self._enter(request_id, "decode")

    def on_outputs(self, outputs: Sequence[TokenOutput]) -> None:
        """Record which requests finish with a step's outputs, and forget these requests."""
        for output in outputs:
            if output.finish and (computed := self.requests.get(output.request_id)):
                preemptions = output.num_preemptions
                self._say(
                    computed.request, "finished", finish=output.finish, preemptions=preemptions
                )
                self._drop(output.request_id, output.finish)

    def forget(self, request_id: str, ended: str = "cancelled") -> None:
        """Drop a request that ended without finishing, for example because it was cancelled."""
        if computed := self.requests.get(request_id):
            self._say(computed.request, "finished", finish=ended)
            self._drop(request_id, ended)

    def _drop(self, request_id: str, ended: str) -> None:
        self._enter(request_id, "", ended=ended)
        del self.requests[request_id]

    def _say(self, request: EngineRequest, event: str, **fields: object) -> None:
        _log(log, request.client_id or request.request_id, event, fields)

    def _client_id(self, request_id: str) -> str:
        computed = self.requests.get(request_id)
        return (computed and computed.request.client_id) or request_id

    def _enter(
        self,
        request_id: str,
        phase: str,
        *,
        is_again: bool = False,
        ended: str = "",
        ago_s: float = 0.0,
    ) -> None:
        """Start a request's next phase, after tracing and recording the phase that has ended."""
        computed = self.requests.get(request_id)
        if computed is None:
            return

        request = computed.request
        now = max(computed.since, time.time() - ago_s)
        if self._tracer and request.traceparent:
            attributes: dict[str, Value] = {"ullage.again": True} if computed.is_again else {}
            if ended:
                attributes["ullage.ended"] = ended
            span = self._tracer.span(
                computed.phase,
                parent=request.traceparent,
                start_unix_s=computed.since,
                attributes=attributes,
            )
            for at, num_tokens in computed.chunks:
                span.event("chunk", {"tokens": num_tokens}, at)
            span.end(now)

        self._record(request_id, computed, now, {"ended": ended} if ended else {})

        computed.phase = phase
        computed.since = now
        computed.is_again = is_again
        computed.chunks.clear()

    def _record(
        self, request_id: str, computed: _Computed, now: float, fields: dict[str, object]
    ) -> None:
        """Add a request's current phase to the timeline, if one is being recorded."""
        if self._timeline:
            name = self._client_id(request_id)
            request = computed.request
            chunks = [num_tokens for _, num_tokens in computed.chunks]
            more = {"prompt_tokens": request.num_prompt_tokens, **fields}
            own = more | {"chunks": chunks} if chunks else more
            phase = computed.phase
            self._timeline.add_phase(request_id, name, phase, computed.since, now, own)
