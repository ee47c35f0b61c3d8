"""An engine's server tells of each request under its client's id, in its log and as a span."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import msgspec
import pytest
from ullage_testing.otlp import OtlpReceiver

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig
from ullage_common.process.logs import JsonFormatter
from ullage_common.process.tracing import TracingSection
from ullage_engine.server.restart_policy import RestartPolicy

Serve = Callable[..., AbstractAsyncContextManager[Any]]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
KILL = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)


def ask(name: str, max_tokens: int = 40) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        stop=pb.StopConditions(max_tokens=max_tokens),
    )


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    formatter = JsonFormatter()
    lines = [json.loads(formatter.format(record)) for record in caplog.records]
    return [line for line in lines if line.get("request_id") == name]


async def until_told(caplog: pytest.LogCaptureFixture, name: str, event: str) -> None:
    async with asyncio.timeout(60):
        while event not in [line["event"] for line in told(caplog, name)]:  # noqa: ASYNC110 - a log
            await asyncio.sleep(0.01)


def test_a_request_and_the_worker_that_it_lost(
    serve: Serve, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(receiver: OtlpReceiver) -> None:
        tracing = TracingSection(endpoint=receiver.grpc_endpoint)
        traced = msgspec.structs.replace(config, tracing=tracing)
        policy = RestartPolicy(first_backoff_s=0.05)
        async with serve(config=traced, policy=policy, step_s=0.02) as engine:
            metadata = (("traceparent", PARENT),)
            answer = asyncio.create_task(engine.generate(ask("one"), metadata=metadata))
            await until_told(caplog, "one", "first_token")
            await engine.admin.InjectFault(KILL)
            assert (await answer).finished.resumes == 1
            with pytest.raises(grpc.aio.AioRpcError):
                await engine.generate(pb.GenerateRequest(request_id="two", model="x"))
        spans = receiver.wait(lambda spans: sum(s.name == "generate" for s in spans) == 2)
        one, two = (span for span in spans if span.name == "generate")
        assert (one.service, one.trace_id, one.parent_id) == (
            *("ullage-engine", TRACE, "b7ad6b7169203331"),
        )
        assert one.kind == 2
        assert one.attributes["ullage.request_id"] == "one"
        assert one.attributes["ullage.engine"] == "engine-7"
        assert one.attributes["gen_ai.usage.output_tokens"] == 40
        assert [name for name, _ in one.events] == ["received", "first_token", "resumed"]
        assert not one.is_error
        assert two.is_error
        assert two.trace_id != TRACE

    with OtlpReceiver() as receiver, caplog.at_level(logging.INFO):
        asyncio.run(scenario(receiver))
    lines = told(caplog, "one")
    assert [line["event"] for line in lines] == ["received", "first_token", "resumed", "finished"]
    assert lines[-1]["outcome"] == "length"
    assert lines[-1]["output_tokens"] == 40
    assert [line["event"] for line in told(caplog, "two")] == ["refused"]
