"""The description of the HTTP API says what is parsed, served and answered, no more and no less."""

import asyncio
import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import ResponsesSection
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.http import openapi
from ullage_router.http.anthropic import answers as messages_answers
from ullage_router.http.anthropic.answer import MessagesAnswer
from ullage_router.http.anthropic.endpoint import PING
from ullage_router.http.anthropic.errors import ERRORS as MESSAGES_ERRORS
from ullage_router.http.anthropic.errors import error_body, error_event
from ullage_router.http.anthropic.schemas import (
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
)
from ullage_router.http.openai import answers, decoding
from ullage_router.http.openai.embeddings import EmbeddingsRequest
from ullage_router.http.openai.endpoint import CountAnswer
from ullage_router.http.openai.errors import envelope
from ullage_router.http.openai.responses import (
    ChatFormat,
    Collected,
    CompletionFormat,
    Format,
    ResponseOptions,
)
from ullage_router.http.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DefinedFunction,
    ToolDefinition,
)
from ullage_router.http.openai.scores import RerankRequest, ScoreRequest
from ullage_router.http.responses import answers as responses_answers
from ullage_router.http.responses.answer import SSE, ResponsesAnswer
from ullage_router.http.responses.endpoint import COUNTED
from ullage_router.http.responses.errors import ERRORS as RESPONSES_ERRORS
from ullage_router.http.responses.input_items import encode_items, read_page
from ullage_router.http.responses.requests import read_request
from ullage_router.http.responses.schemas import Item, ItemPart, ResponsesRequest, ResponsesTool
from ullage_router.http.responses.store import ResponseStore

if TYPE_CHECKING:
    StartService = Any

EVERY_ROUTE = [(path, method) for path, methods in openapi.OPERATIONS.items() for method in methods]
DOCUMENT = json.loads(openapi.document(EVERY_ROUTE))
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES: tuple[Any, ...] = (
    ScoreRequest,
    RerankRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
)


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield a structure and all in it, or those that make up a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs_in(field.type)
    for part in typing.get_args(kind):
        yield from structs_in(part)


def test_each_field_of_a_request_is_described_and_no_other() -> None:
    found = {struct for body in BODIES for struct in structs_in(body)}
    assert len(found) > 10
    for struct in (*found, ToolDefinition, DefinedFunction, ResponsesTool, MessagesTool):
        fields = msgspec.structs.fields(struct)
        described = SCHEMAS[struct.__name__]
        assert set(described["properties"]) == {field.encode_name for field in fields}, struct
        required = {field.encode_name for field in fields if field.required}
        assert set(described.get("required", ())) == required, struct


def test_each_field_says_what_it_takes() -> None:
    for name, schema in SCHEMAS.items():
        for field, described in schema["properties"].items():
            is_typed = described.keys() & {"type", "anyOf", "enum", "$ref", "const"}
            assert is_typed, (name, field, described)


def test_schemas_are_valid_and_refer_to_what_is_there() -> None:
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["title"] == name
    for reference in references(DOCUMENT):
        at = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from references(part)


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )


