"""Measures the KV store alone, next to memcpy and fio."""

import argparse
import json
import mmap
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ullage_kv import (
    Arena,
    FileTier,
    Result,
    Status,
    Store,
    Transfer,
    block_keys,
    namespace,
)
from ullage_kv.file_tier import NUM_LOADING, NUM_SAVING

SPACE = namespace({"benchmark": "tiers"})
FLOOR = 0.8
BATCH = 16
"""Number of blocks per call, about as many as one step of a long prompt completes."""
GIB = 1 << 30
WAIT_S = 600.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class Comparison:
    """Two bandwidths to compare, with one value per round."""

    name: str
    beside: str
    floor: float
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    """Bandwidth of memcpy or fio in bytes per second, one value per round (as in `ours`)."""

    @property
    def ratio(self) -> float:
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median(our / their for our, their in pairs)

    def row(self) -> str:
        ours, theirs = (statistics.median(each) / GIB for each in (self.ours, self.theirs))
        verdict = "ok" if self.ratio >= self.floor else f"BELOW {self.floor:.0%}"
        figures = f"{ours:7.2f} {theirs:7.2f} {self.ratio:7.0%}"
        return f"{self.name:28} {figures}  {verdict:10} {self.beside}"


def pad(num_bytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Blocks:
    """The blocks that all measurements copy, and their destination."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.total_bytes = num_blocks * block_bytes
        self.keys = block_keys(SPACE, range(num_blocks), 1)

        # Page-aligned, like slots of the host tier and fio's buffers.
        slot_bytes = pad(block_bytes)
        memory = memoryview(mmap.mmap(-1, num_blocks * slot_bytes))
        self.sources = [
            np.frombuffer(memory[number * slot_bytes :][:block_bytes], np.uint8)
            for number in range(num_blocks)
        ]

        one = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
        for number, source in enumerate(self.sources):
            source[:] = np.roll(one, number)

        # Touched in advance, because a page fault costs more than the copy.
        self.into = [np.full(block_bytes, 1, np.uint8) for _ in range(num_blocks)]

    def batches(self, part: int = 0, num_parts: int = 1) -> list[range]:
        """Return the batches of one thread's share of the blocks."""
        first = part * self.num_blocks // num_parts
        end = (part + 1) * self.num_blocks // num_parts
        return [range(at, min(at + BATCH, end)) for at in range(first, end, BATCH)]


# the host tier -----------------------------------------------------------------------------------


def measure_host(blocks: Blocks, rounds: int, num_threads: int) -> list[Comparison]:
    """Measure put and get of all blocks in the host tier, with a new store in each round."""
    put = Comparison(f"host put, threads {num_threads}", "memcpy", FLOOR)
    get = Comparison(f"host get, threads {num_threads}", "memcpy", FLOOR)
    arena = Arena.create((blocks.num_blocks + 1) * (blocks.block_bytes + 4096))

    for _ in range(rounds):
        store = Store(arena, blocks.block_bytes)
        slots = [
            np.frombuffer(arena.slot(number, blocks.block_bytes), np.uint8)
            for number in range(blocks.num_blocks)
        ]
        put.theirs.append(bandwidth(blocks, partial(copy, slots, blocks.sources), num_threads))
        put.ours.append(bandwidth(blocks, partial(put_blocks, store, blocks), num_threads))
        get.theirs.append(bandwidth(blocks, partial(copy, blocks.into, slots), num_threads))
        get.ours.append(bandwidth(blocks, partial(get_blocks, store, blocks), num_threads))
        check_bytes(blocks)
        store.close()
        slots.clear()

    arena.close()
    return [put, get]


def bandwidth(blocks: Blocks, move: Callable[[range], None], num_threads: int) -> float:
    """Return the bytes per second at which `num_threads` threads copy all blocks in batches."""

    def work(part: int) -> None:
        for batch in blocks.batches(part, num_threads):
            move(batch)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(num_threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return blocks.total_bytes / (time.perf_counter() - started)


def copy(into: Sequence[Bytes], sources: Sequence[Bytes], batch: range) -> None:
    for each in batch:
        np.copyto(into[each], sources[each])


def put_blocks(store: Store, blocks: Blocks, batch: range) -> None:
    keys = [blocks.keys[each] for each in batch]
    check(store.put_batch(keys, [blocks.sources[each] for each in batch]), Status.STORED)


def get_blocks(store: Store, blocks: Blocks, batch: range) -> None:
    keys = [blocks.keys[each] for each in batch]
    check(store.get_batch(keys, [blocks.into[each] for each in batch]), Status.HIT)


# the file tier -----------------------------------------------------------------------------------


def measure_files(blocks: Blocks, rounds: int, path: Path) -> list[Comparison]:
    """Measure saves and loads of all blocks, in each round after fio in the same folder.

    Both overwrite existing files, as a full tier does.
    """
    folder = Path(tempfile.mkdtemp(prefix="ullage-tiers-", dir=path))
    try:
        tier = FileTier(folder / "kv", SPACE, blocks.block_bytes, 2 * blocks.total_bytes + GIB)
        backend = tier.stats().backend
        run_fio = partial(fio, blocks, folder / "fio", is_direct="O_DIRECT" in backend)
        save = Comparison(f"file save, threads {NUM_SAVING}", f"fio ({backend})", FLOOR)
        load = Comparison(f"file load, threads {NUM_LOADING}", f"fio ({backend})", FLOOR)
        save_all(tier, blocks)
        run_fio("randwrite", NUM_SAVING)
        for _ in range(rounds):
            tier.remove(blocks.keys)
            while tier.stats().queued:
                time.sleep(0.01)
            save.theirs.append(run_fio("randwrite", NUM_SAVING))
            save.ours.append(save_all(tier, blocks))
            load.theirs.append(run_fio("randread", NUM_LOADING))
            load.ours.append(load_all(tier, blocks))
            check_bytes(blocks)
        tier.close()
    finally:
        shutil.rmtree(folder)
    return [save, load]


def save_all(tier: FileTier, blocks: Blocks) -> float:
    """Save all blocks, and return bytes per second. Two queued batches keep all threads busy."""
    pending = []
    started = time.perf_counter()
    for batch in blocks.batches():
        wanted = [Transfer(blocks.keys[each], memoryview(blocks.sources[each])) for each in batch]
        pending.append(tier.save(wanted))
        if len(pending) > 2:
            check(pending.pop(0).result(WAIT_S), Status.STORED)
    for future in pending:
        check(future.result(WAIT_S), Status.STORED)
    return blocks.total_bytes / (time.perf_counter() - started)


def load_all(tier: FileTier, blocks: Blocks) -> float:
    """Load all blocks, and return bytes per second."""
    for into in blocks.into:
        into[:64] = 0
    started = time.perf_counter()
    futures = [
        tier.load(
            [Transfer(blocks.keys[each], memoryview(blocks.into[each])) for each in batch], WAIT_S
        )
        for batch in blocks.batches()
    ]
    for future in futures:
        check(future.result(WAIT_S), Status.HIT)
    return blocks.total_bytes / (time.perf_counter() - started)


def fio(blocks: Blocks, path: Path, mode: str, num_threads: int, *, is_direct: bool) -> float:
    """Return the bytes per second of fio, which transfers each block once in random order."""
    slot_bytes = pad(blocks.block_bytes)
    size = blocks.num_blocks * slot_bytes
    options = {
        "name": "tiers",
        "filename": str(path),
        "rw": mode,
        "bs": slot_bytes,
        "size": size,
        "io_size": size // num_threads,
        "numjobs": num_threads,
        "direct": int(is_direct),
        "ioengine": "psync",
        "fallocate": "posix",
        "output-format": "json",
    }

    command = ["fio", "--thread", "--group_reporting"]
    command += [f"--{name}={value}" for name, value in options.items()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"error: {' '.join(command)}: {result.stderr.strip()[-400:]}")

    [job] = json.loads(result.stdout[result.stdout.index("{") :])["jobs"]
    return float(job["read" if mode == "randread" else "write"]["bw_bytes"])


def check(results: Sequence[Result], status: Status) -> None:
    wrong = [result for result in results if result.status is not status]
    if wrong:
        raise SystemExit(f"error: {wrong[0]}")


def check_bytes(blocks: Blocks) -> None:
    for source, into in zip(blocks.sources, blocks.into, strict=True):
        if not np.array_equal(source, into):
            raise SystemExit("error: other bytes came back than were stored")


def measure_store(arguments: argparse.Namespace) -> list[Comparison]:
    """Measure the store alone, without an engine."""
    block_bytes = arguments.block_kib << 10
    blocks = Blocks(max(BATCH, (arguments.size_mib << 20) // block_bytes), block_bytes)
    comparisons = []
    for num_threads in sorted({1, arguments.threads}):
        comparisons += measure_host(blocks, arguments.rounds, num_threads)
    if shutil.which("fio") is None:
        raise SystemExit("error: fio is not installed; apt-get install fio")
    return comparisons + measure_files(blocks, arguments.rounds, arguments.path)


def print_store(comparisons: Sequence[Comparison]) -> bool:
    """Print the figures, and return whether all reach their lower limits."""
    print(f"{'GiB/s, median of rounds':28} {'ours':>7} {'theirs':>7} {'ratio':>7}")
    for comparison in comparisons:
        print(comparison.row())
    return all(each.ratio >= each.floor for each in comparisons)
