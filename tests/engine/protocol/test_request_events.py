"""What a worker says of requests: lines with the client's id, and spans of their phases."""

import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from ullage_testing.otlp import OtlpReceiver, ReceivedSpan

from ullage_common.process.logs import JsonFormatter
from ullage_common.process.tracing import TracingSection, start_tracing
from ullage_engine.protocol.request_events import ServedRequest
from ullage_engine.scheduler.scheduler import KvPolicy

MakeRig = Callable[..., Any]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def submit(rig: Any, name: str, length: int, max_tokens: int = 4, first: int = 0) -> None:
    """As a worker does: the request is admitted, and noted."""
    request = rig.request(name, list(range(first, first + length)), max_tokens=max_tokens)
    named = msgspec.structs.replace(request, client_id=f"client-{name}", traceparent=PARENT)
    rig.submit(named)
    rig.scheduler.events.on_admitted(named)


def run(rig: Any) -> None:
    """Steps as an engine does, until nothing is left."""
    events = rig.scheduler.events
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        outputs = rig.finish(plan)
        if events.wants_steps:
            events.on_step(plan, 0.01)
        events.on_outputs(outputs)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    formatter = JsonFormatter()
    return [json.loads(formatter.format(record)) for record in caplog.records]


def test_each_line_has_the_clients_id(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(policy=KvPolicy(host_slots=100), prefill_rate=1.0)
    with caplog.at_level(logging.INFO):
        submit(rig, "a", 100, max_tokens=60)
        for _ in range(5):
            rig.step()
        assert rig.scheduler.preempt_newest()
        run(rig)
    told = [line for line in lines(caplog) if line["logger"] == "ullage.engine.worker.requests"]
    assert {line["request_id"] for line in told} == {"client-a"}
    assert [line["event"] for line in told] == [
        *("admitted", "first_chunk", "preempted", "resumed", "finished")
    ]
    assert (told[2]["mode"], told[2]["preemptions"]) == ("swap", 1)
    assert told[2]["preemptions_of_all"] == 1
    assert (told[-1]["finish"], told[-1]["preemptions"]) == ("length", 1)
    assert not rig.scheduler.events.requests


def test_batches_are_told_at_the_level_debug_alone(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        rig = make_rig()
        submit(rig, "a", 20)
        submit(rig, "b", 30, first=500)
        run(rig)
    steps = [line for line in lines(caplog) if line["message"] == "step"]
    assert steps[0]["prompt_tokens"] == steps[0]["tokens"] == 50
    assert steps[0]["request_ids"] == ["client-a", "client-b"]
    assert steps[-1]["prompt_tokens"] == 0
    assert not make_rig().scheduler.events.wants_steps


def test_a_step_of_draft_tokens_is_none_of_prompts(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        rig = make_rig(speculative=4, max_sequences=40)
        request = rig.request("a", [1, 2, 3] * 6, 40)
        rig.submit(request)
        rig.scheduler.events.on_admitted(request)
        plan = rig.scheduler.schedule()
        while plan.chunks[0].num_sampled == 1:  # nobody looks at these
            rig.finish(plan)
            plan = rig.scheduler.schedule()
        rig.scheduler.events.on_step(plan, 0.01)
    [step] = [line for line in lines(caplog) if line["message"] == "step"]
    assert (step["tokens"] > 1, step["prompt_tokens"], step["decodes"]) == (True, 0, 1)


def test_a_request_is_spans_of_waiting_prefill_and_decode(make_rig: MakeRig) -> None:
    with OtlpReceiver() as receiver:
        tracer = start_tracing(TracingSection(endpoint=receiver.grpc_endpoint), "ullage-engine")
        assert tracer
        rig = make_rig(policy=KvPolicy(prefix_cache=False))
        rig.scheduler.events.trace_to(tracer)
        submit(rig, "a", 100)
        run(rig)
        submit(rig, "gone", 100)
        rig.step()
        rig.scheduler.cancel("gone")
        rig.scheduler.events.forget("gone")
        tracer.close()
        spans = receiver.wait(lambda spans: len(spans) == 5)
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, "b7ad6b7169203331")}
    first: list[ReceivedSpan] = spans[:3]
    assert [span.name for span in first] == ["queue", "prefill", "decode"]
    assert first[0].end_s <= first[1].start_s <= first[1].end_s <= first[2].start_s
    assert sum(event["tokens"] for _, event in first[1].events) == 100
    assert first[2].attributes["ullage.ended"] == "length"
    assert spans[-1].attributes["ullage.ended"] == "cancelled"


def test_an_untraced_request_among_traced_ones_has_no_spans(make_rig: MakeRig) -> None:
    with OtlpReceiver() as receiver:
        tracer = start_tracing(TracingSection(endpoint=receiver.grpc_endpoint), "ullage-engine")
        assert tracer
        rig = make_rig()
        rig.scheduler.events.trace_to(tracer)
        request = rig.request("plain", list(range(20)), max_tokens=2)
        rig.submit(request)
        rig.scheduler.events.on_admitted(request)
        submit(rig, "traced", 20)
        run(rig)
        tracer.close()
        spans = receiver.wait(lambda spans: len(spans) >= 3)
    assert len(spans) == 3


def test_what_tiers_loaded_is_a_span_with_the_tier_and_its_seconds() -> None:
    with OtlpReceiver() as receiver:
        tracer = start_tracing(TracingSection(endpoint=receiver.grpc_endpoint), "ullage-engine")
        assert tracer
        served = ServedRequest(tracer, "mine", [("traceparent", PARENT), ("cookie", b"x")])
        served.loaded("file", 512, 0.25)
        served.happened("received", prompt_tokens=9)
        served.end("finished", {"outcome": "stop", "output_tokens": 3})
        tracer.close()
        load, call = receiver.wait(lambda spans: len(spans) == 2)
    assert (load.name, load.parent_id, load.trace_id) == ("kv load", call.span_id, TRACE)
    assert load.attributes == {"ullage.kv.tier": "file", "ullage.kv.tokens": 512}
    assert load.end_s - load.start_s == pytest.approx(0.25, abs=1e-3)
    assert call.attributes["gen_ai.usage.input_tokens"] == 9
    assert call.attributes["gen_ai.usage.output_tokens"] == 3
