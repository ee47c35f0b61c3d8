"""OpenAI's Responses API, as its official client and a plain one meet it."""

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import ResponsesSection
from ullage_common.wire.errors import ServiceError
from ullage_router.http.limits import BodyRoom, HTTPLimits
from ullage_router.http.messages import Request
from ullage_router.http.responses.store import OVERHEAD_BYTES, ResponseStore, StoredResponse
from ullage_router.intake import IntakeThread

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WORDS = "Hello big world"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": True,
}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HARMONY = HERMES.replace("tool_call>", "|channel|>")
EMPTY = StoredResponse(b"", b"", b"", "")
STORING: Any = {"routing": {"responses": {"enabled": True}}}


def told(service: "Service") -> str:
    """Return the prompt that the engine was sent last. Its tokens are bytes."""
    ids = service.engine.requests[-1].token_ids.ids
    return str(service.router.service.engines.model.decode(list(ids)))


def test_a_whole_response(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.openai.responses.create(
                model="tiny",
                instructions="Be kind.",
                input="Hi",
                max_output_tokens=10,
                metadata={"a": "b"},
                extra_body={"seed": 5},
            )
            assert answer.output_text == WORDS
            assert (answer.status, answer.store, answer.metadata) == (
                "completed",
                False,
                {"a": "b"},
            )
            assert answer.id.startswith("resp_")
            assert answer.instructions == "Be kind."
            assert answer.usage.output_tokens == 3
            assert answer.usage.total_tokens == answer.usage.input_tokens + 3
            assert told(service) == "<system>Be kind.\n<user>Hi\n<assistant>"
            sent = service.engine.requests[0]
            assert (sent.stop.max_tokens, sent.sampling.seed) == (10, 5)

    asyncio.run(scenario())


def test_a_stream_has_the_events_in_their_order(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stream = await service.openai.responses.create(model="tiny", input="Hi", stream=True)
            events = [event async for event in stream]
            assert [event.type.removeprefix("response.") for event in events] == [
                "created",
                "in_progress",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "completed",
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1].response
            assert last.output_text == events[7].text == WORDS
            assert last.output[0].id == events[4].item_id == events[2].item.id
            assert events[0].response.id == last.id
            assert events[0].response.output == []

            async with service.openai.responses.stream(model="tiny", input="Hi") as helped:
                assert (await helped.get_final_response()).output_text == WORDS

    asyncio.run(scenario())


def test_items_become_turns(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            items: Any = [
                {"role": "developer", "content": [
                    {"type": "input_text", "text": "Be kind."},
                    {"type": "input_text", "text": "Be brief."},
                ]},
                {"role": "user", "content": "Oslo?"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                    {"type": "reasoning_text", "text": "Hm"}
                ]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                 "content": [{"type": "output_text", "text": "Look.", "annotations": []}]},
                {"type": "function_call", "call_id": "c1", "name": "get_weather",
                 "arguments": '{"city": "Oslo"}'},
                {"type": "function_call", "call_id": "c2", "name": "get_weather",
                 "arguments": '{"city": "Rome"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "-4"},
                {"type": "function_call_output", "call_id": "c2", "output": [
                    {"type": "input_text", "text": "20"}
                ]},
            ]  # fmt: skip
            await service.openai.responses.create(model="tiny", input=items)
            rome = CALL.replace("Oslo", "Rome")
            assert told(service) == (
                "<system>Be kind.\nBe brief.\n<user>Oslo?\n<assistant>Look.<think>Hm</think>"
                f"<tool_call>{CALL}</tool_call><tool_call>{rome}</tool_call>\n"
                "<tool>-4\n<tool>20\n<assistant>"
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
def test_an_output_without_its_call_is_refused(start_service: "StartService", kind: str) -> None:
    """A template would show it to the model as the result of a call that nobody made."""

    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            call: Any = {"type": kind, "call_id": "c1", "name": "f", "arguments": "{}"}
            output: Any = {"type": f"{kind}_output", "call_id": "c1", "output": "-4"}
            other = {**output, "call_id": "c2"}
            for items, place in (([output], 0), ([output, call], 0), ([call, other], 1)):
                with pytest.raises(openai.BadRequestError, match="no earlier item") as caught:
                    await service.openai.responses.create(model="tiny", input=items)
                assert caught.value.param == f"input[{place}].call_id"
            await service.openai.responses.create(model="tiny", input=[call, output])
            assert len(service.engine.requests) == 1

    asyncio.run(scenario())


def test_an_image_is_refused_by_name(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
            items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "?"}, image]}]
            with pytest.raises(openai.BadRequestError, match="possible: input_text") as caught:
                await service.openai.responses.create(model="tiny", input=items)
            assert caught.value.param == "input[0].content[1].type"

    asyncio.run(scenario())


def test_a_call_whole_and_streamed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            service.engine.script.words = ("Look.\n<tool", f"_call>{CALL}</tool_", "call>")
            ask: Any = {"model": "tiny", "input": "Oslo?", "tools": [WEATHER]}
            answer = await service.openai.responses.create(**ask)
            assert '<tools>[{"type": "function", "function": {"name":' in told(service)
            assert [item.type for item in answer.output] == ["message", "function_call"]
            assert json.loads(answer.output[1].arguments) == {"city": "Oslo"}
            assert answer.tools[0].strict is True

            stream = await service.openai.responses.create(**ask, stream=True)
            events = {event.type.removeprefix("response."): event async for event in stream}
            done = events["function_call_arguments.done"]
            assert json.loads(done.arguments) == {"city": "Oslo"}
            assert events["function_call_arguments.delta"].item_id == done.item_id
            assert events["output_item.done"].item.call_id.startswith("call_")
            assert events["completed"].response.output[1].name == "get_weather"

            forced = await service.openai.responses.create(
                **ask,
                tool_choice={"type": "function", "name": "get_weather"},
                parallel_tool_calls=False,
            )
            assert forced.tool_choice.name == "get_weather"
            assert service.engine.requests[-1].HasField("grammar")

    asyncio.run(scenario())


def test_required_gives_several_calls_where_they_are_allowed(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            first = 'get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
            second = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}'
            service.engine.script.words = (first, second, "\n</tool_call>")
            ask: Any = {"model": "tiny", "input": "Oslo?", "tools": [WEATHER]}
            answer = await service.openai.responses.create(
                **ask, tool_choice="required", parallel_tool_calls=True
            )
            cities = [json.loads(item.arguments)["city"] for item in answer.output]
            assert cities == ["Oslo", "Rome"]
            assert answer.parallel_tool_calls is True

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("template", "more", "is_parallel"),
    [
        (HERMES, {}, True),
        (HERMES, {"parallel_tool_calls": False}, False),
        (HERMES, {"tool_choice": "required"}, False),
        (HERMES, {"tool_choice": "required", "parallel_tool_calls": True}, True),
        (HERMES, {"tool_choice": {"type": "function", "name": "get_weather"}}, False),
        # Forced calls of this format are one.
        (HARMONY, {"tool_choice": "required", "parallel_tool_calls": True}, False),
        (HARMONY, {"parallel_tool_calls": True}, True),
    ],
    ids=str,
)
def test_a_response_says_whether_several_calls_may_come(
    start_service: "StartService", template: str, more: Any, is_parallel: bool
) -> None:
    async def scenario() -> None:
        async with start_service(template=template) as service:
            body = {"model": "tiny", "input": "Oslo?", "tools": [WEATHER], **more}
            answer = (await service.http.post("/v1/responses", json=body)).json()
            assert answer["parallel_tool_calls"] is is_parallel

    asyncio.run(scenario())


