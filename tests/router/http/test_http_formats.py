"""Biases and grammars on their way from OpenAI's words to an engine."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import from_rpc_error, invalid

if TYPE_CHECKING:
    Service = Any
    StartService = Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a-b_9", "schema": SCHEMA}}
FORMAT = "response_format"

SAME: list[tuple[dict[str, Any], str, Any]] = [
    ({FORMAT: {"type": "text"}}, "", None),
    ({FORMAT: {"type": "json_object"}}, "json_object", None),
    ({FORMAT: JSON_SCHEMA}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_object", None),
    ({"structured_outputs": {}, "guided_json": None}, "", None),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": True}}, "json_schema", True),
    ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+"),
    ({"structured_outputs": {"choice": ["x", "y z"]}}, "choice", ["x", "y z"]),
    (
        {"structured_outputs": {"regex": "a", "structural_tag": None, "whitespace_pattern": None}},
        "regex",
        "a",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "json_schema",
        SCHEMA,
    ),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
]

WRONG: list[tuple[dict[str, Any], str]] = [
    ({FORMAT: "text"}, FORMAT),
    ({FORMAT: {}}, FORMAT),
    ({FORMAT: {"type": "yaml"}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"schema": {}}}}, f"{FORMAT}.json_schema"),
    (
        {FORMAT: {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        f"{FORMAT}.json_schema.name",
    ),
    (
        {FORMAT: {"type": "json_schema", "json_schema": {"name": "a"}}},
        f"{FORMAT}.json_schema.schema",
    ),
    *(
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json")
        for schema in (-2.5, 0, "", "a word", '"text"', [], [{}], "[]", " null")
    ),
    *(
        (
            {FORMAT: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            f"{FORMAT}.json_schema.schema",
        )
        for schema in (1, "1", [])
    ),
    ({FORMAT: JSON_SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"guided_regex": "a"}, "guided_regex"),
    *(
        ({"structured_outputs": {"json": SCHEMA, name: value}}, f"structured_outputs.{name}")
        for name, value in (
            ("structural_tag", "{}"),
            ("whitespace_pattern", " ?"),
            ("disable_additional_properties", True),
        )
    ),
    ({FORMAT: JSON_SCHEMA, "ignore_eos": True}, "ignore_eos"),
    ({FORMAT: JSON_SCHEMA, "use_beam_search": True, "best_of": 2}, FORMAT),
    ({"structured_outputs": {"regex": "a" * 70_000}}, FORMAT),
    ({"logit_bias": {"5": 1}, "use_beam_search": True, "best_of": 2}, "logit_bias"),
    ({"min_tokens": 1, "use_beam_search": True, "best_of": 2}, "min_tokens"),
]


def kind_of(request: inference_pb2.GenerateRequest) -> tuple[str, Any]:
    grammar = request.grammar
    match kind := grammar.WhichOneof("kind") or "":
        case "json_schema":
            return kind, json.loads(grammar.json_schema)
        case "regex" | "lark":
            return kind, getattr(grammar, kind)
        case "choice":
            return kind, list(grammar.choice.texts)
    return kind, None


def test_formats_reach_the_engine_as_grammars(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for body, kind, value in SAME:
                assert (await service.chat(**body)).status_code == 200, body
                assert kind_of(service.engine.requests[-1]) == (kind, value)
                assert (await service.complete(**body)).status_code == 200, body
                assert kind_of(service.engine.requests[-1]) == (kind, value)
                assert service.engine.requests[-1].HasField("grammar") == bool(kind)

    asyncio.run(scenario())


def test_biases_and_least_lengths_reach_the_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            models = await service.openai.models.list()
            answer = await service.openai.chat.completions.create(
                model=models.data[0].id,
                messages=[{"role": "user", "content": "Hi"}],
                logit_bias={"5": -100, "007": 2.5},
                extra_body={"min_tokens": 3},
                max_tokens=4,
            )
            assert answer.choices[0].message.content
            request = service.engine.requests[-1]
            assert dict(request.sampling.logit_bias) == {5: -100.0, 7: 2.5}
            assert request.stop.min_tokens == 3

    asyncio.run(scenario())


def test_wrong_formats_name_the_field(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for body, field in WRONG:
                answer = await service.http.post(
                    "/v1/completions",
                    content=json.dumps({"prompt": "x", **body}),
                    headers={"content-type": "application/json"},
                )
                assert answer.status_code == 400, body
                error = answer.json()["error"]
                assert error["param"] == field
                assert field.split(".")[0] in error["message"]
            assert service.engine.requests == []

    asyncio.run(scenario())


def test_what_an_engine_says_of_a_schema_is_told_in_the_clients_words(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            field = "grammar.json_schema.properties.a"
            service.engine.script.refuse = invalid(field, f"{field}: no such type; change it")
            error = (await service.chat(response_format=JSON_SCHEMA)).json()["error"]
            assert error["param"] == f"{FORMAT}.json_schema.schema.properties.a"
            assert error["message"] == f"{error['param']}: no such type; change it"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _generate(service, grammar={"json_schema": "{}"})
            assert from_rpc_error(caught.value).metadata["field"] == field
            assert from_rpc_error(caught.value).code == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_grpc_refuses_the_same(start_service: "StartService") -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sampling": {"logit_bias": {5: 200.0}}}, "logit_bias[5]"),
        ({"sampling": {"logit_bias": {5: float("nan")}}}, "logit_bias[5]"),
        ({"stop": {"min_tokens": 2, "max_tokens": 1}}, "min_tokens"),
        ({"grammar": {"regex": "a" * 70_000}}, "grammar"),
        ({"grammar": {"regex": "a"}, "stop": {"ignore_eos": True}}, "ignore_eos"),
        ({"grammar": {"regex": "a"}, "samples": {"beam": {"width": 2}}}, "grammar"),
    ]

    async def scenario() -> None:
        async with start_service() as service:
            for fields, field in wrong:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _generate(service, **fields)
                assert from_rpc_error(caught.value).metadata["field"] == field
            assert service.engine.requests == []

    asyncio.run(scenario())


async def _generate(service: "Service", **fields: Any) -> None:
    request = inference_pb2.GenerateRequest(text="x", **fields)
    async for _ in service.grpc.Generate(request):
        pass
