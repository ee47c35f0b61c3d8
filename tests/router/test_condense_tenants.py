"""Summaries that the model writes: who pays, and what happens when the tokens are short."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    Service = Any
    StartService = Any

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
CHATTER = "well that is so very nice of you to say and to ask about. "
WORDS = ("The meetings: ", "2026-05-00 and ", "2026-05-01.")
PROMPTS = {"compress": {"method": "model"}}


@pytest.fixture
def tenants(tmp_path: Path) -> Any:
    folder = tmp_path / "api-keys"
    folder.mkdir()
    for name, key in KEYS.items():
        (folder / name).write_text(key)

    def make(**rules: Any) -> dict[str, Any]:
        return {"keys_dir": str(folder), "tenants": [{"name": name, **rules} for name in KEYS]}

    return make


def talk() -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "be brief"}]
    for i in range(8):
        asked = f"{CHATTER}We meet on 2026-05-{i:02}."
        turns.append({"role": "user", "content": asked})
        turns.append({"role": "assistant", "content": CHATTER * 2})
    return [*turns, {"role": "user", "content": "so?"}]


async def ask(service: "Service", name: str = "alice", max_tokens: int = 20) -> Any:
    body = {"model": "tiny", "messages": talk(), "max_tokens": max_tokens}
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return await service.http.post("/v1/chat/completions", json=body, headers=headers)


async def usage(service: "Service", name: str = "alice") -> dict[str, Any]:
    found = (await service.stats())["tenants"]["usage"]
    return next(tenant for tenant in found if tenant["name"] == name)


def num_prompt_tokens(service: "Service") -> int:
    return sum(len(request.token_ids.ids) for request in service.engine.requests)


def test_a_summary_is_paid_in_tokens_and_is_no_request(
    start_service: "StartService", tenants: Any
) -> None:
    """Of the tenant's limits on requests, concurrency and length it takes nothing."""

    async def scenario() -> None:
        rules = {"tokens_per_minute": 100_000, "requests_per_minute": 1, "concurrency": 1}
        rules |= {"max_tokens": 2, "tokens_per_second": 0.001, "priority": 7}
        async with start_service(tenants=tenants(**rules), prompts=PROMPTS) as service:
            service.engine.script.words = WORDS
            answer = await ask(service)
            assert answer.status_code == 200, answer.text
            assert "compressed_turns=4" in answer.headers["x-ullage-degraded"]
            assert "summary" not in answer.headers["x-ullage-degraded"]
            summary, request = service.engine.requests
            assert (summary.priority, request.priority) == (7, 7)
            assert (await service.stats())["compression"]["model"] == 1
            alice = await usage(service)
            prompt, output = num_prompt_tokens(service), 3 + 2
            assert (alice["prompt_tokens"], alice["output_tokens"]) == (prompt, output)
            assert (alice["requests"], alice["active"]) == (1, 0)
            assert alice["tokens_left"] >= 100_000 - prompt - output
            assert [record["tenant"] for record in (await service.stats())["latest"]] == [
                "alice"
            ] * 2
            metrics = (await service.http.get("/metrics")).text
            name = "ullage_router_tenant"
            assert f'{name}_requests_total{{code="200",tenant="alice"}} 1.0' in metrics
            assert f'{name}_tokens_total{{kind="prompt",tenant="alice"}} {prompt}.0' in metrics
            assert f'{name}_tokens_total{{kind="output",tenant="alice"}} {output}.0' in metrics

    asyncio.run(scenario())


def test_everybody_pays_for_his_own(start_service: "StartService", tenants: Any) -> None:
    async def scenario() -> None:
        async with start_service(tenants=tenants(), prompts=PROMPTS) as service:
            service.engine.script.words = WORDS
            for name in KEYS:
                assert (await ask(service, name)).status_code == 200
            assert len(service.engine.requests) == 4
            alice, bob = await usage(service), await usage(service, "bob")
            assert alice["prompt_tokens"] == bob["prompt_tokens"] == num_prompt_tokens(service) / 2
            assert (await ask(service)).status_code == 200
            assert len(service.engine.requests) == 5  # the summary is kept

    asyncio.run(scenario())


def test_a_summary_leaves_the_request_its_tokens(
    start_service: "StartService", tenants: Any
) -> None:
    async def scenario() -> None:
        rules = tenants(tokens_per_minute=2000)  # the request alone would have them
        async with start_service(tenants=rules, prompts=PROMPTS) as service:
            service.engine.script.words = WORDS
            answer = await ask(service)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ullage-degraded"] == "compressed_turns=4, summary=extractive"
            assert len(service.engine.requests) == 1
            counts = (await service.stats())["compression"]
            assert (counts["unpaid"], counts["extractive"], counts["model"]) == (1, 0, 0)
            alice = await usage(service)
            assert (alice["limited"], alice["prompt_tokens"]) == ({}, num_prompt_tokens(service))
            metrics = (await service.http.get("/metrics")).text
            assert 'ullage_router_compressions_total{method="unpaid"} 1.0' in metrics

    asyncio.run(scenario())


def test_a_summary_leaves_the_request_what_its_answer_is_expected_to_take(
    start_service: "StartService", tenants: Any
) -> None:
    output = 300

    async def compressed(tokens: int) -> tuple[dict[str, int], Any]:
        """What was done with so many tokens a minute, and what the engine was sent."""
        rules = tenants(tokens_per_minute=tokens)
        async with start_service(tenants=rules, prompts=PROMPTS) as service:
            service.engine.script.words = WORDS
            service.engine.push(expected_output_tokens=output)
            engines = service.router.service.engines
            await service.until(lambda: engines.expected_output == output)
            answer = await ask(service, max_tokens=output)
            assert answer.status_code == 200, answer.text
            return (await service.stats())["compression"], service.engine.requests

    async def scenario() -> None:
        counts, (summary, request) = await compressed(100_000)
        assert counts["model"] == 1
        prompt = len(request.token_ids.ids) + counts["saved_tokens"]
        errand = len(summary.token_ids.ids) + min(summary.stop.max_tokens, output)
        counts, requests = await compressed(prompt + errand + output // 2)
        assert (counts["unpaid"], counts["model"], len(requests)) == (1, 0, 1)

    asyncio.run(scenario())
