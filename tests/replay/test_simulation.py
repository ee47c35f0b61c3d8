"""Replays: every request ends once, tokens add up, and the same trace gives the same result."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import RouterConfig
from ullage_replay.fast_forward import FastForward
from ullage_replay.hardware import Hardware, HardwareError
from ullage_replay.report import Summary, as_json, as_table, quantiles, summarize
from ullage_replay.search import ReplayObjectives, find_engines
from ullage_replay.simulation import PoolPlan, Replay, ReplayOutcome, replay
from ullage_replay.trace import TraceRequest
from ullage_replay.virtual_time import StalledError, VirtualLoop, run

MakePools = Callable[..., dict[str, PoolPlan]]
MIB = 1 << 20


def poisson(count: int, per_second: float, seed: int = 0) -> list[TraceRequest]:
    draw = random.Random(seed)
    at = 0.0
    trace = []
    for _ in range(count):
        at += draw.expovariate(per_second)
        prompt = draw.randint(1, 400)
        output = draw.randint(1, 60)
        trace.append(TraceRequest(at=at, prompt_tokens=prompt, output_tokens=output))
    return trace


def seen(outcome: ReplayOutcome) -> tuple[object, ...]:
    """Return what a client can tell, with times to the microsecond."""
    gaps = [round(gap, 6) for gap in outcome.token_gaps_s]
    ttft = outcome.ttft_s and round(outcome.ttft_s, 6)
    return outcome.ending, outcome.action, outcome.reason, outcome.output_tokens, ttft, gaps


def test_a_request_alone_takes_the_time_of_its_steps(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    trace = [TraceRequest(at=1.0, prompt_tokens=100, output_tokens=4)]
    result = replay(trace, router, make_pools(), hardware)
    (outcome,) = result.outcomes
    # The way there and back, and a prompt step of 10 ms and 1 ms a token.
    assert outcome.ttft_s == pytest.approx(0.004 + 0.110)
    assert list(outcome.token_gaps_s) == pytest.approx([0.0115] * 3)
    assert (outcome.ending, outcome.action, outcome.reason) == ("stop", "accept", "FITS")
    (engine,) = result.engines
    assert engine.num_steps == 4
    assert engine.memory_bytes == 52 * MIB


def test_a_peak_between_two_reports_counts(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    """The second request begins after a report, and ends before the next."""
    trace = [
        TraceRequest(at=1.0, prompt_tokens=16, output_tokens=8),
        TraceRequest(at=1.03, prompt_tokens=16, output_tokens=2),
    ]
    (engine,) = replay(trace, router, make_pools(), hardware).engines
    assert engine.peak_kv_bytes == MIB  # two blocks each
    alone = replay(trace[:1], router, make_pools(), hardware)
    assert alone.engines[0].peak_kv_bytes == MIB // 2


def test_an_answer_ends_at_its_limit(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=10, output_tokens=50, max_tokens=20)]
    (outcome,) = replay(trace, router, make_pools(), hardware).outcomes
    assert (outcome.ending, outcome.output_tokens) == ("length", 20)


@given(
    rows=st.lists(
        st.tuples(
            st.floats(0.0, 3.0),
            st.integers(1, 3000),
            st.integers(1, 90),
            st.one_of(st.none(), st.integers(1, 120)),
            st.sampled_from(["", "a", "b"]),
        ),
        min_size=1,
        max_size=25,
    ),
    num_engines=st.integers(1, 2),
    kv_mib=st.sampled_from([8, 32]),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_request_ends_once_and_tokens_add_up(
    hardware: Hardware,
    router: RouterConfig,
    make_pools: MakePools,
    rows: list[tuple[float, int, int, int | None, str]],
    num_engines: int,
    kv_mib: int,
) -> None:
    trace = sorted(
        (
            TraceRequest(
                at=at, prompt_tokens=prompt, output_tokens=output, max_tokens=most, session=session
            )
            for at, prompt, output, most, session in rows
        ),
        key=lambda request: request.at,
    )
    pools = make_pools(num_engines, kv_mib)
    result = replay(trace, router, pools, hardware)
    assert [outcome.request for outcome in result.outcomes] == trace
    for outcome in result.outcomes:
        request = outcome.request
        most = min(request.output_tokens, request.max_tokens or 512)
        assert outcome.output_tokens <= most
        assert len(outcome.token_gaps_s) == max(0, outcome.output_tokens - 1)
        assert all(gap >= 0 for gap in outcome.token_gaps_s)
        if outcome.ending == "refused":
            assert outcome.output_tokens == 0
            assert outcome.reason
        else:
            assert outcome.ttft_s is not None
            assert 0 < outcome.ttft_s <= outcome.end_s + 1e-9
            # The pool holds no more than the rest of the answer's limit.
            assert outcome.output_tokens == most or outcome.ending == "length"
    for engine in result.engines:
        assert engine.peak_kv_bytes <= engine.peak_promised_bytes <= engine.kv_pool_bytes
        assert engine.kv_pool_bytes == kv_mib * MIB

    again = replay(trace, router, pools, hardware)
    assert [*map(seen, again.outcomes)] == [*map(seen, result.outcomes)]
    assert again.engines == result.engines


@pytest.mark.parametrize(("num_engines", "kv_mib"), [(1, 32), (1, 8), (2, 8)])
def test_steps_computed_as_one_change_nothing(
    hardware: Hardware,
    router: RouterConfig,
    make_pools: MakePools,
    monkeypatch: pytest.MonkeyPatch,
    num_engines: int,
    kv_mib: int,
) -> None:
    trace = poisson(150, per_second=4.0 * num_engines)
    fast = replay(trace, router, make_pools(num_engines, kv_mib), hardware)
    monkeypatch.setattr(FastForward, "draft", lambda *arguments: {})
    slow = replay(trace, router, make_pools(num_engines, kv_mib), hardware)
    assert [*map(seen, fast.outcomes)] == [*map(seen, slow.outcomes)]
    for one, other in zip(fast.engines, slow.engines, strict=True):
        assert one.num_steps == other.num_steps
        assert one.peak_kv_bytes == other.peak_kv_bytes
        assert one.busy_share == pytest.approx(other.busy_share)


def test_too_much_for_the_memory_is_queued_and_refused_for_a_reason(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    queue = msgspec.structs.replace(router.routing.queue, timeout=2.0)
    routing = msgspec.structs.replace(router.routing, queue=queue)
    short = msgspec.structs.replace(router, routing=routing)
    trace = [
        TraceRequest(at=0.01 * number, prompt_tokens=200, output_tokens=100, max_tokens=100)
        for number in range(60)
    ]
    result = replay(trace, short, make_pools(kv_mib=8), hardware)
    summary = summarize(result)
    assert summary.actions["reject"].keys() <= {"KV_HEADROOM", "QUEUE_TIMEOUT"}
    assert summary.refused > 10
    assert sum(summary.actions["queue"].values()) >= 1
    assert sum(map(sum, (each.values() for each in summary.actions.values()))) == 60


def test_a_shared_prefix_is_computed_once(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    shared = [
        TraceRequest(
            at=2.0 * number, prompt_tokens=120, output_tokens=1, prefix="p", prefix_tokens=96
        )
        for number in range(2)
    ]
    first, second = replay(shared, router, make_pools(), hardware).outcomes
    assert first.ttft_s == pytest.approx(0.004 + 0.130)
    assert second.ttft_s == pytest.approx(0.004 + 0.034)


def test_engines_that_share_a_machine_slow_each_other(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=9, output_tokens=50) for _ in range(2)]
    shared = msgspec.structs.replace(hardware, slowdown={2: 1.5})
    alone = replay(trace, router, make_pools(2), hardware)
    beside = replay(trace, router, make_pools(2), shared)
    assert {outcome.engine for outcome in beside.outcomes} == {"single-0", "single-1"}
    assert beside.duration_s > 1.3 * alone.duration_s


def test_the_search_finds_the_fewest_engines(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    trace = poisson(80, per_second=8.0)

    def with_engines(count: int) -> Summary:
        return summarize(replay(trace, router, make_pools(count), hardware))

    objectives = ReplayObjectives(ttft_s=0.8, tpot_s=None)
    found = find_engines(with_engines, {"single": 1}, objectives, with_engines(1))
    assert found.engines_needed is not None
    needed = found.engines_needed["single"]
    assert needed > 1
    assert objectives.are_met(with_engines(needed))
    assert not objectives.are_met(with_engines(needed - 1))

    never = find_engines(
        with_engines, {"single": 1}, ReplayObjectives(ttft_s=0.001), with_engines(1)
    )
    assert never.engines_needed is None
    assert "no number of engines" in as_table(never)


def test_another_configuration_resizes_the_engine(
    hardware: Hardware, make_pools: MakePools
) -> None:
    config = make_pools(kv_mib=16, sequences=4)["single"].config
    measured = hardware.engine_of("single", config)
    resized = measured.resized(config)
    assert resized.profile.kv_pool_bytes == 16 * MIB
    assert resized.limits.max_sequences == 4
    # Fewer rows need smaller buffers, of 1 KiB each in this file.
    assert sum(entry.reserved_bytes for entry in resized.ledger) == 36 * MIB
    with pytest.raises(HardwareError, match="a prompt chunk of 128 tokens needs"):
        measured.resized(make_pools(kv_mib=1)["single"].config)
    with pytest.raises(HardwareError, match="none has the 4 GPUs of pool large"):
        hardware.engine_of("large", msgspec.structs.replace(config, gpus=4))


def changed(config: EngineConfig, path: str, value: object) -> EngineConfig:
    """Return a configuration with another value of one field, such as `model.dtype`."""
    document = msgspec.to_builtins(config)
    *sections, field = path.split(".")
    inner = document
    for section in sections:
        inner = inner[section]
    inner[field] = value
    return msgspec.convert(document, EngineConfig)


FACTS = {"dtype": "bfloat16", "quantization": "int4+int8", "kv_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("engine", "vllm", "engine: vllm is not replayed; only native engines are"),
        ("device", "cuda", "device: 'cuda' was not measured, but 'cpu' was; measure a service"),
        ("model.name", "n", "model.name: 'n' was not measured, but 'm' was; measure a service"),
        ("model.dtype", "float16", "model.dtype: 'float16' was not measured, but 'bfloat16' was"),
        ("model.quantization", "int8", "quantization: 'int8' was not measured, but 'int4.int8'"),
        ("model.kv_dtype", "fp8", "model.kvDtype: 'float8' was not measured, but 'bfloat16' was"),
        ("model.max_model_len", 4097, "maxModelLen: 4097 is above the 4096 that was measured; set"),
    ],
)
def test_a_service_that_was_not_measured_is_refused(
    hardware: Hardware,
    router: RouterConfig,
    make_pools: MakePools,
    field: str,
    value: object,
    message: str,
) -> None:
    engine = msgspec.structs.replace(hardware.engines["single"], **FACTS)
    measured = msgspec.structs.replace(hardware, engines={"single": engine})
    trace = [TraceRequest(at=0.0, prompt_tokens=10, output_tokens=2)]
    config = make_pools()["single"].config
    assert replay(trace, router, {"single": PoolPlan(config, 1)}, measured).outcomes

    other = PoolPlan(changed(config, field, value), 1)
    with pytest.raises(HardwareError, match=f"^pool single: .*{message}"):
        replay(trace, router, {"single": other}, measured)


def test_auto_is_what_was_measured_except_for_float8(
    hardware: Hardware, make_pools: MakePools
) -> None:
    config = make_pools()["single"].config
    engine = msgspec.structs.replace(hardware.engines["single"], **FACTS)
    for path, value in (
        ("model.dtype", "bfloat16"),
        ("model.quantization", "int4"),
        ("model.quantization", "none"),
        ("model.max_model_len", 4096),
        ("device", "auto"),
        ("engine", "native"),
    ):
        assert not engine.mismatch(changed(config, path, value)), path
    float8 = msgspec.structs.replace(engine, kv_dtype="float8")
    assert "'auto' was not measured, but 'float8' was" in float8.mismatch(config)
    assert not float8.mismatch(changed(config, "model.kv_dtype", "fp8"))
    # A file without these facts tells nothing about them.
    plain = hardware.engines["single"]
    assert not plain.mismatch(changed(config, "model.kv_dtype", "fp8"))

    # KV has the type of activations if the manifest names one.
    wide = msgspec.structs.replace(engine, dtype="float32")
    assert "model.kvDtype: 'float32' was not measured, but 'bfloat16' was" in wide.mismatch(
        changed(config, "model.dtype", "float32")
    )


def test_a_pool_gets_the_measured_engine_whose_figures_hold(
    hardware: Hardware, make_pools: MakePools
) -> None:
    one = msgspec.structs.replace(hardware.engines["single"], **FACTS)
    float8 = msgspec.structs.replace(one, kv_dtype="float8")
    measured = msgspec.structs.replace(hardware, engines={"single": one, "large": float8})
    config = changed(make_pools()["single"].config, "model.kv_dtype", "fp8")
    assert measured.engine_of("other", config) is float8


def test_pipelined_engines_are_refused_by_name(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=10, output_tokens=2)]
    engine = hardware.engines["single"]
    limits = replace(engine.limits, max_in_flight=2)
    pipelined = msgspec.structs.replace(engine, limits=limits)
    measured = msgspec.structs.replace(hardware, engines={"single": pipelined})
    with pytest.raises(HardwareError, match=r"limits\.max_in_flight: 2 steps in flight"):
        replay(trace, router, make_pools(), measured)

    config = make_pools()["single"].config
    stages = changed(config, "parallelism.pipeline", 2)
    assert not engine.mismatch(stages)  # on a CPU, one step at a time
    on_gpu = changed(stages, "device", "cuda")
    cuda = msgspec.structs.replace(engine, device="cuda")
    assert "parallelism.pipeline: 2 stages with several steps" in cuda.mismatch(on_gpu)


def test_a_summary_is_a_table_and_json(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    summary = summarize(replay(poisson(20, 2.0), router, make_pools(), hardware))
    assert msgspec.json.decode(as_json(summary), type=Summary) == summary
    table = as_table(summary)
    for words in ("accepted", "time to first token", "between tokens", "single-0", "20 requests"):
        assert words in table
    assert quantiles([]) is None
    tail = quantiles(range(1, 101))
    assert tail is not None
    assert (tail.p50, tail.p95, tail.p99) == (50, 95, 99)


def test_a_summary_of_refusals_at_once_has_no_tokens(
    hardware: Hardware, router: RouterConfig, make_pools: MakePools
) -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=5000, output_tokens=9)]
    result = replay(trace, router, make_pools(), hardware)
    assert result.duration_s == 0.0
    summary = summarize(result)
    assert (summary.refused, summary.output_tokens_per_second) == (1, 0.0)
    assert "refused            1" in as_table(summary)


def test_virtual_time_jumps_and_never_goes_back() -> None:
    loop = VirtualLoop()
    times: list[float] = []

    async def main() -> None:
        for pause in (3600.0, 0.0, 1e-6, 50.0):
            await asyncio.sleep(pause)
            times.append(time.monotonic())

    began = loop.time()
    run(main(), loop)
    assert times == sorted(times)
    assert times[-1] - began == pytest.approx(3650.000001)
    assert abs(time.monotonic() - times[-1]) > 0  # the real clock is back


def test_a_wait_for_nothing_ends_the_replay() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="no event"):
        run(main(), VirtualLoop())


def test_progress_is_told(hardware: Hardware, router: RouterConfig, make_pools: MakePools) -> None:
    told: list[int] = []
    result: Replay = replay(poisson(130, 20.0), router, make_pools(), hardware, told.append)
    assert told == [0, 64, 128]
    assert len(result.outcomes) == 130
