"""Creates the trace spans of each request.

A request's span is opened when the request arrives, so that engines can continue the same trace.
Most child spans are created from the record's timeline once the request has ended. Only the spans
for RPCs to engines are created earlier. No span contains prompts or answers.
"""

import re
from collections.abc import Mapping, Sequence

from ullage.inference.v1 import inference_pb2
from ullage_common.process import tracing
from ullage_common.process.tracing import Span, Tracer, Value, known_values
from ullage_router.telemetry.record import Moment, RequestRecord

PROVIDER = "ullage"
MAX_TRACESTATE = 512
"""Length in characters of the longest tracestate to propagate, the W3C specification's minimum."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE = re.compile(r"[ -~]+")
_SPANS = {"tokenised": "tokenise", "decided": "decide", "queued": "queue", "resumed": "resume"}
"""Span names by timeline event. Events without a name get no span of their own."""


def trace_context(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a caller's traceparent and tracestate as gRPC metadata, dropping malformed values.

    The format is specified in https://www.w3.org/TR/trace-context/.
    """
    parent = headers.get("traceparent", "")
    state = headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return ()
    if len(state) > MAX_TRACESTATE or not _PRINTABLE.fullmatch(state):
        return (("traceparent", parent),)
    return (("traceparent", parent), ("tracestate", state))


def begin_span(
    tracer: Tracer,
    record: RequestRecord,
    parent: Sequence[tuple[str, str]],
    request: inference_pb2.GenerateRequest | None = None,
) -> Span:
    """Start a request's span, backdated to the request's arrival, and record its trace's id.

    Args:
        parent: the client's trace context. If it is empty, the span starts a new trace.
        request: the client's request, or None if it could not be parsed.
    """
    span = tracer.span("request", parent=parent, kind="server", start_unix_s=record.arrived_unix)
    if span.is_recording:
        record.trace_id = span.trace_id
        span.set({tracing.REQUEST_ID: record.request_id, tracing.PROVIDER: PROVIDER})
        if request is not None:
            span.set(_asked(request))
    return span


def end_span(
    span: Span, record: RequestRecord, request: inference_pb2.GenerateRequest | None = None
) -> None:
    """Add the record's child spans and attributes to a request's span, and end the span."""
    if span.is_recording:
        for moment in record.timeline:
            _add(span, moment)
        span.set(_outcome(record))
        if request is not None:
            span.rename(f"{_operation(request)} {record.decision.model}".rstrip())
    is_failed = record.status >= 400
    span.end(record.arrived_unix + record.duration_s, error=record.error if is_failed else "")


def _asked(request: inference_pb2.GenerateRequest) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        tracing.OPERATION: _operation(request),
        tracing.REQUEST_MODEL: request.model,
    }
    if request.stop.HasField("max_tokens"):
        attributes[tracing.MAX_TOKENS] = request.stop.max_tokens
    sampling = request.sampling
    for name, field in ((tracing.TEMPERATURE, "temperature"), (tracing.TOP_P, "top_p")):
        if sampling.HasField(field):
            attributes[name] = getattr(sampling, field)
    return attributes


def _operation(request: inference_pb2.GenerateRequest) -> str:
    if request.embed:
        return "embeddings"
    return "chat" if request.WhichOneof("input") == "messages" else "text_completion"


def _add(span: Span, moment: Moment) -> None:
    attributes = known_values(moment.fields)
    began = moment.at_s - moment.seconds
    if moment.event == "decided" or moment.event not in _SPANS:
        span.event(moment.event, attributes, moment.at_s)
    if name := _SPANS.get(moment.event):
        child = span.child(name, start_unix_s=began, attributes=attributes)
        child.end(moment.at_s)


def _outcome(record: RequestRecord) -> dict[str, Value]:
    decision = record.decision
    return known_values(
        {
            tracing.RESPONSE_MODEL: decision.model or None,
            tracing.STATUS: record.status,
            tracing.INPUT_TOKENS: decision.prompt_tokens or None,
            tracing.OUTPUT_TOKENS: record.output_tokens,
            tracing.CACHED_TOKENS: sum(each.num_tokens for each in record.cached),
            tracing.FINISH_REASONS: [record.finish] if record.finish else None,
            tracing.FIRST_CHUNK_S: record.ttft_s,
            "pred_kv_mb": decision.predicted_mib,
            "admission_action": decision.action,
            "route": decision.route,
            "reason": decision.reason,
            "needed_bytes": decision.predicted_bytes,
            "available_bytes": decision.available_bytes,
            "ullage.pool": decision.pool or None,
            "ullage.engine": decision.engine or None,
            "ullage.degraded": list(decision.degraded) or None,
            "ullage.trail": list(decision.trail) or None,
            "ullage.tenant": record.tenant or None,
            "ullage.coalesced_with": decision.coalesced_with or None,
        }
    )
