"""What Prometheus scrapes, over HTTP, after real requests."""

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import msgspec
import pytest
from prometheus_client import generate_latest
from ullage_testing.ports import free_port

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import DegradeLevel, DegradeSection, EngineConfig
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.figures import Figures
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.metrics import EngineMetrics
from ullage_kv import FAILURES, TierStats
from ullage_kv.service import PeerTraffic

Serve = Callable[..., AbstractAsyncContextManager[Any]]


def scrape(port: int) -> dict[str, float]:
    """Samples by name and labels, the constant labels left out."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return parse(response.read().decode())


def parse(text: str) -> dict[str, float]:
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'(engine="0",?|model_name="smollm2-135m",?)', "", name)
            samples[name.replace("{}", "").replace(",}", "}")] = float(value)
    return samples


def test_metrics(serve: Serve, config: EngineConfig) -> None:
    port = free_port()
    server = msgspec.structs.replace(config.server, metrics_port=port)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), stop=pb.StopConditions(max_tokens=10)
    )

    async def scenario() -> None:
        async with serve(msgspec.structs.replace(config, server=server)) as engine:
            await engine.generate(request)
            with pytest.raises(grpc.aio.AioRpcError):
                await engine.generate(pb.GenerateRequest())
            with pytest.raises(grpc.aio.AioRpcError):
                await engine.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[8])))
            kill = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_WORKER_KILL)
            await engine.admin.InjectFault(kill)
            await engine.until(lambda state: not state.ready)
            await engine.until(lambda state: state.ready and state.worker_restarts == 1)
            check(await asyncio.to_thread(scrape, port))

    asyncio.run(scenario())


def check(samples: dict[str, float]) -> None:
    assert samples['ullage_requests_total{outcome="length"}'] == 1
    assert samples['ullage_requests_total{outcome="INVALID_FIELD"}'] == 1
    assert samples['ullage_requests_total{outcome="KV_HEADROOM"}'] == 1
    for reason, count in {"length": 1, "stop": 0, "abort": 0}.items():
        assert samples[f'vllm:request_success_total{{finished_reason="{reason}"}}'] == count
    for prefix in ("ullage_", "vllm:"):
        assert samples[f"{prefix}prompt_tokens_total"] == 3
        assert samples[f"{prefix}generation_tokens_total"] == 10
        assert samples[f"{prefix}time_to_first_token_seconds_count"] == 1
        assert samples[f"{prefix}inter_token_latency_seconds_count"] == 9
        assert samples[f"{prefix}e2e_request_latency_seconds_count"] == 1
        assert samples[f"{prefix}request_generation_tokens_sum"] == 10
        assert samples[f'{prefix}request_generation_tokens_bucket{{le="5.0"}}'] == 0
        assert samples[f'{prefix}request_generation_tokens_bucket{{le="10.0"}}'] == 1
        assert samples[f"{prefix}preemptions_total".replace(":pre", ":num_pre")] == 0
    assert samples["ullage_kv_blocks"] == 100
    assert samples["ullage_memory_headroom_bytes"] == 160_000
    assert samples["ullage_worker_restarts_total"] == 1
    assert samples["ullage_worker_resident_bytes"] == 12_345
    assert samples["ullage_worker_cpu_seconds_total"] > 0
    assert samples["ullage_server_resident_bytes"] > 1e6
    assert samples["vllm:num_requests_running"] == samples["vllm:kv_cache_usage_perc"] == 0
    config = [name for name in samples if name.startswith("vllm:cache_config_info")]
    assert 'block_size="16"' in config[0]
    assert 'num_gpu_blocks="100"' in config[0]


PROFILE = MemoryProfile(
    block_tokens=16,
    groups=(CacheGroup(bytes_per_token=10),),
    state_bytes_per_sequence=0,
    activation_bytes_per_token=0,
    sampler_bytes_per_sequence=0,
    prefill_chunk_tokens=64,
    kv_pool_bytes=16_000,
)


def make_state(**fields: Any) -> WorkerState:
    """100 blocks: 30 free, 20 only cached, 50 in block tables."""
    return WorkerState(
        total_bytes=1 << 20,
        threshold=0.9,
        kv_pool_bytes=16_000,
        kv_free_bytes=4800,
        kv_reclaimable_bytes=3200,
        kv_committed_bytes=1600,
        num_running=3,
        num_waiting=2,
        expected_output_tokens=10,
        decode_tokens_per_second=1.0,
        prefill_tokens_per_second=1.0,
        prefill_backlog_tokens=0,
        releases=[],
        ledger=[],
        rss_bytes=1,
        num_steps=1,
        **{"num_preemptions": 0, "num_oom_events": 0, **fields},
    )


def make_ready(state: WorkerState) -> Ready:
    return Ready(profile=PROFILE, max_model_len=64, vocab_size=9, dtype="float32", state=state)


def read(metrics: EngineMetrics) -> dict[str, float]:
    text = generate_latest(metrics.registry).decode()
    return parse(text)


def test_the_workers_memory_cache_and_sessions() -> None:
    metrics = EngineMetrics("smollm2-135m")
    metrics.worker_ready(make_ready(make_state()))
    metrics.worker_state(
        make_state(
            kv_used_bytes=7600,
            prefix_lookup_tokens=1000,
            prefix_hit_tokens=640,
            prefix_merged_tokens=32,
            num_draft_tokens=40,
            num_accepted_tokens=30,
            num_sessions=4,
            session_bytes=2400,
            num_swaps=2,
            swap_out_bytes=800,
            swap_in_bytes=500,
            swap_seconds=0.25,
            swap_bytes_per_second=4e9,
            kv_withheld_bytes=160,
            num_preemptions=5,
            pressure_level=2,
        )
    )
    samples = read(metrics)
    assert samples["ullage_kv_blocks_used"] == 50
    assert samples["ullage_kv_waste_ratio"] == pytest.approx(0.05)
    assert samples["ullage_memory_headroom_bytes"] == 6400
    assert samples["ullage_prefix_cache_merged_tokens_total"] == 32
    for prefix in ("ullage_spec_decode", "vllm:spec_decode_num"):
        drafts = [samples[f"{prefix}_{each}_tokens_total"] for each in ("draft", "accepted")]
        assert drafts == [40, 30]
    assert (samples["ullage_sessions"], samples["ullage_session_bytes"]) == (4, 2400)
    assert (samples["ullage_preemptions_total"], samples["ullage_swaps_total"]) == (5, 2)
    assert samples["ullage_engine_pressure_level"] == 2
    swapped = [
        samples[f"ullage_swap_{name}_total"] for name in ("out_bytes", "in_bytes", "seconds")
    ]
    assert swapped == [800, 500, 0.25]
    assert samples["ullage_swap_bandwidth_bytes_per_second"] == 4e9
    assert samples["ullage_memory_withheld_bytes"] == 160
    for queries, hits in (
        ("ullage_prefix_cache_queries_tokens_total", "ullage_prefix_cache_hits_tokens_total"),
        ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ):
        assert (samples[queries], samples[hits]) == (1000, 640)


def test_counts_go_on_when_a_worker_is_replaced() -> None:
    metrics = EngineMetrics("smollm2-135m")
    metrics.worker_ready(make_ready(make_state()))
    metrics.worker_state(make_state(prefix_lookup_tokens=100, num_oom_events=1))
    metrics.worker_ready(make_ready(make_state()))
    metrics.worker_state(
        make_state(
            prefix_lookup_tokens=30,
            num_oom_events=1,
            num_nonfinite_logits=3,
            num_overlapped_steps=7,
        )
    )
    samples = read(metrics)
    assert samples["ullage_prefix_cache_queries_tokens_total"] == 130
    assert samples["ullage_oom_events_total"] == 2
    assert samples["ullage_nonfinite_logits_total"] == 3
    assert samples["ullage_steps_overlapped_total"] == 7


def test_steps_and_queue_times_go_on_when_a_worker_is_replaced() -> None:
    metrics = EngineMetrics("smollm2-135m")
    former = Figures()
    present = Figures()
    for num_sequences in (1, 3, 3, 2):
        former.observe_step(0.02, 8 * num_sequences, num_sequences)
    former.observe_start(time.monotonic() - 10.5)
    former.observe_start(0.0)
    metrics.worker_ready(make_ready(make_state()))
    metrics.worker_state(make_state(figures=former.copy()))
    present.observe_step(100.0, 1, 1)
    metrics.worker_ready(make_ready(make_state()))
    metrics.worker_state(make_state(figures=present.copy()))
    samples = read(metrics)
    assert samples["ullage_step_seconds_count"] == 5
    assert samples["ullage_step_seconds_sum"] == pytest.approx(100.08)
    assert samples['ullage_step_seconds_bucket{le="0.01"}'] == 0
    assert samples['ullage_step_seconds_bucket{le="30.0"}'] == 4
    for name in ("ullage_step_tokens", "vllm:iteration_tokens_total"):
        assert samples[f"{name}_sum"] == 73
        assert samples[f'{name}_bucket{{le="16.0"}}'] == 3
    assert samples['ullage_step_sequences_bucket{le="2.0"}'] == 3
    assert samples['ullage_batch_size_changes_total{direction="grow"}'] == 3
    assert samples['ullage_batch_size_changes_total{direction="shrink"}'] == 1
    for prefix in ("ullage_", "vllm:"):
        assert samples[f"{prefix}request_queue_time_seconds_count"] == 1
        assert samples[f'{prefix}request_queue_time_seconds_bucket{{le="10.0"}}'] == 0
        assert samples[f'{prefix}request_queue_time_seconds_bucket{{le="15.0"}}'] == 1


def test_an_empty_pool_wastes_nothing() -> None:
    metrics = EngineMetrics("smollm2-135m")
    metrics.worker_ready(make_ready(make_state(kv_used_bytes=0)))
    metrics.worker_state(msgspec.structs.replace(make_state(), kv_free_bytes=12_800))
    assert read(metrics)["ullage_kv_waste_ratio"] == 0


def test_degraded_requests_are_counted_by_what_was_lowered(
    serve: Serve, config: EngineConfig
) -> None:
    """Any request at all is pressure here."""
    level = DegradeLevel(below_percent=100, max_output_tokens=5, max_temperature=0.0)
    degrade = DegradeSection(pressure_levels=(level,))
    port = free_port()
    server = msgspec.structs.replace(config.server, metrics_port=port)
    pressed = msgspec.structs.replace(config, server=server, degrade=degrade)
    tokens = pb.TokenIds(ids=[1, 2, 3])

    async def scenario() -> None:
        told = json.loads(msgspec.json.encode(degrade))
        async with serve(pressed, degrade=told, step_s=0.02) as engine:
            long = pb.GenerateRequest(token_ids=tokens, stop=pb.StopConditions(max_tokens=300))
            first = asyncio.create_task(engine.generate(long))
            await engine.until(lambda state: state.pressure_level == 1)
            second = await engine.generate(pb.GenerateRequest(token_ids=tokens))
            assert second.finished.usage.completion_tokens == 5
            short = pb.GenerateRequest(token_ids=tokens, stop=pb.StopConditions(max_tokens=2))
            await engine.generate(short)
            samples = await asyncio.to_thread(scrape, port)
            assert samples['ullage_engine_degraded_requests_total{what="max_tokens"}'] == 1
            assert samples['ullage_engine_degraded_requests_total{what="temperature"}'] == 2
            assert samples["ullage_engine_pressure_level"] == 1
            first.cancel()

    asyncio.run(scenario())


def test_steps_that_ran_out_of_memory_lower_the_health_for_a_while() -> None:
    status = EngineStatus()
    status.worker_ready(make_ready(make_state(num_oom_events=3)))
    assert status.health == 1.0
    status.worker_state(make_state(num_oom_events=4))
    survived = status.health
    assert 0.8 <= survived < 0.9
    status.worker_state(make_state(num_oom_events=4))
    assert status.health >= survived
    status.worker_state(make_state(num_oom_events=6))
    assert status.health < 0.8 * survived


def test_what_peers_read_and_write_is_exported() -> None:
    metrics = EngineMetrics("smollm2-135m")
    metrics.watch_peers(
        lambda: PeerTraffic(
            read_blocks=3,
            read_bytes=300,
            written_blocks=2,
            written_bytes=250,
            leases=1,
            held_slots=4,
            expired_leases=5,
        )
    )
    samples = parse(generate_latest(metrics.registry).decode())
    assert {name: each for name, each in samples.items() if "kv_peers" in name} == {
        "ullage_kv_peers_leases": 1,
        "ullage_kv_peers_held_slots": 4,
        "ullage_kv_peers_read_blocks_total": 3,
        "ullage_kv_peers_read_bytes_total": 300,
        "ullage_kv_peers_written_blocks_total": 2,
        "ullage_kv_peers_written_bytes_total": 250,
        "ullage_kv_peers_expired_leases_total": 5,
    }


def test_failures_of_tiers_are_exported_before_the_first_one() -> None:
    """So that Prometheus sees all of them as an increase."""
    metrics = EngineMetrics("smollm2-135m")
    counter = Counter[str]()
    metrics.watch_tiers(lambda: [TierStats("file", "threads", failures=counter)], dict)
    before = parse(generate_latest(metrics.registry).decode())
    counter["full"] = 200
    after = parse(generate_latest(metrics.registry).decode())
    name = "ullage_kv_tier_failures_total"
    failures = [f'{name}{{status="{each}",tier="file"}}' for each in FAILURES]
    assert len(failures) == 7
    assert [before[each] for each in failures] == [0] * 7
    assert {each: after[each] for each in failures if after[each]} == {failures[0]: 200}
    assert "full" in failures[0]


def test_what_tiers_had_and_nobody_began_with_is_exported() -> None:
    metrics = EngineMetrics("smollm2-135m")
    not_loaded = {("file", "slower"): 3}
    metrics.watch_tiers(lambda: [TierStats("host", "memory", hits=2)], lambda: not_loaded)
    not_loaded["remote", "unused"] = 1
    text = generate_latest(metrics.registry).decode()
    lines = [line for line in text.splitlines() if line.startswith("ullage_kv_tier_")]
    assert any('tier="host"' in line and line.startswith("ullage_kv_tier_hits") for line in lines)
    counted = [line for line in lines if line.startswith("ullage_kv_tier_not_loaded_total")]
    assert len(counted) == 2
    assert any('tier="file"' in each and 'reason="slower"' in each for each in counted)
    assert any('tier="remote"' in each and each.endswith(" 1.0") for each in counted)
