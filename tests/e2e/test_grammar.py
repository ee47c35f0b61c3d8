"""JSON that a schema allows: the real model, the official client, and a killed worker."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    Service = Any

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "people": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
        "seasons": {
            "type": "array",
            "items": {"enum": ["spring", "summer", "autumn", "winter"]},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["city", "people", "seasons"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
ASKED: dict[str, Any] = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Describe a city as JSON."}],
    "response_format": FORMAT,
    "max_tokens": 80,
    "seed": 11,
}


def check(text: str) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(text))


def kill_worker(service: "Service", engine: str) -> None:
    [pid] = [each["pid"] for each in service.state["engines"] if each["id"] == engine]
    children = psutil.Process(pid).children(recursive=True)
    [worker] = [each for each in children if "ullage_engine.worker.main" in each.cmdline()]
    worker.kill()


async def streamed(client: openai.AsyncOpenAI, service: "Service", is_killed: bool) -> list[str]:
    """The texts of three hot answers, during which their worker may be killed."""
    texts = ["", "", ""]
    num_chunks = 0
    kill_after = 12 if is_killed else 0
    raw = await client.chat.completions.with_raw_response.create(
        **ASKED, n=3, temperature=1.5, stream=True
    )
    async for chunk in raw.parse():
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            assert choice.finish_reason in (None, "stop")
            num_chunks += bool(choice.delta.content)
        if kill_after and num_chunks >= kill_after:
            kill_worker(service, raw.headers["x-ullage-engine"])
            kill_after = 0
    assert not kill_after
    return texts


def test_answers_follow_their_schema_hot_and_across_a_killed_worker(service: "Service") -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
            client = openai.AsyncOpenAI(
                base_url=f"{service.http_url}/v1", api_key="none", http_client=http, max_retries=0
            )
            cold = await client.chat.completions.create(**ASKED, temperature=0)
            check(cold.choices[0].message.content or "")
            assert cold.choices[0].finish_reason == "stop"
            wanted = await streamed(client, service, is_killed=False)
            for text in wanted:
                check(text)
            assert len(set(wanted)) == 3
            for text in await streamed(client, service, is_killed=True):
                check(text)
            cut = await client.chat.completions.create(**{**ASKED, "max_tokens": 4})
            assert cut.choices[0].finish_reason == "length"
            wrong = {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}
            try:
                bad: Any = {"type": "json_schema", "json_schema": wrong}
                await client.chat.completions.create(**{**ASKED, "response_format": bad})
                raise AssertionError("not refused")
            except openai.BadRequestError as error:
                assert error.param == "response_format.json_schema.schema.properties.a"

    asyncio.run(scenario())
    assert psutil.pid_exists(service.process.pid)