def test_functions_may_be_in_a_namespace(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            call = CALL.replace("get_weather", "sky.get_weather")
            service.engine.script.words = (f"<tool_call>{call}</tool_call>",)
            tool = {"type": "namespace", "name": "sky", "description": "d", "tools": [WEATHER]}
            body = {"model": "tiny", "input": "Oslo?", "tools": [tool]}
            answer = (await service.http.post("/v1/responses", json=body)).json()
            assert '"name": "sky.get_weather"' in told(service)
            item = answer["output"][0]
            assert (item["namespace"], item["name"]) == ("sky", "get_weather")
            assert answer["tools"][0]["tools"][0]["name"] == "get_weather"

            result = {"type": "function_call_output", "call_id": item["call_id"], "output": "-4"}
            await service.http.post("/v1/responses", json=body | {"input": [item, result]})
            assert f"<tool_call>{call}</tool_call>" in told(service)

    asyncio.run(scenario())


def test_reasoning_is_an_item(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HARMONY) as service:
            service.engine.script.words = (
                "<|channel|>analysis<|message|>Hm",
                ", so<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            )
            answer = await service.openai.responses.create(model="tiny", input="Hi")
            thought, said = answer.output
            assert (thought.type, thought.content[0].text) == ("reasoning", "Hm, so")
            assert said.content[0].text == "Yes"
            # The second token has four characters of the reasoning and three of the text.
            assert answer.usage.output_tokens_details.reasoning_tokens == 2
            chat = (await service.chat()).json()
            assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2

            stream = await service.openai.responses.create(model="tiny", input="Hi", stream=True)
            kinds = [event.type async for event in stream]
            assert kinds.index("response.reasoning_text.done") < kinds.index(
                "response.output_text.delta"
            )

    asyncio.run(scenario())


def test_formats_and_logprobs(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            form: Any = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
            answer = await service.openai.responses.create(
                model="tiny",
                input="Hi",
                text={"format": form},
                include=["message.output_text.logprobs"],
                top_logprobs=1,
            )
            assert answer.text.format.name == "a"
            sent = service.engine.requests[0]
            assert json.loads(sent.grammar.json_schema) == schema
            assert sent.output.top_logprobs == 1
            assert len(answer.output[0].content[0].logprobs) == 3

    asyncio.run(scenario())


def test_an_answer_that_is_cut_is_incomplete(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.reason = inference_pb2.FINISH_REASON_LENGTH
            answer = await service.openai.responses.create(model="tiny", input="Hi")
            assert answer.status == answer.output[0].status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
            stream = await service.openai.responses.create(model="tiny", input="Hi", stream=True)
            assert [event.type async for event in stream][-1] == "response.incomplete"

    asyncio.run(scenario())


def test_a_stream_that_breaks_off_has_failed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing={"placement": {"retries": {"attempts": 0}}}) as service:
            service.engine.script.fail_after = 1
            service.engine.script.failure = ServiceError(
                grpc.StatusCode.INTERNAL, "REQUEST_FAILED", "its step cannot be computed"
            )
            stream = await service.openai.responses.create(model="tiny", input="Hi", stream=True)
            last = [event async for event in stream][-1]
            assert last.type == "response.failed"
            assert last.response.status == "failed"
            assert last.response.error.code == "REQUEST_FAILED"

    asyncio.run(scenario())


def test_a_stream_that_breaks_off_before_its_first_word_was_created(
    start_service: "StartService",
) -> None:
    """The stream helper of the official client takes no other event first.

    A word that may begin a call is held back, so that nothing is sent before the failure.
    """

    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            service.engine.script.words = ("<tool_", "call>")
            service.engine.script.fail_after = 1
            service.engine.script.failure = ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_FAILED", "its step cannot be computed"
            )
            async with service.openai.responses.stream(
                model="tiny", input="Oslo?", tools=[WEATHER]
            ) as stream:
                events = [event async for event in stream]
            assert [event.type for event in events] == [
                "response.created",
                "response.in_progress",
                "response.failed",
            ]
            assert [event.sequence_number for event in events] == [0, 1, 2]

    asyncio.run(scenario())


def test_a_refusal_keeps_its_status_and_retry_after(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.refuse = ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=3
            )
            with pytest.raises(openai.RateLimitError) as caught:
                await service.openai.responses.create(
                    model="tiny", input="Hi", extra_headers={"x-ullage-timeout": "2"}
                )
            assert int(caught.value.response.headers["retry-after"]) >= 1

    asyncio.run(scenario())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"truncation": "half"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0].type",
    ),
    (
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
        "tools[0].format.type",
    ),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    (
        {"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]},
        "tools[0].parameters.type",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "b"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
]


def test_what_cannot_be_served_is_refused_by_name(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for more, field in REFUSED:
                answer = await service.http.post(
                    "/v1/responses", json={"model": "tiny", "input": "Hi", **more}
                )
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), more
                assert (
                    field.partition("[")[0].partition(".")[0] in answer.json()["error"]["message"]
                )
            assert not service.engine.requests
            missing = await service.http.get("/v1/responses/resp_1")
            assert missing.status_code == 404
            assert "spec.routing.responses" in missing.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_stored_response_is_continued_read_and_deleted(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            responses = service.openai.responses
            first = await responses.create(model="tiny", input="Hi", instructions="Be kind.")
            assert first.store is True
            service.engine.script.words = ("Bye",)
            second = await responses.create(
                model="tiny", input="And?", previous_response_id=first.id, stream=True
            )
            last = [event async for event in second][-1].response
            # Instructions hold for one request, as in OpenAI's API.
            assert told(service) == f"<user>Hi\n<assistant>{WORDS}\n<user>And?\n<assistant>"

            found = await responses.retrieve(last.id)
            assert found.output_text == "Bye"
            assert found.previous_response_id == first.id
            slashed = f"/v1/responses/{last.id}/"
            assert (await service.http.get(slashed)).json()["id"] == last.id
            await responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(first.id)
            with pytest.raises(openai.BadRequestError) as caught:
                await responses.create(model="tiny", input="x", previous_response_id=first.id)
            assert caught.value.code == "previous_response_not_found"
            # Later responses have the whole conversation.
            await responses.create(model="tiny", input="So?", previous_response_id=last.id)
            assert told(service).endswith("<user>And?\n<assistant>Bye\n<user>So?\n<assistant>")

            unstored = await responses.create(model="tiny", input="Hi", store=False)
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(unstored.id)

    asyncio.run(scenario())


def test_a_request_id_that_comes_twice_replaces_no_response(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            ask: Any = {"model": "tiny", "input": "Hi", "extra_headers": {"x-request-id": "mine"}}
            first = await service.openai.responses.create(**ask)
            service.engine.script.words = ("Bye",)
            second = await service.openai.responses.create(**ask)
            assert first.id != second.id
            for answer, said in ((first, WORDS), (second, "Bye")):
                found = await service.openai.responses.retrieve(answer.id)
                assert found.output_text == said

            unstored = await service.openai.responses.create(**ask, store=False)
            assert unstored.id == "resp_mine"

    asyncio.run(scenario())


def test_a_long_conversation_is_charged_and_read_beside_the_event_loop(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            first = await service.openai.responses.create(
                model="tiny", input="x" * 1000, max_output_tokens=5
            )
            steps: list[tuple[str, int]] = []
            run = IntakeThread.run
            charge = Request.charge

            async def noted_run(self: Any, num_bytes: int, *more: Any) -> Any:
                steps.append(("run", num_bytes))
                return await run(self, num_bytes, *more)

            def noted_charge(self: Any, num_bytes: int) -> None:
                steps.append(("charge", num_bytes))
                charge(self, num_bytes)

            monkeypatch.setattr(IntakeThread, "run", noted_run)
            monkeypatch.setattr(Request, "charge", noted_charge)
            body = {"model": "tiny", "input": "?", "max_output_tokens": 5}
            more = {"previous_response_id": first.id}
            answer = await service.http.post("/v1/responses", json=body | more)
            assert answer.status_code == 200, answer.text
            assert told(service).startswith("<user>xxx")
            (_, small), (_, charged), (_, large), *_ = steps
            assert [name for name, _ in steps[:3]] == ["run", "charge", "run"]
            assert small < 500
            assert charged > 1000
            assert large == small + charged

            steps.clear()
            for wrong in ({"previous_response_id": "resp_x"}, {"previous_response_id": 5}):
                answer = await service.http.post("/v1/responses", json=body | wrong)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "previous_response_id"
            assert ("charge", charged) not in steps

    asyncio.run(scenario())


def test_text_after_a_call_is_a_message(start_service: "StartService") -> None:
    """However the answer is cut into tokens, and however many of them come together."""

    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            text = f"Hm\n<tool_call>{CALL}</tool_call> So it is."
            ask: Any = {"model": "tiny", "input": "Oslo?", "tools": [WEATHER]}
            for cut in range(1, len(text)):
                service.engine.script.words = (text[:cut], text[cut:])
                body = (await service.http.post("/v1/responses", json=ask)).json()
                before, call, after = body["output"]
                assert before["content"][0]["text"] == "Hm"
                assert json.loads(call["arguments"]) == {"city": "Oslo"}
                assert after["content"][0]["text"].strip() == "So it is."
                assert body["status"] == "completed"

    asyncio.run(scenario())


def test_tokens_are_counted_as_the_response_counts_them(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES, **STORING) as service:
            count = service.openai.responses.input_tokens.count
            asked: dict[str, Any] = {"model": "tiny", "instructions": "Be kind.", "input": "Hi"}
            first = await service.openai.responses.create(**asked)
            for more in ({}, {"tools": [WEATHER]}, {"previous_response_id": first.id}):
                counted = await count(**asked, **more)
                sent = len(service.engine.requests)
                response = await service.openai.responses.create(**asked, **more)
                assert counted.object == "response.input_tokens"
                assert counted.input_tokens == response.usage.input_tokens
                assert len(service.engine.requests) == sent + 1, "counting asks no engine"

            wrong = {"model": "tiny", "input": [{"role": "bird", "content": "Hi"}]}
            answer = await service.http.post("/v1/responses/input_tokens/", json=wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "input[0].role"
            assert (await service.http.get("/v1/responses/input_tokens")).status_code == 405
            assert (await service.http.get(f"/v1/responses/{first.id}")).status_code == 200

    asyncio.run(scenario())


def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = 0.0
    section = ResponsesSection(enabled=True, ttl=10.0, max_bytes=10 * OVERHEAD_BYTES)
    store = ResponseStore(section, lambda: now)
    for i in range(9):
        store.add("", f"resp_{i}", EMPTY)
    assert store.num_bytes == 9 * OVERHEAD_BYTES
    for i in range(3):
        store.add("a", f"resp_{i}", replace(EMPTY, body=b"x" * OVERHEAD_BYTES))
    # A tenant has at most half of the store, and the oldest of all responses are dropped.
    assert store.find("a", "resp_0") is None
    assert store.find("a", "resp_2") is not None
    assert store.find("", "resp_2") is None
    assert store.find("", "resp_8") is not None
    assert store.num_bytes <= section.max_bytes

    assert store.find("b", "resp_8") is None
    assert not store.remove("b", "resp_8")
    now = 10.0
    assert store.find("", "resp_8") is None
    assert not store.remove("a", "resp_2")
    store.add("", "new", StoredResponse(b"", b"x", b"yy", ""))
    assert store.num_bytes == OVERHEAD_BYTES + 3


class ComparedName(str):
    """The name of a tenant, which counts how often it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        self.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_room_for_a_long_response_is_made_without_a_look_at_those_of_others() -> None:
    section = ResponsesSection(enabled=True, max_bytes=2000 * OVERHEAD_BYTES)
    store = ResponseStore(section)
    tenant = ComparedName("b")
    for i in range(500):
        store.add("a", f"resp_{i}", EMPTY)
    for i in range(1000):
        store.add(tenant, f"resp_{i}", EMPTY)
    tenant.num_compared = 0
    store.add(tenant, "long", replace(EMPTY, body=b"x" * 500 * OVERHEAD_BYTES))
    assert store.find("b", "resp_500") is None
    assert store.find("b", "resp_501") is not None
    assert store.find("a", "resp_0") is not None
    assert tenant.num_compared < 100


def test_what_a_response_repeats_stays_charged() -> None:
    room = BodyRoom(1000)
    scope: Any = {"method": "POST", "path": "/v1/responses", "headers": [
        (b"content-length", b"100"), (b"content-type", b"application/json")
    ]}  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 100, "more_body": False}

    request = Request(scope, receive, HTTPLimits(), room)
    asyncio.run(request.read_json("a"))
    assert room.taken == 100
    request.release(kept_bytes=30)
    assert room.taken == 30
    request.release(kept_bytes=500)
    assert room.taken == 30
    request.charge(50)  # such as the conversation that a stored response has
    assert room.taken == 80
    with pytest.raises(ServiceError, match="memory"):
        request.charge(1000)
    request.release()
    assert room.taken == 0
    assert room.take(500, "a")


def test_a_list_is_charged_to_its_tenant_without_a_body() -> None:
    room = BodyRoom(1000)
    scope: Any = {"method": "GET", "path": "/v1/responses/resp_1/input_items", "headers": []}

    async def receive() -> Any:
        raise AssertionError("the request has no body")

    request = Request(scope, receive, HTTPLimits(), room)
    request.charge(400, "a")
    with pytest.raises(ServiceError, match="memory"):
        request.charge(400, "a")  # a tenant has half of the memory
    assert room.take(500, "b")
    request.release()
    assert room.taken == 500
