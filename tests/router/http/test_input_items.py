"""The items that a stored response answers, as OpenAI's client lists them."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.config.router import ResponsesSection
from ullage_router.http.long_bodies import LONG_BODY_BYTES
from ullage_router.http.responses.answers import InputItemList
from ullage_router.http.responses.input_items import DEFAULT_PAGE, MAX_PAGE, read_page
from ullage_router.http.responses.requests import Asked, read_request
from ullage_router.http.responses.schemas import MAX_ITEMS
from ullage_router.http.responses.store import ResponseStore, StoredResponse

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WORDS = "Hello big world"
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}"
)
STORING: Any = {"routing": {"responses": {"enabled": True}}}
LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
KEY = "{}-key-0123456789"
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [
        {"type": "input_text", "text": "Oslo?"},
        {"type": "text", "text": "Rome?"},
    ]},
    {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm"}],
     "summary": [{"type": "summary_text", "text": "H"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "Look.", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "namespace": "sky", "name": "weather",
     "arguments": '{"city": "Oslo"}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls"},
    {"type": "function_call_output", "call_id": "c1", "output": "-4"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [
        {"type": "input_text", "text": "a.txt"}
    ]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "user", "content": "Café?"},
]  # fmt: skip
LISTED: list[Any] = [
    {"type": "message", "role": "developer", "content": [
        {"type": "input_text", "text": "Be brief."}
    ]},
    {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "Oslo?"},
        {"type": "input_text", "text": "Rome?"},
    ]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}],
     "summary": [{"type": "summary_text", "text": "H"}]},
    {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}
    ]},
    {"type": "function_call", "call_id": "c1", "namespace": "sky", "name": "weather",
     "arguments": '{"city": "Oslo"}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls"},
    {"type": "function_call_output", "call_id": "c1", "output": "-4"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [
        {"type": "input_text", "text": "a.txt"}
    ]},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Café?"}]},
]  # fmt: skip


async def listed(service: "Service", name: str, **query: Any) -> Any:
    """Return a page as plain JSON, which has exactly the fields that are described."""
    answer = await service.http.get(f"/v1/responses/{name}/input_items", params=query)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=InputItemList)
    return answer.json()


def texts(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items]


def test_items_of_every_type_are_listed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            responses = service.openai.responses
            answer = await responses.create(model="tiny", input=ITEMS, instructions="Be kind.")
            page = await listed(service, answer.id, order="asc")
            ids = [item.pop("id") for item in page["data"]]
            assert len({*ids}) == len(ITEMS)
            assert {item.pop("status") for item in page["data"]} == {"completed"}
            assert page["data"] == LISTED
            assert (page["object"], page["has_more"]) == ("list", False)
            assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])

            newest = await responses.input_items.list(answer.id)
            assert [item.id for item in newest.data] == ids[::-1]
            kinds = {type(item).__name__ for item in newest.data}
            assert "ResponseFunctionToolCallOutputItem" in kinds, kinds

            # They are valid input, and become the same prompt.
            sent = list(service.engine.requests[-1].token_ids.ids)
            again: Any = [item.model_dump() for item in newest.data[::-1]]
            await responses.create(model="tiny", input=again, instructions="Be kind.")
            assert list(service.engine.requests[-1].token_ids.ids) == sent

    asyncio.run(scenario())


def test_a_response_that_continues_others_lists_the_whole_conversation(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            responses = service.openai.responses
            first = await responses.create(model="tiny", input="Hi", **LOGPROBS)
            assert first.output[0].content[0].logprobs
            second = await responses.create(
                model="tiny", input="And?", previous_response_id=first.id
            )
            third = await responses.create(
                model="tiny", input=[{"role": "user", "content": "So?"}],
                previous_response_id=second.id, stream=True,
            )  # fmt: skip
            last = [event async for event in third][-1].response
            before = await responses.input_items.list(first.id)
            assert texts(before.data) == ["Hi"]

            await responses.delete(first.id)
            await responses.delete(second.id)
            page = await responses.input_items.list(last.id, order="asc")
            assert texts(page.data) == ["Hi", WORDS, "And?", WORDS, "So?"]
            ids = [item.id for item in page.data]
            assert ids[0] == before.data[0].id
            assert (ids[1], ids[3]) == (first.output[0].id, second.output[0].id)
            assert not page.data[1].content[0].logprobs
            await listed(service, last.id)

    asyncio.run(scenario())


def test_calls_of_earlier_answers_are_listed_as_they_were(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=CALLING, **STORING) as service:
            function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
            space = {"type": "namespace", "name": "sky", "description": "d", "tools": [function]}
            tools: Any = [space, {"type": "custom", "name": "shell"}]
            calls = (
                '{"name": "sky.weather", "arguments": {"city": "Oslo"}}',
                '{"name": "shell", "arguments": {"input": "ls"}}',
            )
            service.engine.script.words = tuple(f"<tool_call>{call}</tool_call>" for call in calls)
            body = {"model": "tiny", "input": "Oslo?", "tools": tools}
            first = (await service.http.post("/v1/responses", json=body)).json()
            assert [item["type"] for item in first["output"]] == [
                "function_call",
                "custom_tool_call",
            ]
            results = [
                {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "x"}
                for call in first["output"]
            ]
            body = {"model": "tiny", "input": results, "previous_response_id": first["id"]}
            second = (await service.http.post("/v1/responses", json=body)).json()

            _, *answered, _, _ = (await listed(service, second["id"], order="asc"))["data"]
            assert answered == first["output"]

    asyncio.run(scenario())


def test_the_official_client_reads_page_after_page(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            responses = service.openai.responses
            words = [str(i) for i in range(45)]
            items: Any = [{"role": "user", "content": word} for word in words]
            answer = await responses.create(model="tiny", input=items)
            for order, expected in (("asc", words), ("desc", words[::-1])):
                pages = responses.input_items.list(answer.id, order=order, limit=7)
                assert texts([item async for item in pages]) == expected

            page = await responses.input_items.list(answer.id)
            assert len(page.data) == DEFAULT_PAGE
            assert page.has_more
            more = await responses.input_items.list(
                answer.id, after=page.data[-1].id, limit=MAX_PAGE
            )
            assert texts(page.data + more.data) == words[::-1]
            assert not more.has_more

            head = await service.http.head(f"/v1/responses/{answer.id}/input_items")
            assert (head.status_code, head.content) == (200, b"")

    asyncio.run(scenario())


@given(
    st.integers(0, 60), st.integers(1, MAX_PAGE), st.sampled_from([{}, {"order": "asc"}])
)  # fmt: skip
def test_pages_are_the_whole_list_in_order(count: int, limit: int, order: dict[str, str]) -> None:
    names = [f"msg_{i}" for i in range(count)]
    items = json.dumps([{"id": name, "text": "x"} for name in names]).encode()
    seen: list[str] = []
    query = {"limit": str(limit), **order}
    has_more = True
    while has_more:
        page = json.loads(read_page(items, query))
        ids = [item["id"] for item in page["data"]]
        assert len(ids) <= limit
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1]) if ids else (None, None)
        seen += ids
        has_more = page["has_more"]
        query["after"] = page["last_id"]
    assert seen == (names if order else names[::-1])


def test_wrong_parameters_are_refused_by_name(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service:
            answer = await service.openai.responses.create(model="tiny", input="Hi")
            for query, param, words in (
                ({"limit": "0"}, "limit", "limit is 0; possible: 1 to 100"),
                ({"limit": "101"}, "limit", "limit is 101"),
                ({"limit": "all"}, "limit", "limit is all"),
                ({"order": "up"}, "order", "order is up; possible: asc, desc"),
                ({"after": "msg_x"}, "after", "after is msg_x; possible: the id of an item"),
                ({"before": "msg_x"}, "before", "send order and after"),
                (
                    {"include[]": "message.output_text.logprobs"},
                    "include",
                    "include is message.output_text.logprobs, and",
                ),
            ):
                path = f"/v1/responses/{answer.id}/input_items"
                refused = await service.http.get(path, params=query)
                error = refused.json()["error"]
                assert (refused.status_code, error["param"]) == (400, param)
                assert words in error["message"], error

    asyncio.run(scenario())


def test_responses_that_are_not_stored_have_no_list(
    start_service: "StartService", tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("a", "b"):
        (keys / tenant).write_text(KEY.format(tenant))

    async def scenario() -> None:
        tenants = {"keys_dir": str(keys)}
        async with start_service(**STORING, tenants=tenants) as service:
            mine = service.openai.with_options(api_key=KEY.format("a")).responses
            other = service.openai.with_options(api_key=KEY.format("b")).responses
            answer = await mine.create(model="tiny", input="Hi")
            assert texts((await mine.input_items.list(answer.id)).data) == ["Hi"]
            unstored = await mine.create(model="tiny", input="Hi", store=False)
            for client, name in (
                (other, answer.id),
                (mine, unstored.id),
                (mine, "resp_x"),
                (mine, "input_items"),
            ):
                with pytest.raises(openai.NotFoundError) as caught:
                    await client.input_items.list(name)
                with pytest.raises(openai.NotFoundError) as reading:
                    await client.retrieve(name)
                assert caught.value.body == reading.value.body
            await mine.delete(answer.id)
            with pytest.raises(openai.NotFoundError):
                await mine.input_items.list(answer.id)

            path = f"/v1/responses/{answer.id}/input_items"
            assert (await service.http.get(path)).status_code == 401
            assert (await service.http.post(path)).headers["allow"] == "GET, HEAD"

    asyncio.run(scenario())


def read(body: Any, store: ResponseStore) -> Asked:
    data = json.dumps(body, ensure_ascii=False).encode()
    return read_request(data, "", store, drops_turns=False)


def test_items_stay_within_the_bounds_of_the_store() -> None:
    section = ResponsesSection(enabled=True, max_bytes=100_000)
    store = ResponseStore(section)
    asked = read({"input": "x" * 30_000}, store)
    assert asked.input_items.count(b"x" * 30_000) == 1
    assert asked.kept_bytes >= 60_000
    for i in range(5):
        response = StoredResponse(b"{}", asked.conversation, asked.input_items, "")
        store.add("", f"resp_{i}", response)
        assert 60_000 <= store.num_bytes <= section.max_bytes
    assert store.find("", "resp_4")
    assert not store.find("", "resp_3")

    # Small items take more bytes in a list than in a body.
    turns = [{"role": "user", "content": ""}] * MAX_ITEMS
    small = {"input": turns[:8192], "store": True}
    assert len(json.dumps(small)) < LONG_BODY_BYTES // 2
    for body in (small, {"input": "x" * LONG_BODY_BYTES}):
        asked = read(body, store)
        assert (asked.conversation, asked.input_items) == (b"", b"")
        assert asked.repeated["store"] is False
