"""Long conversations: the oldest turns become a labelled summary that keeps the facts, or stay."""

import asyncio
from typing import TYPE_CHECKING, Any, SupportsIndex

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.chat.tool_formats import Turn
from ullage_router.prompts.extract import extract
from ullage_router.prompts.summarize import LABEL, REPLY, oldest, with_summary

if TYPE_CHECKING:
    Service = Any
    StartService = Any

CHATTER = "well that is so very nice of you to say and to ask about. "


def turn(role: str, content: str = "x") -> Turn:
    return {"role": role, "content": content}


def talk(rounds: int, fact: str = "We meet on 2026-05-{i:02}.") -> list[Turn]:
    """A system prompt, so many questions with answers, and a last question."""
    turns = [turn("system", "be brief")]
    for i in range(rounds):
        turns.append(turn("user", CHATTER + fact.format(i=i)))
        turns.append(turn("assistant", CHATTER * 2))
    return [*turns, turn("user", "so?")]


def test_the_oldest_quarter() -> None:
    assert oldest(talk(8), 0.25, 4) == [1, 2, 3, 4]
    assert oldest(talk(8), 0.5, 4) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert oldest(talk(2), 0.25, 4) == []
    assert oldest(talk(3), 0.05, 4) == [1, 2]


def test_calls_stay_with_their_results() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    turns = [turn(role) for role in roles]
    assert oldest(turns, 0.25, 2) == [1, 2, 3, 4]


def test_a_summary_is_a_labelled_turn_and_roles_alternate() -> None:
    turns = talk(4)
    made = with_summary(turns, [1, 2], "user: short")
    assert made[0] == turns[0]
    assert list(made[3:]) == turns[3:]
    assert made[1] == turn("user", LABEL.format(count=2) + "user: short")
    assert made[2] == turn("assistant", REPLY)


roles = st.sampled_from(["system", "user", "assistant", "tool"])


@settings(max_examples=200, deadline=None)
@given(st.lists(roles, max_size=14), st.floats(0.05, 0.9), st.integers(1, 5))
def test_promises(names: list[str], share: float, keep: int) -> None:
    turns = [turn(role, str(i)) for i, role in enumerate(names)]
    places = oldest(turns, share, keep)
    if not places:
        return
    made = with_summary(turns, places, "s")
    assert [t for t in made if t["role"] == "system"] == [t for t in turns if t["role"] == "system"]
    assert list(made[-keep:]) == turns[-keep:]
    rest = [t["role"] for t in turns[places[-1] + 1 :] if t["role"] != "system"]
    assert rest[0] == "user"
    assert not any(turns[place]["role"] == "system" for place in places)


def test_an_extract_keeps_the_facts_or_is_none() -> None:
    turns = talk(4)[1:-1]
    made = extract(turns, 1.0)
    assert all(f"2026-05-{i:02}" in made for i in range(4))
    dense = [turn("user", " ".join(f"{i}.5 of Item{i}x_{i}" for i in range(200)))]
    assert extract(dense, 0.9) == ""


class Counted(list[Turn]):
    """Counts the turns that are read."""

    reads = 0

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        self.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_the_oldest_of_many_turns_are_found_by_reading_each_a_few_times() -> None:
    many = Counted(turn("user", "x") for _ in range(20_000))
    assert len(oldest(many, 0.25, 4)) == 5_000
    assert many.reads < 10 * len(many)


async def ask(service: "Service", turns: list[Turn]) -> Any:
    client: openai.AsyncOpenAI = service.openai
    return await client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=turns,
        max_tokens=20,  # type: ignore[arg-type]
    )


def sent(service: "Service", place: int = -1) -> str:
    ids = list(service.engine.requests[place].token_ids.ids)
    text: str = service.router.service.engines.model.decode(ids)
    return text


def test_a_service_sums_up_and_says_so(start_service: "StartService") -> None:
    async def scenario() -> None:
        prompts = {"compress": {"method": "extractive"}}
        async with start_service(prompts=prompts) as service:
            turns = talk(8)
            answer = await ask(service, turns)
            assert answer.headers["x-ullage-degraded"] == "compressed_turns=4"
            prompt = sent(service)
            assert "[Summary of the first 4 messages" in prompt
            assert "2026-05-00" in prompt
            assert "2026-05-01" in prompt
            assert prompt.startswith("<system>be brief\n<user>[Summary")
            assert all(t["content"] in prompt for t in turns[5:])
            seen = await service.stats()
            assert seen["compression"]["extractive"] == 1
            assert seen["compression"]["saved_tokens"] > 0
            assert len(service.engine.requests) == 1
            assert (await ask(service, turns)).headers["x-ullage-degraded"] == "compressed_turns=4"
            # Kept: nobody is asked for the same summary twice.
            assert len(service.engine.requests) == 2
            metrics = (await service.monitoring.get("/metrics")).text
            assert 'ullage_router_compressions_total{method="extractive"} 2.0' in metrics

    asyncio.run(scenario())


def dense(rounds: int) -> list[Turn]:
    """Every turn is one sentence full of facts."""
    turns = [
        turn("assistant" if i % 2 else "user", " ".join(f"{i}{j}.5" for j in range(20)))
        for i in range(10, 10 + 2 * rounds)
    ]
    return [*turns, turn("user", "so?")]


LONG = [turn("system"), turn("user", "y" * 1600), turn("assistant"), turn("user", "?")]


@pytest.mark.parametrize(
    ("turns", "method", "refused"),
    [
        (talk(3), "extractive", 0),
        (talk(8), "off", 0),
        (LONG, "extractive", 0),
        (dense(6), "extractive", 1),
    ],
    ids=["short", "off", "few", "facts"],
)
def test_what_stays(
    start_service: "StartService", turns: list[Turn], method: str, refused: int
) -> None:
    async def scenario() -> None:
        prompts = {"compress": {"method": method}}
        async with start_service(single=(200,), prompts=prompts) as service:
            answer = await ask(service, turns)
            assert answer.headers["x-ullage-degraded"] == ""
            assert all(t["content"] in sent(service) for t in turns)
            assert (await service.stats())["compression"].get("refused", 0) == refused

    asyncio.run(scenario())
