"""Tracing with OpenTelemetry's SDK, which exports spans to a collector over OTLP.

Without a `TracingSection`, there is no tracer, OpenTelemetry is not imported, and requests have no
extra cost. With a `TracingSection`, most spans are created from recorded times after a request has
ended, so that no request waits for tracing. Spans wait in a bounded queue until a thread sends
them. If the collector is slow or absent, spans are lost and one line is logged, but requests are
not affected.

The names of spans and attributes follow OpenTelemetry's conventions for generative AI
(semantic-conventions-genai, in development; `gen_ai.*` as of July 2026) and W3C's trace context
(https://www.w3.org/TR/trace-context/).
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ullage_common import version
from ullage_common.process.config_file import ConfigError, Percent, Strict, Text

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

# Attributes that routers and engines write.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
ERROR_TYPE = "error.type"
STATUS = "http.response.status_code"
REQUEST_ID = "ullage.request_id"

SpanKind = Literal["internal", "server", "client"]
Value = str | bool | int | float | Sequence[str]

MAX_VALUE = 1024
"""Maximum characters in an attribute, because clients may choose its text. The rest is cut off."""
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
"""Maximum seconds to wait at process exit for the queued spans to be sent."""

log = logging.getLogger(__name__)


def known_values(fields: Mapping[str, object]) -> dict[str, Value]:
    """Return only the fields whose values OpenTelemetry accepts as attributes."""
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, str | bool | int | float | list)
    }


class TracingSection(Strict, frozen=True, kw_only=True):
    """Settings for trace sampling and for the collector that receives the spans."""

    endpoint: Text
    """URL of the collector, such as http://collector:4317."""
    protocol: Literal["grpc", "http"] = "grpc"
    """OTLP over gRPC (usually port 4317), or over HTTP (usually port 4318)."""
    sample_percent: Percent = 100.0
    """Percentage of the traces started by this process that are sampled.

    If a client has started the trace, the client's `traceparent` decides.
    """

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"tracing.endpoint: {self.endpoint!r} is not a URL; write http://HOST:PORT or https"
            )


