"""What real clients send, taken as vLLM takes it, and what has no effect named in a header."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.wire.errors import ServiceError
from ullage_router.http.openai.decoding import parse_fields
from ullage_router.http.openai.errors import ignored_header
from ullage_router.http.openai.requests import from_chat, parse_chat

if TYPE_CHECKING:
    StartService = Any

TURNS = [{"role": "user", "content": "Hi"}]
IGNORED = "x-ullage-ignored"


def chat_of(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return from_chat(parse_chat(json.dumps(body).encode())[0])


# --- Numbers and text ---


@given(number=st.integers(1, 2**31), form=st.sampled_from(["{}", "{}.0", '"{}"', '"{}.0"']))
def test_whole_numbers_in_any_form(number: int, form: str) -> None:
    text = form.format(number)
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": {text}}}'
    assert from_chat(parse_chat(body.encode())[0]).stop.max_tokens == number


@pytest.mark.parametrize("value", ["100.5", '"100.5"', '"ten"', "true", '""', "[1]", "0", '"0"'])
def test_other_numbers_are_refused_by_name(value: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": {value}}}'
    with pytest.raises(ServiceError) as caught:
        parse_chat(body.encode())
    assert caught.value.metadata["field"] == "max_tokens"


@given(text=st.text(alphabet=st.characters(codec="utf-8")) | st.sampled_from(["1", "null", "true"]))
def test_text_is_never_read_as_a_number(text: str) -> None:
    fields = {"stop": [text] if text else [], "prompt_cache_key": text}
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    chat, _ = parse_chat(body)
    assert chat.messages[0].content == text
    assert chat.stop == fields["stop"]
    assert chat.prompt_cache_key == text


@given(parts=st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=8), min_size=1))
def test_parts_are_joined_by_line_breaks(parts: list[str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    request = chat_of(messages=[{"role": "user", "content": content}])
    assert request.messages.messages[0].content == "\n".join(parts)


def test_long_bodies_are_read_alike() -> None:
    long = "x" * 300_000
    chat, ignored = parse_chat(
        json.dumps(
            {
                "messages": [{"role": "user", "content": long}],
                "max_tokens": "7",
                "seed": 3.0,
                "user": "me",
                "nothing": None,
            }
        ).encode()
    )
    assert (chat.max_tokens, chat.seed, ignored) == (7, 3, ("user",))


def test_a_strict_decoder_stays_strict() -> None:
    class Body(msgspec.Struct):
        n: int

        def refused(self) -> None: ...

    with pytest.raises(ServiceError):
        parse_fields(msgspec.json.Decoder(Body), b'{"n": "1"}')


def test_top_p_0_means_the_likeliest_token() -> None:
    request = chat_of(top_p=0, top_k=50)
    assert request.sampling.top_k == 1
    assert not request.sampling.HasField("top_p")


def test_fields_reach_the_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.chat(
                skip_special_tokens=False,
                include_stop_str_in_output=True,
                allowed_token_ids=[5, 7],
                top_p=0.0,
            )
            assert answer.status_code == 200, answer.text
            sent = service.engine.requests[0]
            assert sent.output.special_tokens
            assert sent.output.include_stop
            assert list(sent.sampling.allowed_token_ids) == [5, 7]
            assert sent.sampling.top_k == 1
            assert IGNORED not in answer.headers

    asyncio.run(scenario())


def test_marks_for_the_router_do_not_end_the_text(start_service: "StartService") -> None:
    """The router wants special tokens for calls, and the client wants stop strings only."""

    async def scenario() -> None:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}<|channel|>"
        async with start_service(template=template) as service:
            for more, omits in (
                ({"include_stop_str_in_output": True}, True),
                ({"include_stop_str_in_output": True, "skip_special_tokens": False}, False),
                ({}, False),
            ):
                answer = await service.chat(**more)
                assert answer.status_code == 200, answer.text
                sent = service.engine.requests[-1].output
                assert sent.special_tokens
                assert sent.omit_special_stop is omits
                assert sent.include_stop is ("include_stop_str_in_output" in more)

    asyncio.run(scenario())


# --- What is ignored ---


def test_what_is_ignored_is_named(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            more = {
                "user": "me",
                "reasoning_effort": "high",
                "chat_template_kwargs": {"a": False},
                "unheard, of": 1,
                "absent": None,
            }
            expected = "unheard%2C%20of, user, chat_template_kwargs.a, reasoning_effort"
            for is_streamed in (False, True):
                answer = await service.chat(stream=is_streamed, **more)
                assert answer.status_code == 200, answer.text
                assert answer.headers[IGNORED] == expected
            completion = await service.complete(reasoning_effort="low")
            assert completion.headers[IGNORED] == "reasoning_effort"
            effort = await service.chat(reasoning_effort="medium")
            assert IGNORED not in effort.headers

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": "5", "service_tier": "auto"}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 5.0, "service_tier": "auto"}),
        ("/v1/messages/count_tokens", {"messages": TURNS, "service_tier": "auto"}),
    ],
)
def test_other_apis_are_read_alike(
    start_service: "StartService", path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers[IGNORED] == "service_tier"
            if not path.endswith("count_tokens"):
                assert service.engine.requests[-1].stop.max_tokens == 5
                streamed = await service.http.post(path, json=body | {"stream": True})
                assert streamed.headers[IGNORED] == "service_tier"

    asyncio.run(scenario())


def test_grpc_names_it_too(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            request = chat_of(reasoning_effort="high")
            events = [event async for event in service.grpc.Generate(request)]
            assert list(events[0].accepted.ignored) == ["reasoning_effort"]

    asyncio.run(scenario())


@given(names=st.lists(st.text(max_size=120), max_size=40))
def test_no_name_breaks_the_header(names: list[str]) -> None:
    value = ignored_header(names)
    assert value.isascii()
    assert value.isprintable()
    assert len(value.split(", ")) <= 17
    if len(names) > 16:
        assert value.endswith(f"+{len(names) - 16}")


# --- Conversations ---


def test_an_assistant_without_content(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            turns = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "b"},
            ]
            answer = await service.chat(messages=turns, return_token_ids=True)
            prompt = "<user>a\n<assistant>\n<user>b\n<assistant>"
            assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
            wrong = await service.chat(messages=[{"role": "user", "content": None}])
            assert wrong.json()["error"]["param"] == "messages[0].content"

    asyncio.run(scenario())


def test_how_the_prompt_ends(start_service: "StartService") -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "it is "}]
    expected = {
        "<user>a\n<assistant>it is \n<assistant>": {},
        "<user>a\n<assistant>it is \n": {"add_generation_prompt": False},
        "<user>a\n<assistant>it is ": {
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    }

    async def scenario() -> None:
        async with start_service() as service:
            decode = service.router.service.engines.model.decode
            for prompt, fields in expected.items():
                answer = await service.chat(messages=turns, return_token_ids=True, **fields)
                assert answer.status_code == 200, answer.text
                assert decode(answer.json()["prompt_token_ids"]) == prompt
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"add_generation_prompt": True}, "add_generation_prompt"),
                ({"messages": [{"role": "user", "content": ""}]}, "messages"),
            ]
            for fields, field in wrong:
                answer = await service.chat(
                    **{"messages": turns, "continue_final_message": True, **fields}
                )
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == field

    asyncio.run(scenario())


def test_a_prompt_is_cut_to_its_end(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(max_model_len=100) as service:
            decode = service.router.service.engines.model.decode
            cases: list[tuple[Any, int, int, str]] = [
                ("abcdef", 3, 5, "def"),
                ("abcdef", 50, 5, "abcdef"),
                ("x" * 150 + "y" * 60, -1, 40, "y" * 60),
                (list(range(60)) * 3, 2, 5, decode([58, 59])),
            ]
            for prompt, most, max_tokens, kept in cases:
                answer = await service.complete(
                    prompt,
                    truncate_prompt_tokens=most,
                    max_tokens=max_tokens,
                    return_token_ids=True,
                )
                assert answer.status_code == 200, answer.text
                assert decode(answer.json()["choices"][0]["prompt_token_ids"]) == kept
                answer = await service.complete(
                    prompt, truncate_prompt_tokens=most, max_tokens=max_tokens, echo=True
                )
                assert answer.json()["choices"][0]["text"] == kept + "Hello big world"
            chat = await service.chat("z" * 120, truncate_prompt_tokens=11, return_token_ids=True)
            assert decode(chat.json()["prompt_token_ids"]) == "<assistant>"
            for wrong in (0, -2):
                answer = await service.complete(truncate_prompt_tokens=wrong)
                assert answer.json()["error"]["param"] == "truncate_prompt_tokens"

    asyncio.run(scenario())


# --- Tools ---


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_many_tools_with_names_of_mcp(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            tools = [tool(f"mcp:server/t{i}") for i in range(512)]
            answer = await service.chat(tools=tools, tool_choice="none")
            assert answer.status_code == 200, answer.text
            answer = await service.chat(tools=[*tools, tool("one_more")], tool_choice="none")
            assert answer.json()["error"]["param"] == "tools"

    asyncio.run(scenario())


def test_allowed_tools() -> None:
    def choice(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    tools = [tool("a"), tool("b"), tool("c")]
    sent = chat_of(tools=tools, tool_choice=choice("required", "c", "a")).messages.tools
    assert [each["function"]["name"] for each in json.loads(sent.functions)] == ["c", "a"]
    assert json.loads(sent.functions)[0] == tools[2]
    auto = chat_of(tools=tools, tool_choice=choice("auto", "b")).messages.tools
    assert auto.mode != sent.mode
    for wrong in (choice("auto", "d"), choice("auto")):
        with pytest.raises(ServiceError) as caught:
            chat_of(tools=tools, tool_choice=wrong)
        assert caught.value.metadata["field"].startswith("tool_choice.allowed_tools.tools")


def test_annotations_of_forced_schemas(start_service: "StartService") -> None:
    properties = {
        "at": {"type": "string", "format": "uri-reference", "title": "Where"},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "uniqueItems": True},
        "one": {"type": "array", "uniqueItems": True, "maxItems": 1},
        "format": {"enum": [{"format": "uri-reference"}]},
    }

    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.words = ("{}",)
            answer = await service.chat(tools=[tool("f", **properties)], tool_choice="required")
            assert answer.status_code == 200, answer.text
            path = "tools.f.parameters.properties"
            assert answer.headers[IGNORED] == f"{path}.at.format, {path}.one.uniqueItems"
            kept = json.loads(service.engine.requests[0].grammar.json_schema)["properties"]
            assert kept["at"] == {"type": "string", "title": "Where"}
            assert kept["day"] == properties["day"]
            assert kept["tags"] == properties["tags"]  # an assertion, which the engine refuses
            assert kept["format"] == properties["format"]

    asyncio.run(scenario())


# --- Answers ---


def test_tokens_by_their_ids(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.chat(
                logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True
            )
            first = answer.json()["choices"][0]["logprobs"]["content"][0]
            assert first["token"] == "token_id:0"
            assert first["top_logprobs"][0]["token"].startswith("token_id:")
            assert bytes(first["bytes"]) == b"Hello"
            answer = await service.complete(logprobs=1, return_tokens_as_token_ids=True)
            logprobs = answer.json()["choices"][0]["logprobs"]
            assert logprobs["tokens"] == ["token_id:0", "token_id:1", "token_id:2"]
            assert "token_id:0" in logprobs["top_logprobs"][0]
            assert logprobs["text_offset"] == [0, 5, 9]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_chat", [False, True])
def test_continuous_usage(start_service: "StartService", is_chat: bool) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            ask = service.chat if is_chat else service.complete
            options = {"include_usage": True, "continuous_usage_stats": True}
            answer = await ask(stream=True, stream_options=options)
            lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
            usages = [json.loads(line)["usage"] for line in lines]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == [*([0] if is_chat else []), 1, 2, 3, 3, 3]
            assert len({usage["prompt_tokens"] for usage in usages}) == 1
            assert usages[-1] == usages[-2]

    asyncio.run(scenario())