# Numbers such as 1.0 are integers in JSON Schema, and none to the parser.
NUMBERS = (
    st.integers(-3, 30) | st.integers(-(2**65), 2**65) | st.sampled_from([0.5, -1.5, 1e9 + 0.5])
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "none", "function", "5"])
KEYS = st.sampled_from(["type", "name", "text", "role", "function", "json", "content", "5"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
UNREAD = {"tools", "prompt", "input", "messages"}
"""Fields of which more is asked later; that they are there is asked at once."""
MINIMAL: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    EmbeddingsRequest: {"input": "x"},
    ScoreRequest: {},
    RerankRequest: {"query": "x", "documents": "y"},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    CountTokensRequest: {"messages": [{"role": "user", "content": "x"}]},
}
VALIDATORS = {body: validator(body.__name__) for body in BODIES}


@settings(max_examples=300)
@given(body=st.sampled_from(BODIES), data=st.data())
def test_what_is_described_is_parsed_and_nothing_else(body: Any, data: Any) -> None:
    names = [field for field in SCHEMAS[body.__name__]["properties"] if field not in UNREAD]
    field = data.draw(st.sampled_from(names))
    asked = MINIMAL[body] | {field: data.draw(VALUES)}
    if body is ChatRequest and data.draw(st.booleans()):
        asked["messages"] = [{"role": "user", "content": "x"} | data.draw(messages())]

    is_described = VALIDATORS[body].is_valid(asked)
    try:
        decoded = decoding.parse(msgspec.json.Decoder(body), json.dumps(asked).encode())
        refuse_unread_parts(decoded)
        is_parsed = True
    except ServiceError:
        is_parsed = False

    assert is_parsed == is_described, asked


@settings(max_examples=200)
@given(body=st.sampled_from(BODIES), data=st.data())
def test_what_is_described_is_parsed_leniently_too(body: Any, data: Any) -> None:
    names = [field for field in SCHEMAS[body.__name__]["properties"] if field not in UNREAD]
    field = data.draw(st.sampled_from(names))
    asked = MINIMAL[body] | {field: data.draw(VALUES)}
    if VALIDATORS[body].is_valid(asked):
        text = json.dumps(asked).encode()
        strictly = decoding.parse(msgspec.json.Decoder(body), text)
        assert decoding.parse(decoding.body_decoder(body), text) == strictly


def messages() -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(SCHEMAS["ChatMessage"]["properties"])
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=2)


def refuse_unread_parts(body: Any) -> None:
    """Refuse JSON of a wrong type in fields that the parser leaves to others."""
    for message in body.messages if isinstance(body, ChatRequest) else ():
        for raw in (message.function_call, message.audio):
            if bytes(raw) != b"null":
                raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "", "")
    asked = getattr(body, "structured_outputs", None)
    form = getattr(body, "response_format", None)
    schemas = [asked.json] if asked else []
    schemas += [form.json_schema.schema] if form and form.json_schema else []
    for options in (getattr(body, "text", None), getattr(body, "output_config", None)):
        schemas += [options.format.schema] if options and options.format else []
    for raw in schemas:
        if not isinstance(json.loads(bytes(raw)), dict | bool | str | None):
            raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "", "")


def test_each_status_of_an_error_is_described() -> None:
    given = {
        errors.http_status(ServiceError(code, reason, ""))
        for code in grpc.StatusCode
        for reason in ("", *errors.STATUSES_BY_REASON)
    }
    described = {
        int(status)
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    }
    # Nobody reads 499, and 206 and the like are not given. 101 opens a WebSocket.
    assert described == given - {errors.CLIENT_CLOSED} | {101, 200, 202}


@pytest.mark.parametrize("public_stats", [False, True])
@pytest.mark.parametrize("console", [None, {"local": True}])
def test_the_router_describes_each_path_it_serves(
    start_service: "StartService", public_stats: bool, console: Any
) -> None:
    sections = {"console": console} if console else {}

    async def scenario() -> None:
        http = {"host": "127.0.0.1", "port": 0, "public_stats": public_stats}
        async with start_service(http=http, **sections) as service:
            answer = await service.http.get("/openapi.json")
            assert answer.headers["content-type"] == "application/json"
            paths = answer.json()["paths"]
            for path, methods in paths.items():
                options = await service.http.options(path.replace("{name}", "x"))
                allowed = {method.lower() for method in options.headers["allow"].split(", ")}
                assert allowed == methods.keys(), path
            assert ("/stats" in paths, "/console" in paths) == (public_stats, bool(console))
            unknown = await service.http.get("/v1/nothing")
            assert unknown.status_code == 404
            again = await service.http.get("/openapi.json")
            assert again.content == answer.content

    asyncio.run(scenario())


# --- Answers ---

