"""A small service that was never measured: the figures are made up, and round."""

import logging
from collections.abc import Callable, Iterator

import msgspec
import pytest

from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import RouterConfig
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.worker_state import ReservationState
from ullage_engine.scheduler.batch_plan import SchedulerLimits
from ullage_replay.cost import Curve, StepCost
from ullage_replay.hardware import EngineHardware, Hardware, Overheads
from ullage_replay.simulation import PoolPlan

MIB = 1 << 20
TOKEN_BYTES = 16_384
"""A MiB holds 64 tokens, which are 4 blocks."""

MakePools = Callable[..., dict[str, PoolPlan]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave out the router's log lines of each decision."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def reservation(name: str, mib: int) -> ReservationState:
    return ReservationState(name=name, reserved_bytes=mib * MIB, allocated_bytes=mib * MIB)


@pytest.fixture
def hardware() -> Hardware:
    """An engine of 100 MiB: 10 ms a decode step, 1 ms more a sequence, 1 ms a prompt token."""
    engine = EngineHardware(
        gpus=1,
        device="cpu",
        max_model_len=4096,
        profile=MemoryProfile(
            block_tokens=16,
            groups=(CacheGroup(TOKEN_BYTES),),
            activation_bytes_per_token=1024,
            sampler_bytes_per_sequence=1024,
            prefill_chunk_tokens=128,
            kv_pool_bytes=32 * MIB,
        ),
        limits=SchedulerLimits(
            max_model_len=4096,
            max_sequences=8,
            prompt_tokens=128,
            is_chunked=True,
            decode_tokens=1 << 20,
        ),
        total_bytes=100 * MIB,
        threshold=0.85,
        ledger=(reservation("weights", 20), reservation("kv_pool", 32)),
        longest_step_s=0.5,
        cost=StepCost(
            decodes=Curve(((1.0, 0.011), (8.0, 0.018))),
            prompts=Curve(((1.0, 0.001), (128.0, 0.128))),
            prompt_step=0.01,
            per_decode_context=0.0,
            per_prompt_context=0.0,
        ),
        overheads=Overheads(before=0.003, after=0.001, between_steps=Curve(((1.0, 0.0005),))),
    )
    return Hardware(
        version=1, processor="none", model="m", measured_at="", engines={"single": engine}
    )


@pytest.fixture
def router() -> RouterConfig:
    pools = [{"name": "single", "targets": ["single:9000"]}]
    document = {
        "model": "m",
        "pools": pools,
        "limits": {"max_output_tokens": 512},
        "streaming": {"coalesce_window": 0, "coalesce_tokens": 1},
    }
    return msgspec.convert(document, RouterConfig)


@pytest.fixture
def make_pools() -> MakePools:
    def make(num_engines: int = 1, kv_mib: int = 32, sequences: int = 8) -> dict[str, PoolPlan]:
        document = {
            "model": {"source": "pkg://m/m.gguf", "name": "m"},
            "device": "cpu",
            "memory": {
                "max_kv": kv_mib * MIB,
                "device_bytes": 100 * MIB,
                "session_kv_limit": 0,
            },
            "batching": {"max_sequences": sequences},
            "server": {"pool": "single", "engine_id": "e"},
        }
        return {"single": PoolPlan(msgspec.convert(document, EngineConfig), num_engines)}

    return make
