"""Files that requests name, whose texts take the place of their names."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from ullage_router.files.documents import MAX_SHOWN
from ullage_router.http import messages
from ullage_router.http.files import attach
from ullage_router.http.long_bodies import BodyTurn, LongBodies

if TYPE_CHECKING:
    Service = Any
    StartService = Any

LONG = "word " * 300


def with_files(path: Path) -> dict[str, Any]:
    return {"files": {"dir": str(path / "files")}}


async def upload(service: "Service", text: str, purpose: Any = "user_data") -> str:
    file = ("notes.md", text.encode())
    name: str = (await service.openai.files.create(file=file, purpose=purpose)).id
    return name


def asking(name: str, question: str = "Why?") -> list[Any]:
    parts = [{"type": "file", "file": {"file_id": name}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def prompt_of(service: "Service") -> str:
    """Return the prompt that the engine was sent last. Its tokens are bytes."""
    ids = service.engine.requests[-1].token_ids.ids
    return str(service.router.service.engines.model.decode(list(ids)))


def test_the_text_of_a_file_takes_its_place(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        storing = {"responses": {"enabled": True}}
        async with start_service(**with_files(tmp_path), routing=storing) as service:
            name = await upload(service, "# Notes\nCafé.")
            await service.openai.chat.completions.create(model="tiny", messages=asking(name))
            expected = "<user># Notes\nCafé.\nWhy?\n<assistant>"
            assert prompt_of(service) == expected

            parts: Any = [
                {"type": "input_file", "file_id": name},
                {"type": "input_text", "text": "Why?"},
            ]
            items: Any = [{"role": "user", "content": parts}]
            answer = await service.openai.responses.create(model="tiny", input=items)
            assert prompt_of(service) == expected
            [item] = (await service.openai.responses.input_items.list(answer.id)).data
            assert [part.to_dict() for part in item.content] == parts

            body = {"messages": asking(name)}
            counted = (await service.http.post("/tokenize", json=body)).json()["count"]
            assert counted == len(expected.encode())

            twice = [{"role": "user", "content": asking(name)[0]["content"][:1] * 2}]
            await service.openai.chat.completions.create(model="tiny", messages=twice)
            assert prompt_of(service).count("Café.") == 2

            quoted = f'{{"file_id": "{name}"}}'
            turns: Any = [{"role": "user", "content": quoted}]
            await service.openai.chat.completions.create(model="tiny", messages=turns)
            assert prompt_of(service) == f"<user>{quoted}\n<assistant>"

    asyncio.run(scenario())


def test_a_file_that_cannot_be_read_is_refused_by_name(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            create = service.openai.chat.completions.create
            name = await upload(service, "{}", "batch")
            with pytest.raises(openai.BadRequestError, match=f"{name}, whose purpose is batch"):
                await create(model="tiny", messages=asking(name))
            gone = await upload(service, "x")
            await service.openai.files.delete(gone)
            with pytest.raises(openai.NotFoundError, match=gone):
                await create(model="tiny", messages=asking(gone))

            for part, words in (
                ({}, r"messages\[0\].content\[0\].file.file_id is missing"),
                ({"file_data": "aGk="}, r"file_data is not supported; upload the file"),
            ):
                content: Any = [{"type": "file", "file": part}]
                with pytest.raises(openai.BadRequestError, match=words):
                    await create(model="tiny", messages=[{"role": "user", "content": content}])
            for part, words in (
                ({"file_url": "https://x"}, r"input\[0\].content\[0\].file_url is not supported"),
                ({}, r"file_id is missing"),
            ):
                items: Any = [{"role": "user", "content": [{"type": "input_file", **part}]}]
                with pytest.raises(openai.BadRequestError, match=words):
                    await service.openai.responses.create(model="tiny", input=items)
            assert service.engine.requests == []

    asyncio.run(scenario())


def test_without_files_a_reference_names_the_field(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            with pytest.raises(openai.BadRequestError, match=r"set spec\.router\.files") as error:
                await service.openai.chat.completions.create(
                    model="tiny", messages=asking("file-1")
                )
            assert error.value.param == "messages[0].content[0].file"

    asyncio.run(scenario())


def test_a_parameter_named_file_id_needs_no_store(
    start_service: "StartService", tmp_path: Path
) -> None:
    (tmp_path / "files").write_text("no folder")

    async def scenario() -> None:
        async with start_service(
            **with_files(tmp_path), tool_template="{{ tools | tojson }}"
        ) as service:
            create = service.openai.with_options(max_retries=0).chat.completions.create
            schema = {"type": "object", "properties": {"file_id": {"type": "string"}}}
            tools: Any = [{"type": "function", "function": {"name": "read", "parameters": schema}}]
            turns: Any = [{"role": "user", "content": "Why?"}]
            answer = await create(model="tiny", messages=turns, tools=tools)
            assert answer.choices[0].message.content == "Hello big world"
            with pytest.raises(openai.InternalServerError) as error:
                await create(model="tiny", messages=asking("file-1"))
            assert error.value.status_code == 503

    asyncio.run(scenario())


def test_a_body_names_a_bounded_number_of_files(
    start_service: "StartService", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "MAX_NAMED", 5)

    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            name = await upload(service, "a")
            part: Any = {"type": "file", "file": {"file_id": name}}
            for path, field in (("/v1/chat/completions", "messages"), ("/tokenize", "messages")):
                for count, status in ((5, 200), (6, 400)):
                    turns = [{"role": "user", "content": [part] * count}]
                    answer = await service.http.post(path, json={"model": "tiny", field: turns})
                    assert answer.status_code == status, answer.text
                    if status == 400:
                        error = answer.json()["error"]
                        assert error["param"] == "file_id"
                        assert "6 times; name at most 5 files" in error["message"]

    asyncio.run(scenario())


def test_an_error_names_the_first_files_only(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            names = [await upload(service, LONG) for _ in range(MAX_SHOWN + 2)]
            parts: Any = [{"type": "file", "file": {"file_id": name}} for name in names]
            with pytest.raises(openai.BadRequestError) as error:
                await service.openai.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": parts * 10}]
                )
            assert names[MAX_SHOWN - 1] in str(error.value)
            assert names[MAX_SHOWN] not in str(error.value)
            assert "and 2 more" in str(error.value)

    asyncio.run(scenario())


def test_files_of_other_tenants_cannot_be_named(
    start_service: "StartService", tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("alice", "bob"):
        (keys / tenant).write_text(f"{tenant}-key-0123456789")

    async def scenario() -> None:
        tenants = {"keys_dir": str(keys)}
        async with start_service(**with_files(tmp_path), tenants=tenants) as service:
            alice = service.openai.with_options(api_key="alice-key-0123456789")
            bob = service.openai.with_options(api_key="bob-key-0123456789")
            file = await alice.files.create(file=("a.txt", b"secret"), purpose="user_data")
            with pytest.raises(openai.NotFoundError):
                await bob.chat.completions.create(model="tiny", messages=asking(file.id))
            await alice.chat.completions.create(model="tiny", messages=asking(file.id))
            assert len(service.engine.requests) == 1

    asyncio.run(scenario())


def test_too_long_a_file_is_named_with_tokens_and_context(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path), max_model_len=1000) as service:
            create = service.openai.chat.completions.create
            name = await upload(service, LONG)
            with pytest.raises(openai.BadRequestError) as error:
                await create(model="tiny", messages=asking(name))
            assert error.value.code == "context_length_exceeded"
            for words in (
                "tokens",
                "maximum context length is 1000",
                f"{name} (notes.md, 1500 bytes)",
            ):
                assert words in error.value.message

            large = await upload(service, "x" * (5 << 20))
            content = asking(large)[0]["content"][:1] * 2
            with pytest.raises(openai.APIStatusError, match=f"{large} .notes.md") as refused:
                await create(model="tiny", messages=[{"role": "user", "content": content}])
            assert refused.value.status_code == 413

    asyncio.run(scenario())


def test_long_files_take_turns_and_give_them_back(
    start_service: "StartService", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "LONG_BODY_BYTES", 500)
    open_turns: dict[int, int] = {}
    sizes: list[int] = []
    take = LongBodies.take
    give_back = LongBodies.give_back

    async def noted_take(self: LongBodies, size: int, tenant: str) -> BodyTurn:
        turn = await take(self, size, tenant)
        open_turns[id(turn)] = size
        sizes.append(size)
        return turn

    def noted_give_back(self: LongBodies, turn: BodyTurn) -> None:
        del open_turns[id(turn)]
        give_back(self, turn)

    monkeypatch.setattr(LongBodies, "take", noted_take)
    monkeypatch.setattr(LongBodies, "give_back", noted_give_back)

    async def scenario() -> None:
        async with start_service(**with_files(tmp_path), max_model_len=4000) as service:
            name = await upload(service, LONG)
            create = service.openai.chat.completions.create
            asked = [create(model="tiny", messages=asking(name), max_tokens=9) for _ in range(4)]
            answers = await asyncio.gather(*asked)
            assert {answer.choices[0].message.content for answer in answers} == {"Hello big world"}
            assert sum(size >= len(LONG) for size in sizes) == 4
            with pytest.raises(openai.NotFoundError):
                await create(model="tiny", messages=asking("file-1"))
            assert open_turns == {}

    asyncio.run(scenario())
