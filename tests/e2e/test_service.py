"""The example service as its users meet it: `ullage up` and an OpenAI client."""

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import openai

if TYPE_CHECKING:
    Service = Any

SENTENCE = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. "


async def ask(
    service: "Service",
    prompt: str,
    max_tokens: int,
) -> tuple[int, httpx.Headers, str]:
    """(status, headers, text so far or error body) of one streamed greedy chat."""
    async with httpx.AsyncClient(
        base_url=service.http_url, timeout=120, trust_env=False, verify=False
    ) as http:
        client = openai.AsyncOpenAI(
            base_url=f"{service.http_url}/v1", api_key="none", http_client=http, max_retries=0
        )
        text = ""
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model="smollm2-135m",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
            )
        except openai.APIStatusError as error:
            return error.status_code, error.response.headers, error.response.text
        async for chunk in raw.parse():
            for choice in chunk.choices:
                text += choice.delta.content or ""
        return 200, raw.headers, text


def test_eight_at_once(service: "Service") -> None:
    async def scenario() -> None:
        words = ["tea", "iron", "snow", "jazz", "moss", "clay", "wind", "silk"]
        answers = await asyncio.gather(*(ask(service, f"Describe {w}.", 24) for w in words))
        assert [status for status, _, _ in answers] == [200] * 8
        assert all(text.strip() for _, _, text in answers)
        assert {headers["x-ullage-route"] for _, headers, _ in answers} <= {"single", "large"}

    asyncio.run(scenario())


def test_a_large_prompt_takes_the_large_pool(service: "Service") -> None:
    status, headers, text = asyncio.run(ask(service, SENTENCE * 130 + "Summarise.", 8))
    assert status == 200
    assert headers["x-ullage-route"] == "large"
    assert headers["x-ullage-action"] == "route4"
    assert int(headers["x-ullage-predicted-kv-bytes"]) > 2000 * 23_040
    assert text
    stats = httpx.get(f"{service.http_url}/stats", trust_env=False, verify=False).json()
    assert {engine["route"] for engine in stats["engines"]} == {"single", "large"}


def test_what_fits_nowhere_is_refused_for_good(service: "Service") -> None:
    status, headers, body = asyncio.run(ask(service, SENTENCE * 800, 8))
    assert status == 400
    assert "retry-after" not in headers
    assert '"error"' in body


def test_an_overload_gives_success_or_429_and_memory_comes_back(service: "Service") -> None:
    before = free_bytes(service)

    async def scenario() -> None:
        prompts = [f"Report {i}. " + SENTENCE * 25 + "Summarise." for i in range(40)]
        answers = await asyncio.gather(*(ask(service, prompt, 24) for prompt in prompts))
        assert {status for status, _, _ in answers} == {200, 429}
        for status, headers, _ in answers:
            assert status == 200 or 1 <= int(headers["retry-after"]) <= 30

    asyncio.run(scenario())
    assert free_bytes(service) == before


def free_bytes(service: "Service") -> list[int]:
    """Free KV bytes of every engine once none runs a request."""

    async def settled() -> list[int]:
        async with httpx.AsyncClient(
            base_url=service.http_url, trust_env=False, verify=False
        ) as http:
            async with asyncio.timeout(60):
                while True:
                    engines = (await http.get("/stats")).json()["engines"]
                    if not any(e["requests_running"] + e["requests_waiting"] for e in engines):
                        return sorted(e["headroom_bytes"] for e in engines)
                    await asyncio.sleep(0.1)

    return asyncio.run(settled())
