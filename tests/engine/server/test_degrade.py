"""Pressure lowers what new requests get, tells them, spares the others, and goes away again."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import DegradeLevel, DegradeSection, EngineConfig
from ullage_engine.protocol.requests import BeamParams, EngineRequest, SamplingParams
from ullage_engine.server.request import changes, lowered

Serve = Callable[..., AbstractAsyncContextManager[Any]]

LEVEL = DegradeLevel(below_percent=5, max_output_tokens=512, max_temperature=0.5, max_top_p=0.7)
DEGRADE = DegradeSection(
    hysteresis_percent=5,
    pressure_levels=(
        DegradeLevel(below_percent=95, max_output_tokens=150, max_top_p=0.9),
        DegradeLevel(below_percent=89, max_output_tokens=12, max_temperature=0.0, max_top_p=0.7),
    ),
)


def make_request(**fields: Any) -> EngineRequest:
    return EngineRequest(
        request_id="a",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        **{"max_tokens": 1_000_000, "sampling": SamplingParams(), **fields},
    )


def lower(request: EngineRequest, level: DegradeLevel = LEVEL, **more: Any) -> tuple[str, ...]:
    return changes(request, lowered(request, level, **{"change_sampling": True, **more}))


def test_what_exceeds_the_level_is_lowered_and_named() -> None:
    assert lower(make_request()) == ("max_tokens=512", "temperature=0.5", "top_p=0.7")
    assert lower(make_request(max_tokens=512), change_sampling=False) == ()
    assert lower(make_request(), change_sampling=False) == ("max_tokens=512",)
    assert lower(make_request(), DegradeLevel(below_percent=10)) == ()
    large = msgspec.structs.replace(LEVEL, max_output_tokens=999_999)
    assert lower(make_request(), large)[0] == "max_tokens=999999"


def test_top_p_means_nothing_to_a_greedy_request() -> None:
    greedy = make_request(max_tokens=5, sampling=SamplingParams(temperature=0.0, top_p=0.9))
    assert lower(greedy) == ()
    coldest = msgspec.structs.replace(LEVEL, max_temperature=0.0)
    assert lower(make_request(max_tokens=5), coldest) == ("temperature=0",)


def test_sampling_means_nothing_to_a_beam_search() -> None:
    assert lower(make_request(beam=BeamParams(width=4))) == ("max_tokens=512",)


def test_the_limit_itself_is_no_excess_although_it_came_as_float32() -> None:
    given = pb.SamplingParams(temperature=0.5, top_p=0.8)
    assert given.top_p > 0.8
    sampling = SamplingParams(temperature=given.temperature, top_p=given.top_p)
    level = msgspec.structs.replace(LEVEL, max_top_p=0.8)
    assert lower(make_request(max_tokens=1, sampling=sampling), level) == ()


limits = st.builds(
    DegradeLevel,
    below_percent=st.floats(0, 100),
    max_output_tokens=st.none() | st.integers(1, 5000),
    max_temperature=st.none() | st.floats(0, 2),
    max_top_p=st.none() | st.floats(0.01, 1),
)
requests = st.builds(
    lambda max_tokens, temperature, top_p: make_request(
        max_tokens=max_tokens, sampling=SamplingParams(temperature=temperature, top_p=top_p)
    ),
    st.integers(1, 5000),
    st.floats(0, 2),
    st.floats(0.01, 1),
)


@settings(max_examples=100, deadline=None)
@given(requests, limits, st.booleans())
def test_nothing_is_raised_and_a_second_time_changes_nothing(
    request: EngineRequest, level: DegradeLevel, change_sampling: bool
) -> None:
    after = lowered(request, level, change_sampling=change_sampling)
    assert 1 <= after.max_tokens <= request.max_tokens
    assert after.sampling.temperature <= request.sampling.temperature
    assert after.sampling.top_p <= request.sampling.top_p
    assert change_sampling or after.sampling == request.sampling
    assert lowered(after, level, change_sampling=change_sampling) == after
    assert (after == request) == (not changes(request, after))


def ask(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(seed=5),
        stop=pb.StopConditions(max_tokens=max_tokens),
    )


@pytest.fixture
def pressed(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, degrade=DEGRADE)


def options() -> dict[str, Any]:
    """The fake worker's pool: each running request takes 2 % of its headroom."""
    return {"degrade": json.loads(msgspec.json.encode(DEGRADE)), "step_s": 0.01}


def test_a_pressure_event(serve: Serve, pressed: EngineConfig) -> None:
    async def scenario() -> None:
        async with serve(pressed, **{**options(), "step_s": 0.02}) as engine:
            calm = await engine.generate(ask(20))
            assert list(calm.accepted.degraded) == []
            load = [asyncio.create_task(engine.generate(ask(160))) for _ in range(6)]
            await engine.until(lambda s: s.pressure_level == 2 and s.requests_running == 6)
            squeezed = await engine.generate(ask(300))
            assert list(squeezed.accepted.degraded) == ["max_tokens=12", "temperature=0"]
            assert squeezed.accepted.max_tokens == 12
            assert squeezed.finished.usage.completion_tokens == 12
            answers = await asyncio.gather(*load)
            # Those that came before the pressure keep what they were given.
            assert answers[0].finished.usage.completion_tokens == 160
            assert not answers[0].accepted.degraded
            assert all(answer.finished.reason == pb.FINISH_REASON_LENGTH for answer in answers)
            await engine.until(lambda state: state.pressure_level == 0)
            again = await engine.generate(ask(20))
            assert (list(again.accepted.degraded), again.accepted.max_tokens) == ([], 20)

    asyncio.run(scenario())


def test_a_resumed_request_keeps_what_it_was_given(serve: Serve, pressed: EngineConfig) -> None:
    """The worker dies under pressure; no request is lowered on its way to the next one."""

    async def scenario() -> None:
        # Slow steps: all six run for four seconds, long enough to be seen on a machine that stalls.
        async with serve(pressed, **{**options(), "step_s": 0.04}) as engine:
            load = [asyncio.create_task(engine.generate(ask(100))) for _ in range(6)]
            # All six are the worker's: one that it had not taken would be new to the next.
            await engine.until(lambda s: s.pressure_level == 2 and s.requests_running == 6)
            await engine.admin.InjectFault(
                admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
            )
            answers = await asyncio.gather(*load)
            assert [a.finished.usage.completion_tokens for a in answers] == [100] * 6
            assert sum(a.finished.resumes for a in answers) == 6

    asyncio.run(scenario())
