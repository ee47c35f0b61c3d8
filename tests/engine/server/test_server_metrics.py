"""What Prometheus scrapes, over HTTP, after real requests."""

import asyncio
import re
import socket
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import msgspec
import pytest

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.config import EngineConfig

Serve = Callable[..., AbstractAsyncContextManager[Any]]


def scrape(port: int) -> dict[str, float]:
    """Samples by name and labels, the constant labels left out."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'(engine="0",?|model_name="smollm2-135m",?)', "", name)
            samples[name.replace("{}", "").replace(",}", "}")] = float(value)
    return samples


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


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
            await engine.until(lambda state: state.ready)
            check(await asyncio.to_thread(scrape, port))

    asyncio.run(scenario())


def check(samples: dict[str, float]) -> None:
    assert samples['ullage_requests_total{outcome="length"}'] == 1
    assert samples['ullage_requests_total{outcome="INVALID_FIELD"}'] == 1
    assert samples['ullage_requests_total{outcome="KV_HEADROOM"}'] == 1
    assert samples['vllm:request_success_total{finished_reason="length"}'] == 1
    for prefix in ("ullage_", "vllm:"):
        assert samples[f"{prefix}prompt_tokens_total"] == 3
        assert samples[f"{prefix}generation_tokens_total"] == 10
        assert samples[f"{prefix}time_to_first_token_seconds_count"] == 1
        assert samples[f"{prefix}inter_token_latency_seconds_count"] == 9
        assert samples[f"{prefix}e2e_request_latency_seconds_count"] == 1
        assert samples[f"{prefix}preemptions_total".replace(":pre", ":num_pre")] == 0
    assert samples["ullage_kv_blocks_total"] == 100
    assert samples["ullage_memory_headroom_bytes"] == 160_000
    assert samples["ullage_worker_restarts_total"] == 1
    assert samples["ullage_worker_resident_bytes"] == 12_345
    assert samples["ullage_server_resident_bytes"] > 1e6
    assert samples["vllm:num_requests_running"] == samples["vllm:kv_cache_usage_perc"] == 0
    config = [name for name in samples if name.startswith("vllm:cache_config_info")]
    assert 'block_size="16"' in config[0] and 'num_gpu_blocks="100"' in config[0]