TOP = inference_pb2.Alternative(token="a", logprob=-1.5, token_bytes=b"a")
ENTRY = inference_pb2.TokenLogprob(token="b", logprob=-0.5, token_bytes=b"b", top=[TOP])
CALL = inference_pb2.ToolCallPiece(id="call_1", name="f", arguments='{"a":')
CUSTOM = inference_pb2.ToolCallPiece(index=1, id="call_2", name="c", arguments='{"input":"x')
SCORED = inference_pb2.PromptLogprobs(tokens=[ENTRY, ENTRY])
DELTAS = [
    inference_pb2.Delta(text="b", token_ids=[5], logprobs=[ENTRY]),
    inference_pb2.Delta(reasoning="because"),
    inference_pb2.Delta(tool_calls=[CALL]),
    inference_pb2.Delta(tool_calls=[inference_pb2.ToolCallPiece(arguments="1}")]),
    inference_pb2.Delta(tool_calls=[CUSTOM]),
    inference_pb2.Delta(tool_calls=[inference_pb2.ToolCallPiece(index=1, arguments='y"}')]),
]
ACCEPTED = inference_pb2.Accepted(prompt_token_ids=[1, 2])
FINISHED = inference_pb2.Finished(
    reason=inference_pb2.FINISH_REASON_TIMEOUT,
    usage=inference_pb2.Usage(
        prompt_tokens=2,
        completion_tokens=1,
        reasoning_tokens=1,
        cached_tokens=2,
        cached_by_tier=[inference_pb2.CachedTokens(tier="host", tokens=2)],
    ),
    resumed_inexact=True,
    resumed_on=["single-1"],
)


def options(**asked: Any) -> ResponseOptions:
    rest = {"logprobs": True, "token_ids": True, "usage": True, "n": 1} | asked
    rest["custom_tools"] = frozenset({"c"})
    return ResponseOptions(id="1", model="tiny", created=5, **rest)


def whole(form: Format) -> Any:
    part = Collected()
    for delta in (inference_pb2.Delta(prompt_logprobs=SCORED), *DELTAS):
        part.add(delta)
    return form.whole(ACCEPTED, [part], FINISHED)


def streamed(form: Format, deltas: Sequence[inference_pb2.Delta]) -> list[Any]:
    chunks = form.opening(ACCEPTED)
    for delta in deltas:
        chunks += form.piece(delta)
    return chunks + form.closing(FINISHED)


def examples() -> Iterator[tuple[Any, Any]]:
    """Yield answers as they are written, each with its type."""
    plain = options(logprobs=False, token_ids=False, usage=False)
    scored = options(prompt_logprobs=1, echo_logprobs=1)
    for asked in (plain, options(), options(tools=True), scored):
        yield answers.ChatCompletion, whole(ChatFormat(asked))
        yield answers.Completion, whole(CompletionFormat(asked))
        for chunk in streamed(ChatFormat(asked), DELTAS):
            yield answers.ChatChunk, chunk
        echo = inference_pb2.Delta(prompt_logprobs=SCORED)
        for chunk in streamed(CompletionFormat(asked), [echo, *DELTAS[:1]]):
            yield answers.CompletionChunk, chunk
    for error in (errors.no_engine(), errors.draining(), errors.unknown_path("/x", "/y")):
        yield answers.ErrorAnswer, msgspec.json.decode(envelope(error))
        yield answers.ErrorEvent, msgspec.json.decode(envelope(error, is_event=True))

    yield from response_examples()
    yield from message_examples()


ITEMS = [
    Item(role="user", content=[ItemPart("input_text", "x"), ItemPart("input_file", file_id="f")]),
    Item(role="assistant", content=[ItemPart("refusal", refusal="no")]),
    Item("reasoning", content="x", summary=[ItemPart("summary_text", "y")]),
    Item("function_call", call_id="c", name="f", namespace="ns", arguments="{}"),
    Item("custom_tool_call", call_id="c", name="f", namespace="ns", input="x"),
    Item("function_call_output", call_id="c", output="x"),
    Item("custom_tool_call_output", call_id="c", output="x"),
]


def response_examples() -> Iterator[tuple[Any, Any]]:
    """Yield answers and events of the Responses API, each with its type."""
    body = b'{"input": "x", "instructions": "y", "metadata": {"a": "b"}, "user": "me"}'
    asked = read_request(body, "", ResponseStore(ResponsesSection()), drops_turns=False)
    sampling = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0, "frequency_penalty": 0}
    namespaces = {"f": "ns", "c": "ns"}
    answer = ResponsesAnswer(
        SSE, asked.repeated | sampling, namespaces, frozenset({"c"}), None, options()
    )
    data = answer.opening(ACCEPTED)
    for delta in DELTAS:
        data += answer.of(inference_pb2.GenerateResponse(delta=delta))
    data += answer.of(inference_pb2.GenerateResponse(finished=FINISHED))
    data += answer.failed(errors.no_engine()) + RESPONSES_ERRORS.event(errors.no_engine())
    yield responses_answers.Response, answer.whole(ACCEPTED)
    yield responses_answers.InputItemList, json.loads(read_page(encode_items(ITEMS, None), {}))
    counted = CountAnswer(RESPONSES_ERRORS, COUNTED).whole(ACCEPTED)
    yield responses_answers.InputTokens, counted
    yield from events(responses_answers.EVENTS, data)


