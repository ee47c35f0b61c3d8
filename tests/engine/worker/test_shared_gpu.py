"""What a worker takes for its own on a GPU that others use, too, and what it keeps of it."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from ullage_testing.fake_gpu import CUDA, MIB, FakeGpu
from ullage_testing.fake_nvml import FakeNvml

from ullage_engine.gpu.nvml import Gpu
from ullage_engine.memory import shared_device
from ullage_engine.memory.ledger import Ledger, LedgerError
from ullage_engine.worker.device import (
    GpuAtStart,
    MemoryMeter,
    Workspace,
    at_start,
    enforce_ledger,
    reserve_for_others,
)

GIB = 1024 * MIB


DRIVERS = """
import json, os, torch
from ullage_common.config.engine import EngineConfig, ModelSection
from ullage_engine.worker.device import open_driver

torch.cuda.is_available = lambda: True
for device, rank in (("auto", 1), ("auto", 2), ("cpu", 0)):
    config = EngineConfig(model=ModelSection(source="pkg://a/b", name="m"), device=device)
    driver = open_driver(config, rank)
    own = driver and driver.gpu.process_bytes().get(os.getpid())
    print(json.dumps(driver and [driver.gpu.uuid, driver.free_bytes, own]))
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(shared_device, "POLL_S", 0.0)
    monkeypatch.setattr(shared_device, "STABLE_S", 0.01)
    yield gpu
    monkeypatch.undo()


def open_driver(gpu: FakeGpu) -> GpuAtStart | None:
    return at_start(cast(Gpu, gpu))


def start(gpu: FakeGpu) -> MemoryMeter:
    """Creates a context of 500 MiB and opens a meter."""
    driver = open_driver(gpu)
    gpu.context_bytes = 500 * MIB
    return MemoryMeter(CUDA, driver)


@pytest.mark.parametrize("lists_processes", [True, False])
def test_neighbours_are_not_charged_whether_the_driver_lists_processes_or_not(
    gpu: FakeGpu, lists_processes: bool
) -> None:
    gpu.lists_processes = lists_processes
    gpu.others = {500: 30 * GIB}
    meter = start(gpu)
    assert meter.source == ("nvml" if lists_processes else "difference")
    assert meter.used_bytes() == 500 * MIB
    weights = gpu.allocate(20 * GIB)
    assert meter.used_bytes() == 20 * GIB + 500 * MIB
    assert meter.free_bytes() == gpu.free_bytes
    del weights


@pytest.mark.parametrize(("lists_processes", "most"), [(True, 0), (False, 1548 * MIB)])
def test_an_engine_that_starts_at_the_same_time_is_charged_with_little(
    gpu: FakeGpu, lists_processes: bool, most: int
) -> None:
    gpu.lists_processes = lists_processes
    meter = start(gpu)
    weights = gpu.allocate(10 * GIB)
    gpu.others = {500: 16 * GIB}
    assert meter.used_bytes() - (10 * GIB + 500 * MIB) <= most
    gpu.others = {}
    assert meter.used_bytes() == 10 * GIB + 500 * MIB
    del weights


def test_a_dead_workers_memory_is_waited_for(gpu: FakeGpu) -> None:
    gpu.others = {500: 60 * GIB}
    gpu.returns_per_look = 20 * GIB
    gpu.lists_processes = False
    meter = start(gpu)
    assert gpu.others == {500: 0}
    assert meter.used_bytes() == 500 * MIB


def test_an_id_of_the_host_that_is_ours_by_chance_is_not_believed(gpu: FakeGpu) -> None:
    gpu.pid = 40_000
    gpu.others = {7: 30 * GIB}
    meter = start(gpu)
    assert (meter.source, meter.used_bytes()) == ("nvml", 500 * MIB)
    assert meter.others() == "process 7 with 30720 MiB"


def test_a_driver_that_shows_another_gpu_than_cuda_uses_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.cuda_uuid = "ffffffff"
    gpu.install(monkeypatch)
    meter = start(gpu)
    assert meter.source == "device"
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text
    assert meter.used_bytes() == 500 * MIB


def test_without_a_driver_a_neighbour_costs_no_more_than_a_context(gpu: FakeGpu) -> None:
    gpu.others = {500: 30 * GIB}
    gpu.context_bytes = 500 * MIB
    meter = MemoryMeter(CUDA)
    assert (meter.source, meter.used_bytes()) == ("device", 2 * GIB)
    assert meter.others() == "other processes"


def settled(gpu: FakeGpu) -> tuple[MemoryMeter, Workspace, Any]:
    """A worker after its start: 20 GiB of tensors, 2 GiB of workspace."""
    meter = start(gpu)
    held = gpu.allocate(20 * GIB)
    gpu.allocate(2 * GIB)
    return meter, Workspace(CUDA, meter), held


def test_the_workspace_is_taken_back_before_others_have_it(gpu: FakeGpu) -> None:
    _, workspace, held = settled(gpu)
    gpu.others = {500: gpu.free_bytes - 64 * MIB}
    with pytest.raises(Exception, match="CUDA out of memory"):
        gpu.allocate(3 * GIB)
    assert gpu.reserved_bytes == held.nbytes
    assert workspace.restore()
    assert gpu.reserved_bytes == 22 * GIB - 16 * MIB
    assert gpu.allocate(GIB)  # of what is cached


