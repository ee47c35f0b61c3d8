"""One request's spans, log lines and timeline, of a real router before scripted engines."""

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from ullage_testing.fake_engine import MODEL
from ullage_testing.otlp import OtlpReceiver, ReceivedSpan

from ullage.inference.v1 import inference_pb2
from ullage_common.process.logs import JsonFormatter

if TYPE_CHECKING:
    from tests.router.conftest import StartService

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
TAGS = {"pred_kv_mb", "admission_action", "route", "reason", "needed_bytes", "available_bytes"}


def roots(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.kind == 2]


def lines(caplog: pytest.LogCaptureFixture, request_id: str) -> list[dict[str, Any]]:
    formatter = JsonFormatter()
    told = [json.loads(formatter.format(record)) for record in caplog.records]
    return [line for line in told if line.get("request_id") == request_id]


def test_a_request_is_one_trace_from_the_client_to_the_engine(
    start_service: "StartService", caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(receiver: OtlpReceiver) -> None:
        tracing = {"endpoint": receiver.grpc_endpoint}
        async with start_service(tracing=tracing) as service:
            headers = {"traceparent": PARENT, "tracestate": "a=1", "x-request-id": "one"}
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            url = "/v1/chat/completions"
            answer = await service.http.post(url, json=body | {"max_tokens": 9}, headers=headers)
            assert answer.headers["x-request-id"] == "one"
            sent = service.engine.metadata[-1]
            own = {"x-request-id": "two", "content-type": "application/json"}
            refused = await service.http.post(url, content=b"{", headers=own)
            assert refused.status_code == 400
            latest = (await service.stats())["latest"]
        spans = receiver.wait(lambda spans: len(roots(spans)) == 2)
        own = {span.name: span for span in spans if span.trace_id == TRACE}
        assert set(own) == {f"chat {MODEL}", "tokenise", "decide", "engine"}
        root = own[f"chat {MODEL}"]
        engine = own["engine"]
        assert (root.service, root.parent_id) == ("ullage-router", "b7ad6b7169203331")
        assert root.attributes["gen_ai.operation.name"] == "chat"
        assert root.attributes["gen_ai.request.max_tokens"] == 9
        assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert root.attributes["gen_ai.usage.output_tokens"] > 0
        assert root.attributes["ullage.request_id"] == "one"
        assert root.attributes["admission_action"] == "accept"
        assert root.attributes["route"] == "single"
        for span in (root, engine):
            assert span.attributes["ullage.pool"] == "single"
            assert span.attributes["ullage.engine"] == answer.headers["x-ullage-engine"]
        assert root.attributes["needed_bytes"] <= root.attributes["available_bytes"]
        assert not root.is_error
        assert all(each.parent_id == root.span_id for each in own.values() if each is not root)
        # The engine goes on with the trace, as the child of the router's call.
        assert sent["traceparent"] == f"00-{TRACE}-{engine.span_id}-01"
        assert sent["tracestate"] == "a=1"
        assert [name for name, _ in root.events] == ["decided", "sent", "admitted", "first_token"]
        decided = root.events[0][1]
        assert decided.keys() >= TAGS
        assert decided["admission_action"] == "accept"

        [two] = [span for span in roots(spans) if span.trace_id != TRACE]
        assert two.is_error
        assert two.attributes["http.response.status_code"] == 400
        assert two.attributes["ullage.request_id"] == "two"

        [line] = lines(caplog, "one")  # a request that is accepted at once has no line before
        assert line["message"] == "answered"
        assert line["event"] == "finished"
        timeline = next(each["timeline"] for each in latest if each["request_id"] == "one")
        assert line["timeline"] == timeline
        assert line["trace_id"] == TRACE
        ids = {each["request_id"]: each["trace_id"] for each in latest}
        assert ids == {"one": TRACE, "two": two.trace_id}
        logged = timeline[1]
        assert {name: logged[name] for name in TAGS} == {name: decided[name] for name in TAGS}
        assert [each["event"] for each in timeline] == [
            *("tokenised", "decided", "sent", "admitted", "first_token")
        ]
        times = [each["after_s"] for each in timeline]
        assert times == sorted(times)

    with OtlpReceiver() as receiver, caplog.at_level(logging.INFO):
        asyncio.run(scenario(receiver))


def test_waiting_losses_and_refusals_are_seen(
    start_service: "StartService", caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(receiver: OtlpReceiver) -> None:
        tracing = {"endpoint": receiver.http_endpoint, "protocol": "http"}
        async with start_service(
            single=(100, 100), tracing=tracing, routing={"queue": {"timeout": 0.2}}
        ) as service:
            for engine in service.engines:
                engine.push(kv_free_bytes=0, headroom_bytes=0)
            await service.until(
                lambda: all(e.available == 0 for e in service.router.service.engines.all())
            )
            refused = await service.chat()
            assert refused.status_code == 429
            told = lines(caplog, refused.headers["x-request-id"])
            assert [(line["event"], line["admission_action"]) for line in told] == [
                ("decided", "queue"),
                ("decided", "reject"),
                ("refused", "reject"),
            ]
        spans = receiver.wait(lambda spans: len(roots(spans)) == 1)
        [root] = roots(spans)
        assert root.is_error
        assert root.attributes["http.response.status_code"] == 429
        assert root.attributes["admission_action"] == "reject"
        assert root.attributes["needed_bytes"] > root.attributes["available_bytes"]
        actions = [event["admission_action"] for name, event in root.events if name == "decided"]
        assert actions == ["queue", "reject"]
        [queued] = [span for span in spans if span.name == "queue"]
        assert queued.end_s - queued.start_s >= 0.1

    with OtlpReceiver() as receiver, caplog.at_level(logging.INFO):
        asyncio.run(scenario(receiver))


def test_an_engine_that_is_lost_leaves_its_span(start_service: "StartService") -> None:
    async def scenario(receiver: OtlpReceiver) -> None:
        tracing = {"endpoint": receiver.grpc_endpoint}
        async with start_service(single=(100, 100), tracing=tracing) as service:
            for engine in service.engines:
                engine.script.pause = asyncio.Event()
            answer = asyncio.create_task(service.chat(stream=True))
            await service.until(lambda: any(engine.requests for engine in service.engines))
            lost = next(engine for engine in service.engines if engine.requests)
            await service.until(
                lambda: any(e.inflight for e in service.router.service.engines.all())
            )
            for engine in service.engines:
                if engine is not lost:
                    assert engine.script.pause
                    engine.script.pause.set()
            await lost.stop()
            assert (await answer).status_code == 200
        spans = receiver.wait(lambda spans: len(roots(spans)) == 1)
        [root] = roots(spans)
        calls = [span for span in spans if span.name == "engine"]
        assert [call.is_error for call in sorted(calls, key=lambda call: call.start_s)] == [
            True,
            False,
        ]
        assert {call.trace_id for call in calls} == {root.trace_id}
        events = [name for name, _ in root.events]
        assert "engine_failed" in events or "resume" in {span.name for span in spans}
        assert not root.is_error

    with OtlpReceiver() as receiver:
        asyncio.run(scenario(receiver))


def test_untraced_requests_hand_the_context_on(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.http.post(
                "/v1/completions", json={"prompt": "Hi"}, headers={"traceparent": PARENT}
            )
            assert service.engine.metadata[-1]["traceparent"] == PARENT

    asyncio.run(scenario())


def test_unsampled_traces_stay_unsampled(start_service: "StartService") -> None:
    async def scenario(receiver: OtlpReceiver) -> None:
        tracing = {"endpoint": receiver.grpc_endpoint, "sample_percent": 0}
        async with start_service(tracing=tracing) as service:
            await service.complete()
            flags = service.engine.metadata[-1]["traceparent"].rpartition("-")[2]
            assert not int(flags, 16) & 1
            headers = {"traceparent": PARENT}
            await service.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
        spans = receiver.wait(lambda spans: len(roots(spans)) == 1)
        assert {span.trace_id for span in spans} == {TRACE}
        [root] = roots(spans)
        assert root.name == f"text_completion {MODEL}"

    with OtlpReceiver() as receiver:
        asyncio.run(scenario(receiver))


def test_grpc_continues_the_trace_of_metadata(start_service: "StartService") -> None:
    async def scenario(receiver: OtlpReceiver) -> None:
        async with start_service(tracing={"endpoint": receiver.grpc_endpoint}) as service:
            request = inference_pb2.GenerateRequest(request_id="g", text="Hi")
            async for _ in service.grpc.Generate(request, metadata=(("traceparent", PARENT),)):
                pass
        spans = receiver.wait(lambda spans: len(roots(spans)) == 1)
        [root] = roots(spans)
        assert (root.trace_id, root.attributes["ullage.request_id"]) == (TRACE, "g")

    with OtlpReceiver() as receiver:
        asyncio.run(scenario(receiver))
