"""Tools over gRPC: the same as over HTTP, with the same errors."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, from_rpc_error, invalid

if TYPE_CHECKING:
    Service = Any
    StartService = Any

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{# <tool_call> #}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
CLOCK = '[{"type": "function", "function": {"name": "clock"}}]'
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": 1}}</tool_call>'


def ask(functions: str = CLOCK, **tools: Any) -> inference_pb2.GenerateRequest:
    question = inference_pb2.Message(role="user", content="Time?")
    told = inference_pb2.Tools(functions=functions, **tools)
    messages = inference_pb2.Messages(messages=[question], tools=told)
    return inference_pb2.GenerateRequest(messages=messages)


async def generate(service: "Service", request: inference_pb2.GenerateRequest) -> list[Any]:
    return [response async for response in service.grpc.Generate(request)]


async def refusal(service: "Service", request: inference_pb2.GenerateRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(service, request)
    return from_rpc_error(caught.value)


def test_calls_are_beside_the_text(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=TEMPLATE) as service:
            service.engine.script.words = ("Well. ", CALL[:9], CALL[9:40], CALL[40:])
            _, *deltas, last = await generate(service, ask())
            assert "".join(event.delta.text for event in deltas) == "Well."
            (piece,) = (piece for event in deltas for piece in event.delta.tool_calls)
            assert (piece.index, piece.name, piece.arguments) == (0, "clock", '{"zone": 1}')
            assert piece.id
            assert sum(event.delta.num_tokens for event in deltas) == 4
            assert last.finished.reason == inference_pb2.FINISH_REASON_TOOL_CALLS

    asyncio.run(scenario())


def test_a_forced_call(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=TEMPLATE) as service:
            service.engine.script.words = ("{", "}")
            named = ask(mode=inference_pb2.TOOL_MODE_NAMED, name="clock")
            _, *deltas, last = await generate(service, named)
            pieces = [piece for event in deltas for piece in event.delta.tool_calls]
            assert [piece.name for piece in pieces] == ["clock", ""]
            assert [piece.arguments for piece in pieces] == ["{", "}"]
            assert json.loads(service.engine.requests[0].grammar.json_schema)["properties"] == {}
            assert last.finished.reason == inference_pb2.FINISH_REASON_TOOL_CALLS

    asyncio.run(scenario())


REQUIRED = inference_pb2.TOOL_MODE_REQUIRED


def forced(**more: Any) -> inference_pb2.GenerateRequest:
    request = ask(mode=REQUIRED)
    request.MergeFrom(inference_pb2.GenerateRequest(**more))
    return request


WRONG = [
    (ask("{"), "tools"),
    (ask("[]"), "tools"),
    (ask(r'["\ud800"]'), "tools"),
    (ask("[" * 100_000), "tools"),
    (ask('["' + "x" * (1 << 20) + '"]'), "tools"),
    (ask('[{"type": "function", "function": {"name": 3}}]'), "tools[0].function.name"),
    (ask(mode=inference_pb2.TOOL_MODE_NAMED, name="x"), "tool_choice.function.name"),
    (forced(stop=inference_pb2.StopConditions(ignore_eos=True)), "tool_choice"),
    (forced(grammar=inference_pb2.Grammar(regex="x")), "tool_choice"),
    (
        forced(samples=inference_pb2.Samples(beam=inference_pb2.BeamSearch(width=2))),
        "tool_choice",
    ),
]


def test_wrong_tools(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for request, field in WRONG:
                error = await refusal(service, request)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT
                assert error.metadata["field"] == field, error
            assert not service.engine.requests

    asyncio.run(scenario())


def test_a_schema_that_the_engine_refuses_is_told_as_the_tools(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.refuse = invalid("grammar.json_schema", "not is not supported")
            error = await refusal(service, ask(mode=REQUIRED))
            assert error.metadata["field"] == "tools"
            assert "not is not supported" in error.message

    asyncio.run(scenario())