def message_examples() -> Iterator[tuple[Any, Any]]:
    """Yield answers and events of the Messages API, each with its type."""
    answer = MessagesAnswer(options(), shows_thinking=True)
    data = answer.opening(ACCEPTED)
    for delta in DELTAS:
        data += answer.of(inference_pb2.GenerateResponse(delta=delta))
    data += answer.of(inference_pb2.GenerateResponse(finished=FINISHED))
    yield messages_answers.MessageAnswer, answer.whole(ACCEPTED)
    yield messages_answers.TokenCount, CountAnswer(MESSAGES_ERRORS).whole(ACCEPTED)
    yield messages_answers.MessagesError, msgspec.json.decode(error_body(errors.no_engine()))
    yield from events(messages_answers.EVENTS, data + PING + error_event(errors.no_engine()))


def events(kinds: Sequence[Any], data: bytes) -> Iterator[tuple[Any, Any]]:
    """Yield the events of a stream, each with the type whose `type` it has."""
    by_type = {
        name: kind
        for kind in kinds
        for name in typing.get_args(typing.get_type_hints(kind)["type"])
    }
    for event in data.decode().split("\n\n"):
        name, _, line = event.rpartition("\ndata: ")
        if name:
            parsed = json.loads(line)
            assert name == f"event: {parsed['type']}"
            yield by_type[parsed["type"]], parsed


def test_answers_have_the_fields_that_are_described_and_no_others() -> None:
    seen: dict[str, set[str]] = {}
    kinds = set()
    for kind, answer in examples():
        decoded = msgspec.json.decode(msgspec.json.encode(answer), type=kind)
        validator(kind.__name__).validate(json.loads(msgspec.json.encode(answer)))
        kinds.add(kind)
        note_fields(decoded, seen)
    for kind in kinds:
        for struct in structs_in(kind):
            described = set(SCHEMAS[struct.__name__]["properties"])
            assert seen.get(struct.__name__) == described, struct


def note_fields(value: Any, seen: dict[str, set[str]]) -> None:
    """Add the names of the fields that are there, by structure."""
    if isinstance(value, msgspec.Struct):
        names = seen.setdefault(type(value).__name__, set())
        if tag := value.__struct_config__.tag_field:
            names.add(tag)
        for name in value.__struct_fields__:
            field = getattr(value, name)
            if field is not msgspec.UNSET:
                names.add(name)
                note_fields(field, seen)
    elif isinstance(value, list):
        for part in value:
            note_fields(part, seen)
    elif isinstance(value, dict):
        note_fields(list(value.values()), seen)


def test_pages_answer_as_described(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for path, methods in DOCUMENT["paths"].items():
                operation = methods.get("get")
                unknown = (
                    "/console",
                    "/stats",
                    "/metrics",
                    "/v1/responses",
                    "/v1/files",
                    "/v1/batches",
                )
                if operation is None or path.startswith(unknown):
                    continue
                answer = await service.http.get(path.replace("{name}", "tiny"))
                content = operation["responses"]["200"]["content"]["application/json"]
                schema = content["schema"] | {"components": DOCUMENT["components"]}
                jsonschema.Draft202012Validator(schema).validate(answer.json())

    asyncio.run(scenario())


def test_types_are_no_aliases_of_others() -> None:
    """Two structures of one name would be one component."""
    names = [struct.__name__ for struct in {*_all_structs()}]
    assert len(names) == len(set(names))


def _all_structs() -> Iterator[type[msgspec.Struct]]:
    for methods in openapi.OPERATIONS.values():
        for each in methods.values():
            for kind in (each.answer, each.body, *each.events, *each.more.values()):
                if not isinstance(kind, types.NoneType):
                    yield from structs_in(kind)
