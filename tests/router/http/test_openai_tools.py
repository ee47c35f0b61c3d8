"""Tools as the official client meets them: told to the model, forced on it, read from its text."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Oslo?"}]}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HARMONY = HERMES.replace("tool_call>", "|channel|>")


def told(service: "Service") -> str:
    """The prompt that the engine was sent last; tokens are bytes."""
    ids = service.engine.requests[-1].token_ids.ids
    return str(service.router.service.engines.model.decode(list(ids)))


def says(service: "Service", *words: str) -> None:
    service.engine.script.words = words


def functions(message: Any) -> list[tuple[str, Any]]:
    calls = message.tool_calls or []
    assert all(isinstance(c, ChatCompletionMessageFunctionToolCall) and c.id for c in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_a_call_and_the_turn_after_it(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, "Let me look.\n<tool", f"_call>{CALL}</tool_", "call>")
            chat = service.openai.chat.completions
            first = await chat.create(**ASK, tools=[WEATHER, CLOCK])
            assert f"<tools>{json.dumps([WEATHER, CLOCK])}</tools>" in told(service)
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me look."
            assert functions(choice.message) == [("get_weather", {"city": "Oslo"})]

            says(service, "It is cold.")
            call_id = choice.message.tool_calls[0].id
            result = {"role": "tool", "tool_call_id": call_id, "content": "-4"}
            turns = [*ASK["messages"], choice.message.model_dump(), result]
            last = await chat.create(model="tiny", messages=turns, tools=[WEATHER, CLOCK])
            assert told(service).endswith(
                f"<user>Oslo?\n<assistant>Let me look.<tool_call>{CALL}</tool_call>\n"
                "<tool>-4\n<assistant>"
            )
            assert last.choices[0].finish_reason == "stop"
            assert last.choices[0].message.content == "It is cold."
            assert last.choices[0].message.tool_calls is None

    asyncio.run(scenario())


def test_a_streamed_call(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            text = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
            says(service, *text)
            stream = await service.openai.chat.completions.create(
                **ASK, tools=[WEATHER], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            assert deltas[0].role == "assistant"
            assert not any(delta.content for delta in deltas)
            pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
            starts = [piece for piece in pieces if piece.function.name]
            assert [piece.index for piece in starts] == [0, 1]
            assert all(piece.id and piece.type == "function" for piece in starts)
            assert len(pieces) > len(starts)
            for index in (0, 1):
                parts = [piece.function.arguments for piece in pieces if piece.index == index]
                assert "".join(parts) == '{"city": "Oslo"}'
            assert chunks[-2].choices[0].finish_reason == "tool_calls"
            assert chunks[-1].usage.completion_tokens == len(text)

    asyncio.run(scenario())


def test_the_clients_stream_helper_puts_calls_together(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, f"<tool_call>{CALL}</tool_call>")
            completions = service.openai.chat.completions
            async with completions.stream(**ASK, tools=[WEATHER]) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert "tool_calls.function.arguments.done" in kinds
            assert final.choices[0].message.content is None
            assert functions(final.choices[0].message) == [("get_weather", {"city": "Oslo"})]

    asyncio.run(scenario())


def test_several_answers_are_read_each_by_itself(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, "<tool_call>", CALL, "</tool_call>")
            answer = await service.openai.chat.completions.create(**ASK, tools=[WEATHER], n=2)
            first, second = answer.choices
            assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
            assert functions(first.message) == [("get_weather", {"city": "Oslo"})]
            assert second.message.content == f"<tool_call>1{CALL}1</tool_call>1"

    asyncio.run(scenario())


def test_one_call_at_most(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
            answer = await service.openai.chat.completions.create(
                **ASK, tools=[WEATHER], parallel_tool_calls=False
            )
            assert len(functions(answer.choices[0].message)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("words", [("Just", " text"), ('{"some": "JSON"}',), (" ",)])
def test_text_stays_text(start_service: "StartService", words: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, *words)
            for choice in ("auto", "none"):
                answer = await service.openai.chat.completions.create(
                    **ASK, tools=[WEATHER], tool_choice=choice
                )
                assert answer.choices[0].message.content == "".join(words)
                assert answer.choices[0].finish_reason == "stop"
                assert ("<tools>" in told(service)) == (choice == "auto")

    asyncio.run(scenario())


def test_no_tool_choice_reads_no_calls(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, f"<tool_call>{CALL}</tool_call>")
            answer = await service.openai.chat.completions.create(
                **ASK, tools=[WEATHER], tool_choice="none"
            )
            assert answer.choices[0].message.content == f"<tool_call>{CALL}</tool_call>"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_forced_call_of_one_function(start_service: "StartService", choice: Any) -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, "{", "}")
            answer = await service.openai.chat.completions.create(
                **ASK, tools=[CLOCK], tool_choice=choice
            )
            assert told(service).endswith('<assistant><tool_call>\n{"name": "clock", "arguments":')
            schema = json.loads(service.engine.requests[-1].grammar.json_schema)
            assert schema == {"type": "object", "properties": {}, "additionalProperties": False}
            assert functions(answer.choices[0].message) == [("clock", {})]
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.choices[0].message.content is None

    asyncio.run(scenario())


def test_a_forced_call_streams_its_arguments(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            says(service, "get_wea", 'ther", "arguments": {"city"', ': "Os', 'lo"}')
            stream = await service.openai.chat.completions.create(
                **ASK, tools=[WEATHER, CLOCK], tool_choice="required", stream=True
            )
            pieces = [
                piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()
            ]
            assert pieces[0].function.name == "get_weather"
            assert [piece.function.arguments for piece in pieces] == ['{"city"', ': "Os', 'lo"}']
            assert {piece.index for piece in pieces} == {0}
            assert told(service).endswith('<assistant>{"name": "')
            lark = service.engine.requests[-1].grammar.lark
            assert lark.splitlines()[0] == "start: call0 | call1"

    asyncio.run(scenario())


def test_arguments_that_are_cut_off_end_with_length(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.reason = 2
            says(service, '{"city": "O')
            answer = await service.openai.chat.completions.create(
                **ASK, tools=[WEATHER], tool_choice="required"
            )
            assert answer.choices[0].finish_reason == "length"
            call = answer.choices[0].message.tool_calls[0]
            assert call.function.arguments == '{"city": "O'

    asyncio.run(scenario())


def test_harmony_sets_thoughts_apart_with_and_without_tools(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HARMONY) as service:
            thought = "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant"
            says(service, *thought, "<|channel|>final<|message|>", "Hi")
            chat = service.openai.chat.completions
            answer = await chat.create(**ASK)
            assert answer.choices[0].message.content == "Hi"
            extra = {"reasoning": "Hmm.", "reasoning_content": "Hmm."}
            assert answer.choices[0].message.model_extra == extra
            assert service.engine.requests[-1].output.special_tokens
            chunks = [chunk async for chunk in await chat.create(**ASK, stream=True)]
            extras = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
            assert "".join(e.get("reasoning_content") or "" for e in extras) == "Hmm."
            call = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"a":1}'
            says(service, thought, call)
            answer = await chat.create(**ASK, tools=[CLOCK])
            assert functions(answer.choices[0].message) == [("clock", {"a": 1})]

    asyncio.run(scenario())


THINK = HERMES.replace("<assistant>{%", "<assistant><think>\n{%")
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}},
}


def test_reasoning_comes_apart_from_the_text(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=THINK) as service:
            says(service, "Hm", "m.\n</th", "ink>", "\n\n", "Hi", "!")
            chat = service.openai.chat.completions
            answer = await chat.create(**ASK)
            message = answer.choices[0].message
            assert message.content == "Hi!"
            assert message.model_extra == {"reasoning": "Hmm.", "reasoning_content": "Hmm."}
            assert answer.usage.completion_tokens_details.reasoning_tokens == 3

            stream = await chat.create(**ASK, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            extras = [delta.model_extra or {} for delta in deltas]
            for name in ("reasoning", "reasoning_content"):
                assert [extra[name] for extra in extras if name in extra] == ["Hm", "m."]
            assert "".join(delta.content or "" for delta in deltas) == "Hi!"
            assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3

    asyncio.run(scenario())


def test_reasoning_can_be_left_out(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=THINK) as service:
            says(service, "Hm", "m.\n</th", "ink>", "\n\n", "Hi", "!")
            chat = service.openai.chat.completions
            hidden: Any = {**ASK, "extra_body": {"include_reasoning": False}}
            answer = await chat.create(**hidden)
            message = answer.choices[0].message
            assert (message.content, message.model_extra) == ("Hi!", {})
            assert answer.usage.completion_tokens_details.reasoning_tokens == 3

            stream = await chat.create(**hidden, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert not any(delta.model_extra for delta in deltas)
            assert "".join(delta.content or "" for delta in deltas) == "Hi!"

    asyncio.run(scenario())


def test_a_grammar_and_stop_strings_hold_after_the_reasoning(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(template=THINK) as service:
            chat = service.openai.chat.completions
            await chat.create(**ASK, response_format=SCHEMA)
            await chat.create(**ASK, stop="x")
            await chat.create(**ASK)
            asked = [request.reasoning for request in service.engine.requests]
            assert [(each.begin, each.end) for each in asked] == [("", "</think>")] * 2 + [("", "")]
            # A forced call has no reasoning, so the prompt ends what the template began.
            await chat.create(**ASK, tools=[CLOCK], tool_choice="required")
            opening = '</think>\n\n<tool_call>\n{"name": "clock", "arguments":'
            assert told(service).endswith(f"<assistant><think>\n\n{opening}")
            assert not service.engine.requests[-1].reasoning.end

    asyncio.run(scenario())


def test_reasoning_that_is_off_stays_text(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=THINK, prompts={"reasoning": "off"}) as service:
            says(service, "Hmm.</think>Hi")
            answer = await service.openai.chat.completions.create(**ASK)
            assert answer.choices[0].message.content == "Hmm.</think>Hi"
            assert answer.usage.completion_tokens_details is None

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_template_gets_the_reasoning_of_earlier_turns(
    start_service: "StartService", name: str
) -> None:
    async def scenario() -> None:
        shows = HERMES.replace("{{ m.content }}", "{{ m.reasoning_content }}|{{ m.content }}")
        async with start_service(template=shows) as service:
            said = {"role": "assistant", "content": None, name: "So."}
            again = {"role": "user", "content": "And?"}
            await service.openai.chat.completions.create(
                model="tiny", messages=[*ASK["messages"], said, again]
            )
            assert "<assistant>So.|\n<user>" in told(service)

    asyncio.run(scenario())


def test_several_forced_calls(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            first = 'get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
            says(
                service,
                first,
                '\n<tool_call>\n{"name": "clock", "argu',
                'ments": {}}\n</tool_call>',
            )
            answer = await service.openai.chat.completions.create(
                **ASK, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=True
            )
            calls = [("get_weather", {"city": "Oslo"}), ("clock", {})]
            assert functions(answer.choices[0].message) == calls
            assert answer.choices[0].message.content is None
            assert answer.choices[0].finish_reason == "tool_calls"

    asyncio.run(scenario())


def tools_of(*names: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": name}} for name in names]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "two words"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
        "tools[0].custom.format.type",
    ),
    ({"tools": [CLOCK], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": tools_of("two words")}, "tools[0].function.name"),
    ({"tools": tools_of("a", "a")}, "tools"),
    ({"tools": tools_of(*(f"f{i}" for i in range(513)))}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0]."),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ]
        },
        "tools[0].function.parameters.type",
    ),
    ({"tools": [{"type": "function", "x": "\ud800"}]}, "body"),
    ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "echo": True}, "echo"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}
            ]
        },
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
]


def test_wrong_tools(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for extra, field in WRONG:
                answer = await service.http.post(
                    "/v1/chat/completions",
                    content=json.dumps({**ASK, **extra}),
                    headers={"content-type": "application/json"},
                )
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), extra
                assert error["param"].startswith(field), error
            with pytest.raises(openai.BadRequestError, match="tools"):
                await service.openai.chat.completions.create(
                    **ASK, extra_body={"functions": [{"name": "f"}]}
                )
            assert not service.engine.requests

    asyncio.run(scenario())
