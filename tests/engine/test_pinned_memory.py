"""Host memory is pinned exactly, for as long as somebody holds it, and plain where it cannot be."""

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from ullage_engine.kernels.kv_pool import HostPool, KVPool
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.pinned_memory import PinnedMemory, whole_pages

if TYPE_CHECKING:
    from ullage_testing.fake_cudart import FakeCudart

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
PAGE = 4096


def test_what_is_asked_for_is_pinned_and_not_the_next_power_of_two(
    fake_cudart: "FakeCudart",
) -> None:
    memory = PinnedMemory.allocate(5 * PAGE + 8, CUDA, "memory.hostKV")
    assert memory.is_pinned
    assert fake_cudart.registered == {memory.tensor.data_ptr(): 5 * PAGE + 8}
    assert memory.tensor.data_ptr() % PAGE == 0
    assert memory.tensor.nbytes == 5 * PAGE + 8
    assert not memory.tensor.any()
    assert whole_pages(memory.tensor.nbytes) == 6 * PAGE

    memory.close()
    memory.close()
    assert fake_cudart.calls == ["register", "synchronize", "unregister"]
    assert not memory.is_pinned


def test_memory_that_is_dropped_is_unregistered_while_it_is_mapped(
    fake_cudart: "FakeCudart",
) -> None:
    memory = PinnedMemory.allocate(PAGE, CUDA, "memory.hostKV")
    view = memory.tensor[8:]
    del memory
    assert not fake_cudart.registered
    view.fill_(3)  # still mapped
    assert fake_cudart.calls == ["register", "synchronize", "unregister"]


def test_refused_memory_is_plain_logged_once_and_no_error_of_the_next_kernel(
    fake_cudart: "FakeCudart", caplog: pytest.LogCaptureFixture
) -> None:
    fake_cudart.refuses_with = 2
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory.allocate(3 << 20, CUDA, "memory.hostKV")
    assert not memory.is_pinned
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("memory.hostKV: 3 MiB of host memory cannot be pinned (CUDA error 2, ")
    assert "out of memory" in text
    assert "ulimit -l" in text
    assert "memory limit" in text
    assert fake_cudart.last_error == 0, "torch would raise it at the next kernel"
    memory.close()
    memory.tensor.fill_(1)
    assert "unregister" not in fake_cudart.calls


def test_nothing_is_registered_for_a_cpu_or_for_no_bytes(fake_cudart: "FakeCudart") -> None:
    assert not PinnedMemory.allocate(PAGE, CPU, "memory.hostKV").is_pinned
    assert PinnedMemory.allocate(0, CUDA, "memory.hostKV").tensor.nbytes == 0
    assert not fake_cudart.calls


def test_a_host_pool_takes_the_bytes_of_its_slots() -> None:
    config = ModelConfig(
        architecture="llama",
        layers=(LayerSpec(),) * 3,
        hidden=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate=64,
        vocab=50,
        max_position=512,
        rope_theta=1e4,
        rms_eps=1e-5,
        tied=True,
    )
    pool = KVPool(config, 2, 16, torch.bfloat16, CPU)
    host = HostPool(pool, 5)
    pool.blocks.normal_()
    expected = pool.blocks[:, 0].clone()
    for slot in range(5):
        host.swap_out(0, slot)
    pool.clear(0)
    host.swap_in(4, 0)
    assert torch.equal(pool.blocks[:, 0], expected)
    assert HostPool(pool, 0).num_slots == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_takes_registered_memory_for_pinned() -> None:
    memory = PinnedMemory.allocate(1 << 20, CUDA, "memory.hostKV")
    assert memory.is_pinned
    assert memory.tensor.is_pinned()
    assert memory.tensor[PAGE:].is_pinned()
    view = memory.tensor
    memory.close()
    assert not view.is_pinned()
