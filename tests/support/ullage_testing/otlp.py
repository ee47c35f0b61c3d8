"""A collector that keeps the spans it gets by OTLP, over gRPC and HTTP."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

WITHIN_S = 30.0


class ReceivedSpan(NamedTuple):
    """A span as a collector sees it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it is a root."""
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    instance: str = ""
    """`service.instance.id` of the process."""


class OtlpReceiver(rpc.TraceServiceServicer):
    """Listens on loopback between `start` and `stop`, or within a `with` block.

    grpc_endpoint, http_endpoint
        URLs for `tracing.endpoint`
    """

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._has_more = threading.Condition()
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        rpc.add_TraceServiceServicer_to_server(self, self._grpc)
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._serving = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    def __enter__(self) -> "OtlpReceiver":
        self._grpc.start()
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(None).wait()
        self._http.shutdown()
        self._serving.join()
        self._http.server_close()

    def Export(self, request: Any, context: Any) -> Any:
        self.take(request)
        return pb.ExportTraceServiceResponse()

    def take(self, request: Any) -> None:
        with self._has_more:
            for resource in request.resource_spans:
                process = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [_received(process, span) for span in scope.spans]
            self._has_more.notify_all()

    def wait(self, is_enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Return all spans as soon as there are enough. Fail if there never are."""
        until = time.monotonic() + WITHIN_S
        with self._has_more:
            while not is_enough(self._spans):
                left = until - time.monotonic()
                assert left > 0, f"only {[(s.service, s.name) for s in self._spans]}"
                self._has_more.wait(left)
            return list(self._spans)


def _handler(receiver: OtlpReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_known = self.path == "/v1/traces"
            if is_known:
                receiver.take(pb.ExportTraceServiceRequest.FromString(body))
            answer = pb.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if is_known else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _received(process: dict[str, Any], span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        process.get("service.name", ""),
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _attributes(span.attributes),
        [(event.name, _attributes(event.attributes)) for event in span.events],
        span.status.code == 2,
        process.get("service.instance.id", ""),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
