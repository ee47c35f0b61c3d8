"""Grammars that a server takes and those that it refuses before its worker sees them."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import psutil
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_engine.server.grammar import GrammarCheck, Interrupted, Verdict

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
    ({"grammar": schema({"title": "x" * 70_000})}, "grammar", "at most 65536"),
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
    ({"sampling": {"logit_bias": {49152: 1.0}}}, "logit_bias", "tokens below 49152"),
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
                    assert words in error.message
                    assert field in error.message
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


def test_a_part_that_kills_whoever_compiles_it_is_not_looked_for_here(serve: Serve) -> None:
    """The whole schema is refused at once, and its definitions kill whoever searches them."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1400)}
    broken = {"anyOf": [{"not": {}}, {"$ref": "#/$defs/d0"}], "$defs": chain | {"d1400": {}}}

    async def scenario() -> None:
        async with serve() as engine:
            error = await error_of(engine, ask(grammar=schema(broken)))
            assert error.code == grpc.StatusCode.INVALID_ARGUMENT
            assert error.metadata["field"] == SCHEMA
            assert 'Unimplemented keys: ["not"]' in error.message
            assert (await engine.generate(ask(grammar={"regex": "a"}))).finished

    asyncio.run(scenario())


def test_a_refused_schema_is_searched_once() -> None:
    async def scenario() -> None:
        verdict = Verdict("bad", ".items")
        asked = []

        async def compiler(text: str) -> Verdict:
            asked.append(text)
            return verdict

        check = GrammarCheck(compiler)
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                await check.text(ask(grammar=schema({"items": {"not": {}}})))
            assert caught.value.metadata["field"] == f"{SCHEMA}.items"
        assert len(asked) == 1

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


class Compiler:
    """Takes every grammar, a moment later; is interrupted the first `interrupted` times."""

    def __init__(self, interrupted: int = 0) -> None:
        self.compiled: list[str] = []
        self.began = asyncio.Event()
        self._interrupted = interrupted

    async def __call__(self, text: str) -> Verdict:
        self.compiled.append(text)
        self.began.set()
        await asyncio.sleep(0.01)
        if len(self.compiled) <= self._interrupted:
            raise Interrupted
        return Verdict()


def test_alike_grammars_are_compiled_once() -> None:
    async def scenario() -> None:
        compiler = Compiler()
        check = GrammarCheck(compiler)
        asked = [ask(grammar={"regex": each}) for each in "ab" * 6]
        texts = await asyncio.gather(*(check.text(request) for request in asked))
        assert sorted(compiler.compiled) == sorted(set(texts))

    asyncio.run(scenario())


def test_special_tokens_of_a_grammar_are_known_to_the_worker_only() -> None:
    """The check's vocabulary has bytes, and gpt-oss writes a forced call with its marks."""

    async def scenario() -> None:
        check = GrammarCheck()
        lark = 'start: "clock" <|message|> %json {"type": "object"}'
        assert "<|message|>" in await check.text(ask(grammar={"lark": lark}))
        with pytest.raises(ServiceError, match="unknown name"):
            await check.text(ask(grammar={"lark": "start: <|message|> x"}))

    asyncio.run(scenario())


def test_reasoning_may_precede_a_checked_grammar() -> None:
    async def scenario() -> None:
        compiler = Compiler()
        check = GrammarCheck(compiler)
        grammar = {"regex": "a"}
        plain = await check.text(ask(grammar=grammar))
        marks = pb.Reasoning(begin="<think>", end="</think>", end_token_id=9)
        after = await check.text(ask(grammar=grammar, reasoning=marks))
        assert compiler.compiled == [plain]
        assert "<[9]>" in after
        assert json.loads(after)["grammars"][1]["lark_grammar"] == "start: /a/"

    asyncio.run(scenario())


def test_who_leaves_while_a_grammar_is_compiled_takes_nobody_along() -> None:
    async def scenario() -> None:
        compiler = Compiler()
        check = GrammarCheck(compiler)
        request = ask(grammar={"regex": "a"})
        first, second = (asyncio.create_task(check.text(request)) for _ in range(2))
        await compiler.began.wait()
        first.cancel()
        assert await second
        assert first.cancelled()
        assert len(compiler.compiled) == 2

    asyncio.run(scenario())


def test_an_interrupted_compilation_is_no_verdict() -> None:
    async def scenario() -> None:
        check = GrammarCheck(Compiler(interrupted=1))
        request = ask(grammar={"regex": "a"})
        with pytest.raises(ServiceError, match="too much"):
            await check.text(request)
        assert await check.text(request)

    asyncio.run(scenario())


def processes(module: str) -> list[psutil.Process]:
    """Those of this process's children that run the module."""
    return [child for child in psutil.Process().children() if module in child.cmdline()]


def test_a_killed_process_is_no_verdict() -> None:
    async def scenario() -> None:
        check = GrammarCheck()
        request = ask(grammar={"regex": "a"})
        asked = asyncio.create_task(check.text(request))
        while not (compiling := processes("ullage_engine.protocol.grammar")):  # noqa: ASYNC110 - no signal
            await asyncio.sleep(0)
        compiling[0].kill()
        with pytest.raises(ServiceError, match="too much"):
            await asked
        assert await check.text(request)

    asyncio.run(scenario())
