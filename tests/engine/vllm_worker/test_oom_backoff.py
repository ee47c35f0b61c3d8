"""A worker that follows one that ran out of memory takes less, and counts what nobody counted."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.protocol.errors import GroupLostError
from ullage_engine.vllm_worker.oom_backoff import FILE, BackoffLimits, OomBackoff, Taken, lowered

TAKEN = Taken(kv_bytes=800, least_kv_bytes=100, chunk_tokens=512, least_chunk_tokens=16)


@dataclass
class Machine:
    """The clock, the kernel's count, and the folder that workers share."""

    folder: Path
    now: float = 1e9
    kills: int = 0

    def start(self, server: str = "1 0.0") -> OomBackoff:
        return OomBackoff(self.folder, server, lambda: self.kills, lambda: self.now)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_worker_takes_what_there_is(machine: Machine) -> None:
    assert machine.start().limits == BackoffLimits()


def test_the_next_worker_takes_less_each_time(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())
    worker = machine.start()
    assert worker.limits == BackoffLimits(kv_bytes=700, reserve_bytes=100, chunk_tokens=256)
    worker.took(Taken(kv_bytes=700, least_kv_bytes=100, chunk_tokens=256, least_chunk_tokens=16))
    worker.on_failed_step(MemoryError())
    assert machine.start().limits == BackoffLimits(
        kv_bytes=612, reserve_bytes=188, chunk_tokens=128
    )


def test_other_errors_change_nothing(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(RuntimeError("an error inside a step"))
    worker = machine.start()
    assert worker.limits == BackoffLimits()
    assert worker.take_unreported() == 0


def test_limits_outlive_a_worker_that_was_killed(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())
    machine.start()  # killed before it took anything
    assert machine.start().limits.kv_bytes == 700


def test_a_new_server_begins_anew(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())
    assert machine.start("2 0.0").limits == BackoffLimits()


def test_an_hour_later_all_is_taken_again(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())
    machine.now += 3599
    assert machine.start().limits != BackoffLimits()
    machine.now += 2
    assert machine.start().limits == BackoffLimits()


def test_a_step_is_counted_by_the_worker_that_it_ends(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())
    assert machine.start().take_unreported() == 0


def test_a_start_is_counted_by_the_next_worker_once(machine: Machine) -> None:
    machine.start().on_failed_start(MemoryError())
    machine.start().on_failed_start(ValueError("not of memory"))
    worker = machine.start()
    assert worker.take_unreported() == 1
    worker.took(TAKEN)
    assert machine.start().take_unreported() == 0


def test_a_worker_that_the_kernel_killed_for_memory_took_too_much(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    machine.kills += 1
    worker = machine.start()
    assert worker.limits.kv_bytes == 700
    assert worker.take_unreported() == 0  # the server has seen it


def test_so_did_one_whose_rank_ran_out_of_memory(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    error = GroupLostError("the process of a rank has ended")
    error.__cause__ = RuntimeError("Worker failed with error 'CUDA out of memory'")
    worker.on_failed_step(error)
    assert machine.start().limits.kv_bytes == 700


def test_a_worker_that_somebody_killed_did_not(machine: Machine) -> None:
    machine.kills = 3
    worker = machine.start()
    worker.took(TAKEN)
    worker = machine.start()
    assert worker.take_unreported() == 0
    assert worker.limits == BackoffLimits()


def test_a_worker_that_said_why_it_ended_did_so_once(machine: Machine) -> None:
    worker = machine.start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())
    machine.kills += 1  # of something else
    assert machine.start().limits.kv_bytes == 700


@pytest.mark.parametrize("content", [b"", b"{", b'{"server": 3}', b"\xff"])
def test_a_broken_file_is_no_obstacle(machine: Machine, content: bytes) -> None:
    (machine.folder / FILE).write_bytes(content)
    assert machine.start().limits == BackoffLimits()


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    worker = Machine(tmp_path / "missing").start()
    worker.took(TAKEN)
    worker.on_failed_step(MemoryError())


def test_prompts_that_are_not_cut_stay_whole() -> None:
    taken = Taken(kv_bytes=800, least_kv_bytes=0)
    assert lowered(BackoffLimits(), taken).chunk_tokens is None


@given(
    kv_bytes=st.integers(0, 1 << 40),
    least_kv_bytes=st.integers(0, 1 << 40),
    chunk_tokens=st.integers(0, 1 << 16),
    least_chunk_tokens=st.integers(0, 1 << 12),
)
def test_workers_take_less_until_the_longest_request_fits_just(
    kv_bytes: int, least_kv_bytes: int, chunk_tokens: int, least_chunk_tokens: int
) -> None:
    first = Taken(kv_bytes, min(kv_bytes, least_kv_bytes), chunk_tokens, least_chunk_tokens)
    taken = first
    limits = BackoffLimits()
    for _ in range(300):
        limits = lowered(limits, taken)
        assert limits.kv_bytes is not None
        assert first.least_kv_bytes <= limits.kv_bytes <= taken.kv_bytes
        assert limits.kv_bytes + limits.reserve_bytes == first.kv_bytes
        chunk = limits.chunk_tokens or 0
        assert min(chunk_tokens, max(64, least_chunk_tokens)) <= chunk <= taken.chunk_tokens
        assert bool(chunk) == bool(chunk_tokens)
        taken = Taken(limits.kv_bytes, first.least_kv_bytes, chunk, least_chunk_tokens)
    assert taken.kv_bytes == first.least_kv_bytes
    assert taken.chunk_tokens == min(chunk_tokens, max(64, least_chunk_tokens))
