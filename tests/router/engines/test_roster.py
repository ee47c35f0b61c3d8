"""The few engines that a decision looks at, kept while engines change."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_router.engines.engine import Engine
from ullage_router.engines.roster import MAX_DRAWN, Roster
from ullage_router.policy.facts import EngineState, Side

if TYPE_CHECKING:
    StartService = Any

KEY = (Side.STABLE, "single", "model")


@dataclass(eq=False)
class Known:
    """What a roster asks of an engine."""

    number: int
    standing: EngineState = EngineState.USABLE
    backlog_tokens: int = 0
    health: float = 1.0
    pool: str = "single"
    side: Side = Side.STABLE
    fingerprint: str = "model"
    adapters: frozenset[str] = frozenset()
    unknown_fields: frozenset[str] = frozenset()

    @property
    def is_idle(self) -> bool:
        return not self.backlog_tokens and self.health >= 0.5

    def state_until(self, now: float) -> float:
        return now + 1


def roster(engines: list[Known]) -> Roster:
    return Roster(cast("list[Engine]", engines), 0.0)


def drawn(of: Roster, number: int) -> list[Known]:
    return cast("list[Known]", of.draw(KEY, number))


states = st.builds(
    Known,
    st.integers(0, 99),
    st.sampled_from(EngineState),
    st.sampled_from([0, 0, 7]),
    st.sampled_from([1.0, 0.2]),
    fingerprint=st.sampled_from(["model", "model", "other"]),
)


@given(st.lists(states, max_size=12), st.lists(st.tuples(st.integers(0, 11), st.booleans())))
def test_idle_engines_are_drawn_as_long_as_there_are_any(
    engines: list[Known], changes: list[tuple[int, bool]]
) -> None:
    kept = roster(engines)
    for index, is_busy in changes:
        if index < len(engines):
            engines[index].backlog_tokens = int(is_busy)
            kept.on_load_change(cast("Engine", engines[index]))
    usable = [e for e in engines if e.standing is EngineState.USABLE and e.fingerprint == "model"]
    idle = [e for e in usable if not e.backlog_tokens and e.health >= 0.5]
    for number in range(30):
        some = drawn(kept, number)
        assert len(some) == len(set(some)) == min(MAX_DRAWN, len(idle or usable))
        assert set(some) <= set(idle or usable)


def test_every_engine_is_drawn_as_often() -> None:
    kept = roster([Known(number) for number in range(64)])
    counts = Counter(engine.number for n in range(1 << 16) for engine in drawn(kept, n))
    assert len(counts) == 64
    expected = MAX_DRAWN * (1 << 16) / 64
    assert all(abs(count - expected) < 0.05 * expected for count in counts.values())


@pytest.mark.parametrize("num_engines", [3, 4])
def test_each_of_few_engines_is_as_often_among_the_first_two(num_engines: int) -> None:
    kept = roster([Known(number) for number in range(num_engines)])
    draws = 1 << 12
    counts = Counter(engine.number for n in range(draws) for engine in drawn(kept, n)[:2])
    expected = 2 * draws / num_engines
    assert all(abs(counts[n] - expected) < 0.05 * expected for n in range(num_engines))


def test_a_state_that_changed_is_seen() -> None:
    engine = Known(1)
    kept = roster([engine])
    assert kept.ready_sides == {Side.STABLE}
    assert kept.is_right_about(cast("Engine", engine))
    engine.standing = EngineState.RECOVERING
    assert not kept.is_right_about(cast("Engine", engine))
    assert not roster([engine]).ready_sides


def test_the_only_engine_with_room_is_taken(start_service: "StartService") -> None:
    """However few engines a decision looks at first."""

    async def scenario() -> None:
        async with start_service(single=(1, 1, 1, 1, 1, 1, 100)) as service:
            for number in range(12):
                answer = await service.complete(f"{number:02}" + "x" * 98)
                assert answer.headers["x-ullage-engine"] == "single-6"
                assert answer.headers["x-ullage-trail"] == "accept=FITS"

    asyncio.run(scenario())


def test_an_engine_that_drains_or_is_lost_gets_nothing(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100,) * 6) as service:
            service.engines[0].push(draining=True)
            await service.engines[1].stop()
            await service.until(
                lambda: (
                    service.engine_state("single-0") == "draining"
                    and service.engine_state("single-1") == "connecting"
                )
            )
            for number in range(24):
                answer = await service.complete(f"{number:02}")
                assert answer.headers["x-ullage-engine"] not in {"single-0", "single-1"}
            service.engines[0].push(draining=False)
            await service.engines[1].restart()
            for number in (0, 1):
                await service.until(lambda n=number: service.engine_state(f"single-{n}") == "ready")
            for engine in service.engines[2:]:
                engine.push(draining=True)
            await service.until(
                lambda: all(service.engine_state(f"single-{n}") == "draining" for n in range(2, 6))
            )
            answer = await service.complete("again")
            assert answer.headers["x-ullage-engine"] in {"single-0", "single-1"}

    asyncio.run(scenario())


def test_routers_agree_where_what_they_do_not_remember_belongs(
    start_service: "StartService",
) -> None:
    """A session's next turn may come to another process or router."""

    async def scenario() -> None:
        async with start_service(single=(100,) * 5) as one:
            pools = {"single": [engine.address for engine in one.engines]}
            async with start_service(single=(), wait=False, pools=pools) as two:
                known = two.router.service.engines
                await two.until(lambda: [e.state for e in known.all()].count("ready") == 5)
                chosen = set()
                for number in range(30):
                    begun = f"{number:02}" + "x" * 70
                    for text, more in (
                        (f"{number}", {"session_id": f"s{number}"}),
                        (f"k{number}", {"prompt_cache_key": f"p{number}"}),
                        (begun, {}),
                    ):
                        first = await one.complete(text, **more)
                        second = await two.complete(text, **more)
                        names = [a.headers["x-ullage-engine"] for a in (first, second)]
                        assert names[0] == names[1]
                        chosen.add(names[0])
                assert len(chosen) == 5

    asyncio.run(scenario())
