"""Grammars that a server takes and those that it refuses before its worker sees them."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_rpc.errors import ServiceError, from_rpc_error

Serve = Callable[..., AbstractAsyncContextManager[Any]]
SCHEMA = "grammar.json_schema"


def ask(first: int = 1, **fields: Any) -> pb.GenerateRequest:
    fields.setdefault("stop", {"max_tokens": 4})
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[first, 2, 3]), **fields)


def schema(value: object) -> dict[str, str]:
    return {"json_schema": value if isinstance(value, str) else json.dumps(value)}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"grammar": {}}, "grammar", "empty"),
    ({"grammar": schema("{")}, SCHEMA, "not JSON"),
    ({"grammar": schema("[]")}, SCHEMA, "not a JSON object"),
    ({"grammar": schema({"const": float("inf")})}, SCHEMA, "expected value"),
    ({"grammar": schema('{"a":' * 5000 + "1" + "}" * 5000)}, SCHEMA, "nested"),
    ({"grammar": schema('{"items":' * 70 + "{}" + "}" * 70)}, SCHEMA, "deeper than 64"),
    ({"grammar": schema({"title": "x" * 70_000})}, SCHEMA, "at most 65536"),
    (
        {"grammar": schema({"properties": {"a": {"items": {"not": {}}}}})},
        f"{SCHEMA}.properties.a.items",
        'Unimplemented keys: ["not"]',
    ),
    (
        {"grammar": schema({"anyOf": [{}, {"type": "foo"}]})},
        f"{SCHEMA}.anyOf[1]",
        "Invalid type: foo",
    ),
    (
        {"grammar": schema({"items": {"properties": {"a": {}}, "patternProperties": {"a": {}}}})},
        f"{SCHEMA}.items",
        "patternProperties",
    ),
    ({"grammar": schema({"$ref": "http://10.0.0.1/x"})}, SCHEMA, "does not fetch"),
    ({"grammar": schema({"$ref": "file:///etc/passwd"})}, SCHEMA, "does not fetch"),
    ({"grammar": schema({"not": {}, "x-guidance": {"lenient": True}})}, SCHEMA, "Unimplemented"),
    ({"grammar": {"regex": "(a"}}, "grammar.regex", "unclosed group"),
    ({"grammar": {"regex": "(" * 20_000 + ")" * 20_000}}, "grammar.regex", "regex"),
    ({"grammar": {"lark": "start: x"}}, "grammar.lark", "unknown name"),
    ({"grammar": {"lark": "start: " + "(" * 20_000}}, "grammar.lark", "nested"),
    ({"grammar": {"choice": {"texts": ["a", ""]}}}, "grammar.choice", "empty"),
    ({"grammar": {"regex": "a"}, "stop": {"ignore_eos": True}}, "stop.ignore_eos", "grammar"),
    ({"grammar": {"regex": "a"}, "samples": {"beam": {"width": 2}}}, "grammar", "beam"),
    ({"sampling": {"logit_bias": {49152: 1.0}}}, "sampling.logit_bias", "vocabulary"),
    ({"sampling": {"logit_bias": {5: -101.0}}}, "sampling.logit_bias[5]", "-100 to 100"),
    (
        {"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}},
        "sampling.logit_bias",
        "at most 1024",
    ),
    ({"stop": {"min_tokens": 5, "max_tokens": 4}}, "stop.min_tokens", "max_tokens"),
    (
        {"stop": {"min_tokens": 1}, "samples": {"beam": {"width": 2}}},
        "stop.min_tokens",
        "beam",
    ),
]


async def error_of(engine: Any, request: pb.GenerateRequest) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.generate(request)
    return from_rpc_error(caught.value)


def test_what_is_wrong_is_refused_unseen_by_the_worker(serve: Serve, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    async def scenario() -> None:
        async with serve(trace=str(trace)) as engine:
            for fields, field, words in WRONG:
                for _ in range(2):  # a verdict is remembered, not the place of the error alone
                    error = await error_of(engine, ask(**fields))
                    assert error.code == grpc.StatusCode.INVALID_ARGUMENT, fields
                    assert error.metadata["field"] == field
                    assert words in error.message and field in error.message
            assert not trace.exists()
            good = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
            answers = [await engine.generate(ask(grammar=good)) for _ in range(3)]
            assert all(answer.finished for answer in answers)
            assert len(trace.read_text().splitlines()) == 3

    asyncio.run(scenario())


def test_a_request_that_the_worker_faults_is_told_so(serve: Serve, fake: ModuleType) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            error = await error_of(engine, ask(fake.Script.FAULTY, grammar={"regex": "a"}))
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT
            assert error.metadata["field"] == "grammar"
            assert (await engine.state()).health == 1.0

    asyncio.run(scenario())


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1700)}
DEADLY: list[dict[str, str]] = [
    schema({"$defs": CHAIN | {"d1700": {"type": "null"}}, "$ref": "#/$defs/d0"}),
    {"lark": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'},
    schema({"type": "integer", "allOf": [{"multipleOf": 1997}, {"multipleOf": 1993}]}),
]


def test_a_grammar_that_kills_whoever_compiles_it_kills_no_server(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as engine:
            for deadly in DEADLY:
                error = await error_of(engine, ask(grammar=deadly))
                assert error.code == grpc.StatusCode.INVALID_ARGUMENT
                assert "too much" in error.message
            assert (await engine.generate(ask(grammar={"regex": "a"}))).finished

    asyncio.run(scenario())


def test_a_costly_grammar_holds_up_no_other_call(serve: Serve) -> None:
    costly = schema(
        {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(1200)}}
    )

    async def scenario() -> None:
        async with serve() as engine:
            slow = asyncio.create_task(engine.generate(ask(grammar=costly)))
            await asyncio.gather(*(engine.generate(ask()) for _ in range(5)))
            assert (await slow).finished

    asyncio.run(scenario())