def test_a_workspace_that_others_have_is_missing_until_they_give_it_back(gpu: FakeGpu) -> None:
    _, workspace, _held = settled(gpu)
    with pytest.raises(Exception, match="CUDA out of memory"):
        gpu.allocate(80 * GIB)
    gpu.others = {500: gpu.free_bytes - 64 * MIB}
    assert not workspace.restore()
    gpu.others = {}
    assert workspace.restore()


def test_a_device_without_room_for_libraries_is_short_even_with_its_workspace(
    gpu: FakeGpu,
) -> None:
    _, workspace, _held = settled(gpu)
    gpu.others = {500: gpu.free_bytes - 16 * MIB}
    assert workspace.restore()
    gpu.others[500] += MIB
    assert not workspace.restore()


def test_a_workspace_that_is_whole_is_not_given_away_for_a_moment(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, workspace, _held = settled(gpu)
    monkeypatch.setattr(gpu, "allocate", None)
    monkeypatch.setattr(torch.cuda, "empty_cache", None)
    assert workspace.restore()


def test_what_the_allocator_took_beyond_the_workspace_goes_to_libraries(gpu: FakeGpu) -> None:
    _, workspace, _held = settled(gpu)
    gpu.allocate(5 * GIB)
    gpu.others = {500: gpu.free_bytes}
    assert workspace.restore()
    assert gpu.reserved_bytes == 22 * GIB - 16 * MIB
    assert gpu.free_bytes >= 3 * GIB


def ledger_of(gpu: FakeGpu, allocated: int) -> Ledger:
    ledger = Ledger(gpu.total_bytes, 0.85, configurable=False)
    ledger.record("context", 500 * MIB)
    ledger.record("weights", allocated - 500 * MIB)
    ledger.reserve("safety_reserve", 2 * GIB)
    return ledger


def test_torch_is_held_to_the_ledger(gpu: FakeGpu) -> None:
    meter, _, _held = settled(gpu)
    ledger = ledger_of(gpu, 22 * GIB + 500 * MIB)
    ledger.reserve_for_others(30 * GIB, "process 500 with 30720 MiB")
    enforce_ledger(ledger, CUDA, meter)
    assert gpu.allocate(2 * GIB + 1900 * MIB)  # of the reserve
    with pytest.raises(Exception, match="1 GiB allowed"):
        gpu.allocate(5 * GIB)


@pytest.mark.parametrize(("missing", "is_wrong"), [(0, False), (400 * MIB, False), (GIB, True)])
def test_a_ledger_that_differs_from_the_driver_is_told_with_all_figures(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, missing: int, is_wrong: bool
) -> None:
    meter, _, _held = settled(gpu)
    with caplog.at_level(logging.INFO):
        enforce_ledger(ledger_of(gpu, 22 * GIB + 500 * MIB - missing), CUDA, meter)
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert bool(warnings) == is_wrong
    text = f"the ledger has {(23028 * MIB - missing) // MIB} MiB allocated, the process 23028 MiB"
    assert f"{text} by nvml, 22528 MiB of them in torch's allocator" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "kv_mib", "is_told"), [(0, 68_000 - 23_028 - 2048, False), (40 * GIB, 13_964, True)]
)
def test_the_pool_is_what_neighbours_leave(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, theirs: int, kv_mib: int, is_told: bool
) -> None:
    meter, _, _held = settled(gpu)
    if theirs:
        gpu.others = {500: theirs}
    ledger = ledger_of(gpu, 22 * GIB + 500 * MIB)
    reserve_for_others(ledger, CUDA, meter, safety_reserve=2 * GIB, longest_kv=GIB)
    assert ledger.available_bytes == kv_mib * MIB
    assert ("held by process 500 with 40960 MiB" in caplog.text) == is_told
    assert ledger.promised_bytes == 23_028 * MIB + 2 * GIB


def test_a_pool_that_fits_nowhere_names_who_holds_the_memory(gpu: FakeGpu) -> None:
    meter, _, _held = settled(gpu)
    gpu.others = {500: gpu.free_bytes - 20 * MIB}
    ledger = ledger_of(gpu, 22 * GIB + 500 * MIB)
    reserve_for_others(ledger, CUDA, meter, safety_reserve=2 * GIB, longest_kv=GIB)
    words = r"^memory: kv_pool needs 64 MiB, but 0 MiB .* since process 500 with 56952 MiB hold"
    with pytest.raises(LedgerError, match=words):
        ledger.reserve("kv_pool", 64 * MIB)


def test_memory_that_is_returned_while_the_pool_is_sized_is_waited_for(gpu: FakeGpu) -> None:
    meter, _, _held = settled(gpu)
    gpu.others = {500: 50 * GIB}
    gpu.returns_per_look = 10 * GIB
    ledger = ledger_of(gpu, 22 * GIB + 500 * MIB)
    reserve_for_others(ledger, CUDA, meter, safety_reserve=2 * GIB, longest_kv=GIB)
    assert ledger.others_bytes == 0


def test_the_driver_tells_of_each_ranks_own_gpu(gpus: FakeNvml) -> None:
    gpus.reset({"gpus": 2, "memory_used": 40_000_000_000, "1.memory_used": 1_000_000_000})
    gpus.set({"1.processes": 1, "1.process.0.bytes": 5 * MIB})
    done = subprocess.run(
        [sys.executable, "-c", DRIVERS],
        env=gpus.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    second, third, none_on_a_cpu = map(json.loads, done.stdout.splitlines())
    assert second == ["GPU-00000001-aaaa", 78_400_000_000, 5 * MIB]
    assert third is None
    assert none_on_a_cpu is None
