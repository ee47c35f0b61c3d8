"""How much of a device's memory becomes KV of vLLM."""

from typing import cast

import pytest
from ullage_testing.fake_gpu import FakeGpu

from ullage_common.config.engine import EngineConfig, MemorySection, ModelSection
from ullage_engine.gpu.nvml import Gpu
from ullage_engine.vllm_worker import memory as start_memory
from ullage_engine.vllm_worker.memory import StartMemory
from ullage_engine.worker.device import GpuAtStart

GIB = 1 << 30


@pytest.mark.parametrize(("max_kv", "expected"), [(None, 48 * GIB), (20 * GIB, 20 * GIB)])
def test_kv_has_all_that_the_model_leaves_of_a_gpu(
    max_kv: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(80 * GIB)
    shown = GpuAtStart(cast(Gpu, gpu), gpu.free_bytes, gpu.total_bytes)
    monkeypatch.setattr(start_memory.vllm_core, "is_cpu", lambda: False)
    monkeypatch.setattr(start_memory, "_local_gpus", lambda num_ranks: [shown])
    config = EngineConfig(
        model=ModelSection(source="pkg://a/b", name="m"), memory=MemorySection(max_kv=max_kv)
    )
    memory = StartMemory(config)
    # Of 68 GiB of the threshold, 2 are the reserve, one the context's and 17 the model's.
    assert memory.size_pool([49 * GIB], 0, [gpu.free_bytes - GIB]) == [expected]