class Span:
    """A span that has started. Its methods do nothing if its trace is not sampled."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: "Tracer", span: Any) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def is_recording(self) -> bool:
        """Whether the span is sampled and has not ended, so that attributes are worth computing."""
        return bool(self._span.is_recording())

    @property
    def trace_id(self) -> str:
        """The trace's id, as in a `traceparent` header."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The W3C `traceparent` header that makes this span the parent of another span."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that let another process continue the trace."""
        parent = ("traceparent", self.traceparent)
        state = self._span.get_span_context().trace_state.to_header()
        return (parent, ("tracestate", state)) if state else (parent,)

    def child(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        start_unix_s: float | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> "Span":
        """Start a child of this span (see `Tracer.span`)."""
        return self._tracer.span(
            name, parent=self, kind=kind, start_unix_s=start_unix_s, attributes=attributes
        )

    def rename(self, name: str) -> None:
        """Change the span's name, for example if the final name is known only at the end."""
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Set attributes on the span, overwriting those with the same names."""
        self._span.set_attributes(attributes)

    def event(
        self,
        name: str,
        attributes: Mapping[str, Value] | None = None,
        at_unix_s: float | None = None,
    ) -> None:
        """Add an event to the span, by default at the current time."""
        self._span.add_event(name, attributes, _nanoseconds(at_unix_s))

    def end(self, at_unix_s: float | None = None, error: str = "") -> None:
        """End the span.

        Args:
            at_unix_s: Unix time of the end, or None for now.
            error: kind of the failure (empty for none).
        """
        if error and self._span.is_recording():
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(at_unix_s))


class Tracer:
    """Creates the spans of one process."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ullage")
        self._extract = TraceContextTextMapPropagator().extract
        self._in_context = trace.set_span_in_context
        self._no_parent = trace.set_span_in_context(trace.INVALID_SPAN)
        self._kinds = {
            kind: trace.SpanKind[kind.upper()] for kind in ("internal", "server", "client")
        }

    def span(
        self,
        name: str,
        *,
        parent: "Span | Sequence[tuple[str, str]] | str | None" = None,
        kind: SpanKind = "internal",
        start_unix_s: float | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """Start a span.

        Args:
            parent: a span of this process, the `traceparent` of another process, or headers with
                `traceparent` and `tracestate`. Without a valid parent, a new trace starts.
            start_unix_s: Unix time of the start, or None for now.
        """
        return Span(
            self,
            self._tracer.start_span(
                name,
                context=self._context(parent),
                kind=self._kinds[kind],
                attributes=attributes,
                start_time=_nanoseconds(start_unix_s),
            ),
        )

    def _context(self, parent: "Span | Sequence[tuple[str, str]] | str | None") -> Any:
        if isinstance(parent, Span):
            return self._in_context(parent._span)
        if not parent:
            return self._no_parent
        headers = {"traceparent": parent} if isinstance(parent, str) else dict(parent)
        return self._extract(headers, self._no_parent)

    def close(self, within_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the queued spans, and give up after `within_s` seconds."""
        # The SDK may wait for a collector for longer than its own time limits.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(within_s)


def start_tracing(
    section: TracingSection | None, service_name: str, attributes: Mapping[str, str] | None = None
) -> Tracer | None:
    """Start tracing this process. Return the tracer, or None if no collector is configured.

    Environment variables may extend the settings: OTEL_RESOURCE_ATTRIBUTES adds attributes, and
    OTEL_EXPORTER_OTLP_HEADERS adds headers for the collector.

    Args:
        attributes: attributes of the process, for example `service.instance.id`.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if section is None:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        exporter = _exporter(section)
    except ImportError as error:
        raise ConfigError(
            f"tracing: {error.name} is not installed; install ullage with its dependencies, or "
            "leave tracing out"
        ) from error
    _silence_libraries()
    own = {"service.name": service_name, "service.version": version(), **(attributes or {})}
    provider = TracerProvider(
        resource=Resource.create(own),
        sampler=ParentBased(TraceIdRatioBased(section.sample_percent / 100)),
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_attribute_length=MAX_VALUE, max_span_attribute_length=MAX_VALUE),
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            _watched(exporter, section.endpoint),
            schedule_delay_millis=1000,
            export_timeout_millis=1000 * EXPORT_TIMEOUT_S,
        )
    )
    return Tracer(provider)


def _exporter(section: TracingSection) -> "SpanExporter":
    if section.protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as OverHTTP,
        )

        has_path = urlsplit(section.endpoint).path.strip("/")
        url = section.endpoint if has_path else f"{section.endpoint.rstrip('/')}/v1/traces"
        return OverHTTP(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGRPC

    return OverGRPC(endpoint=section.endpoint, timeout=int(EXPORT_TIMEOUT_S))


def _watched(exporter: "SpanExporter", endpoint: str) -> "SpanExporter":
    """Wrap an exporter to log once when the collector is lost and once when it recovers."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Watched(SpanExporter):
        is_lost = False

        def export(self, spans: Any) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception:  # no failure of tracing may affect requests
                result = SpanExportResult.FAILURE
            is_lost = result is not SpanExportResult.SUCCESS
            if is_lost is not self.is_lost:
                self.is_lost = is_lost
                if is_lost:
                    log.warning("no spans reach the collector", extra={"endpoint": endpoint})
                else:
                    log.info("spans reach the collector again", extra={"endpoint": endpoint})
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Watched()


def _silence_libraries() -> None:
    """Silence the exporters' own loggers, which log every failed attempt.

    The exporter from `_watched` logs each outage only once.
    """
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def _nanoseconds(unix_s: float | None) -> int | None:
    return None if unix_s is None else int(unix_s * 1e9)
