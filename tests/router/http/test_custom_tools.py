"""Tools whose input is free text, in chats and in the Responses API, with the official client."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    Service = Any
    StartService = Any

INPUT = 'print("hé\n")\n'
SHELL: Any = {"type": "custom", "custom": {"name": "shell", "description": "Runs code"}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Run"}]}
CALL = json.dumps({"name": "shell", "arguments": {"input": INPUT}})
OTHER = '{"name": "shell", "arguments": {"code": 7}}'
TIME = '{"name": "clock", "arguments": {}}'
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def told(service: "Service") -> str:
    ids = service.engine.requests[-1].token_ids.ids
    return str(service.router.service.engines.model.decode(list(ids)))


def says(service: "Service", text: str, size: int = 3) -> None:
    service.engine.script.words = tuple(text[i : i + size] for i in range(0, len(text), size))


def calls(text: str, *more: str) -> str:
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in (text, *more))


def test_a_chat_whole_and_streamed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, calls(CALL, TIME, OTHER))
            chats = service.openai.chat.completions
            answer = await chats.create(**ASK, tools=[SHELL, CLOCK])
            shell, clock, other = answer.choices[0].message.tool_calls
            assert (shell.type, shell.custom.name, shell.custom.input) == ("custom", "shell", INPUT)
            assert (clock.type, clock.function.name) == ("function", "clock")
            assert other.custom.input == '{"code": 7}'
            assert answer.choices[0].finish_reason == "tool_calls"
            shown = json.loads(told(service).partition("<tools>")[2].partition("</tools>")[0])
            assert shown[0]["function"]["parameters"]["required"] == ["input"]
            assert shown[0]["function"]["description"] == "Runs code"

            found: dict[int, dict[str, Any]] = {}
            num_inputs = 0
            stream = await chats.create(**ASK, tools=[SHELL, CLOCK], stream=True)
            async for chunk in stream:
                for piece in chunk.choices[0].delta.tool_calls or []:
                    own = found.setdefault(piece.index, {"input": "", "arguments": ""})
                    if piece.id:
                        own |= {"id": piece.id, "type": piece.type}
                    custom = (piece.model_extra or {}).get("custom")
                    if custom:
                        own["name"] = custom.get("name", own.get("name"))
                        own["input"] += custom["input"]
                        num_inputs += bool(custom["input"])
                    elif piece.function:
                        own["arguments"] += piece.function.arguments
            assert [each["type"] for each in found.values()] == ["custom", "function", "custom"]
            assert [each["input"] for each in found.values()] == [INPUT, "", '{"code": 7}']
            assert found[1]["arguments"] == "{}"
            assert num_inputs > 3

    asyncio.run(scenario())


def test_a_chat_goes_on_behind_a_call(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            called = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": INPUT}}
            messages = [
                *ASK["messages"],
                {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "c1", "content": "hé"},
            ]
            await service.openai.chat.completions.create(
                model="tiny", messages=messages, tools=[SHELL]
            )
            written = told(service).partition("<tool_call>")[2].partition("</tool_call>")[0]
            assert json.loads(written) == {"name": "shell", "arguments": {"input": INPUT}}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "custom", "custom": {"name": "shell"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "shell"}}],
            },
        },
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_is_forced(start_service: "StartService", choice: Any) -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, json.dumps({"input": INPUT}))
            answer = await service.openai.chat.completions.create(
                **ASK, tools=[SHELL], tool_choice=choice
            )
            [call] = answer.choices[0].message.tool_calls
            assert call.custom.input == INPUT
            schema = json.loads(service.engine.requests[-1].grammar.json_schema)
            assert schema["properties"] == {"input": {"type": "string"}}

    asyncio.run(scenario())


def test_a_call_that_is_cut_has_the_beginning_of_its_input(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            says(service, f"<tool_call>{CALL[:-12]}")
            answer = await service.openai.chat.completions.create(**ASK, tools=[SHELL])
            [call] = answer.choices[0].message.tool_calls
            assert call.custom.input
            assert INPUT.startswith(call.custom.input)

    asyncio.run(scenario())


def test_a_response_whole_and_streamed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(
            template=HERMES, routing={"responses": {"enabled": True}}
        ) as service:
            says(service, calls(CALL, OTHER))
            shell: Any = {"type": "custom", "name": "shell", "description": "Runs code"}
            ask: Any = {"model": "tiny", "input": "Run", "tools": [shell]}
            answer = await service.openai.responses.create(**ask)
            first, second = answer.output
            assert (first.type, first.name, first.input) == ("custom_tool_call", "shell", INPUT)
            assert second.input == '{"code": 7}'
            assert answer.tools[0].type == "custom"
            assert answer.tools[0].format.type == "text"

            stream = await service.openai.responses.create(**ask, stream=True)
            inputs: dict[str, str] = {}
            done: dict[str, str] = {}
            items: list[Any] = []
            async for event in stream:
                if event.type == "response.custom_tool_call_input.delta":
                    inputs[event.item_id] = inputs.get(event.item_id, "") + event.delta
                if event.type == "response.custom_tool_call_input.done":
                    done[event.item_id] = event.input
                if event.type == "response.output_item.done":
                    items.append(event.item)
            assert inputs == done
            assert [*done.values()] == [INPUT, '{"code": 7}'] == [item.input for item in items]

            # The call as an item, and as a stored response.
            result = {"type": "custom_tool_call_output", "call_id": first.call_id, "output": "hé"}
            given = {"type": "custom_tool_call", "call_id": first.call_id, "name": "shell"}
            for more in (
                {"input": [given | {"input": INPUT}, result]},
                {"input": [result], "previous_response_id": answer.id},
            ):
                await service.openai.responses.create(**ask | more)
                written = told(service).partition("<tool_call>")[2].partition("</tool_call>")[0]
                assert json.loads(written) == {"name": "shell", "arguments": {"input": INPUT}}

            says(service, json.dumps({"input": INPUT}))
            forced = await service.openai.responses.create(
                **ask, tool_choice={"type": "custom", "name": "shell"}
            )
            assert forced.output[0].input == INPUT
            assert service.engine.requests[-1].HasField("grammar")

    asyncio.run(scenario())
