"""Spans reach a real collector over both of OTLP's ways, and cost nothing where there is none."""

import logging
import socket
import subprocess
import sys

import msgspec
import pytest
from ullage_testing.otlp import OtlpReceiver

from ullage_common.process.tracing import (
    ERROR_TYPE,
    Span,
    Tracer,
    TracingSection,
    start_tracing,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SERVER = 2
CLIENT = 3


def traced(section: TracingSection) -> Tracer:
    tracer = start_tracing(section, "ullage-test", {"service.instance.id": "a"})
    assert tracer
    return tracer


def test_spans_arrive_over_grpc_and_http() -> None:
    with OtlpReceiver() as receiver:
        sections = [
            TracingSection(endpoint=receiver.grpc_endpoint),
            TracingSection(endpoint=receiver.http_endpoint, protocol="http"),
        ]
        for section in sections:
            tracer = traced(section)
            state = (("traceparent", PARENT), ("tracestate", "vendor=1"))
            root = tracer.span("root", parent=state, kind="server", start_unix_s=100.0)
            child = tracer.span("child", parent=root, kind="client", start_unix_s=101.0)
            child.set({"long": "x" * 100_000})
            child.set({"tokens": 7, "route": "tp2pp2", "reasons": ["stop"]})
            child.event("decided", {"fits": True}, at_unix_s=101.5)
            child.end(102.0)
            root.end(103.0, error="KV_HEADROOM")
            tracer.close()
            assert root.metadata == (
                ("traceparent", root.traceparent),
                ("tracestate", "vendor=1"),
            )
        spans = receiver.wait(lambda spans: len(spans) == 4)
    for first, second in (spans[:2], spans[2:]):
        child = first
        root = second
        assert (root.service, root.name, root.kind) == ("ullage-test", "root", SERVER)
        assert (root.trace_id, root.parent_id) == (TRACE, "b7ad6b7169203331")
        assert (root.start_s, root.end_s) == (100.0, 103.0)
        assert root.is_error
        assert root.attributes[ERROR_TYPE] == "KV_HEADROOM"
        assert (child.trace_id, child.parent_id, child.kind) == (TRACE, root.span_id, CLIENT)
        assert len(child.attributes.pop("long")) == 1024
        assert child.attributes == {"tokens": 7, "route": "tp2pp2", "reasons": ["stop"]}
        assert child.events == [("decided", {"fits": True})]
        assert not child.is_error


def test_clients_decide_for_their_traces_and_the_ratio_for_ours() -> None:
    with OtlpReceiver() as receiver:
        tracer = traced(TracingSection(endpoint=receiver.grpc_endpoint, sample_percent=0))
        wanted = tracer.span("wanted", parent=PARENT)
        unwanted = tracer.span("unwanted", parent=PARENT[:-1] + "0")
        own = tracer.span("own")
        malformed = tracer.span("malformed", parent="00-zz")
        recording = [span.is_recording for span in (wanted, unwanted, own, malformed)]
        assert recording == [True, False, False, False]
        # What is not sampled here is not to be sampled behind us either.
        assert unwanted.traceparent.endswith("-00")
        assert TRACE in unwanted.traceparent
        for span in (own, wanted, unwanted, malformed):
            span.event("nothing")
            span.end()
        tracer.close()
        [received] = receiver.wait(lambda spans: len(spans) > 0)
    assert received.name == "wanted"


def test_a_lost_collector_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tracer = traced(TracingSection(endpoint=endpoint, protocol="http"))
        with caplog.at_level(logging.INFO):
            for _ in range(3000):  # more than wait for the collector
                tracer.span("lost").end()
            tracer.close()
    assert [record.message for record in caplog.records] == ["no spans reach the collector"]


def test_endpoints_that_are_no_urls_are_refused() -> None:
    for endpoint in ("collector:4317", "ftp://collector", "http://", "/v1/traces"):
        with pytest.raises(msgspec.ValidationError, match=r"tracing\.endpoint.*http://HOST:PORT"):
            msgspec.convert({"endpoint": endpoint}, TracingSection)


def test_nothing_is_imported_where_nothing_is_traced() -> None:
    program = (
        "import sys; from ullage_common.process.tracing import start_tracing;"
        "assert start_tracing(None, 'x') is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_span_can_be_a_parent_before_it_has_ended() -> None:
    with OtlpReceiver() as receiver:
        tracer = traced(TracingSection(endpoint=receiver.grpc_endpoint))
        root: Span = tracer.span("here")
        elsewhere = tracer.span("there", parent=root.metadata)
        elsewhere.end()
        root.end()
        tracer.close()
        there, here = receiver.wait(lambda spans: len(spans) == 2)
    assert (there.trace_id, there.parent_id) == (here.trace_id, here.span_id)
    assert here.parent_id == ""
