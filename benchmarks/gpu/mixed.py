"""Checks that mixed steps with several kinds of sampling need no more memory than the warm-up."""

import random
from dataclasses import dataclass

import psutil
import torch

from benchmarks.gpu.figures import Job, Report, at_most, none_of
from benchmarks.gpu.sequences import (
    BLOCKS_EACH,
    TURNS,
    make_runner,
    random_sequence,
    run_step,
)
from benchmarks.gpu.tokens import families, load_family

STEPS = 300
MOST_GROWTH_MIB = 16.0
MOST_GROWTH_ON_CPU_MIB = 64.0
"""Maximum memory growth on a CPU in MiB, because a process's heap is not exactly constant."""
LONGEST = 480
"""Number of tokens above which a sequence is replaced by a new sequence."""


@dataclass(frozen=True)
class Held:
    """The bytes that torch has reserved and the device has in use (resident bytes on a CPU)."""

    reserved: int
    lost: int
    allocations: int
    """Number of cudaMalloc calls."""
    retries: int
    """Number of allocations that had to free memory first."""


def run(job: Job, report: Report) -> None:
    device = torch.device(job.device)
    dtype = torch.bfloat16 if job.on_gpu else torch.float32
    name = next(iter(families(job.tiny)))
    loaded = load_family(job.scratch, name, families(job.tiny)[name], device, dtype)
    runner = make_runner(loaded, device, dtype, TURNS, TURNS * BLOCKS_EACH)
    runner.warm_up()

    steps = STEPS if not job.tiny else 20
    generator = random.Random(1)
    vocab = loaded.model_config.vocab
    sequences = [random_sequence(generator, index, vocab) for index in range(TURNS)]
    before = held(device)
    for _ in range(steps):
        run_step(runner, sequences, generator.choice([8, 64, 64]))
        for place, each in enumerate(sequences):
            if len(each.output) > generator.randint(1, 200) or len(each.tokens) > LONGEST:
                sequences[place] = random_sequence(generator, each.index, vocab)
    after = held(device)

    limit = MOST_GROWTH_MIB if job.on_gpu else MOST_GROWTH_ON_CPU_MIB
    grown = (after.reserved - before.reserved) / (1 << 20)
    lost = (after.lost - before.lost) / (1 << 20)
    report(at_most(f"reserved more after {steps} mixed steps", grown, "MiB", limit))
    report(at_most("the device has less free", lost, "MiB", limit))
    if job.on_gpu:
        # An allocation from reserved memory does not call cudaMalloc.
        report(at_most("calls of cudaMalloc", after.allocations - before.allocations, "", 4))
    report(none_of("allocations that had to free memory first", after.retries - before.retries))


def held(device: torch.device) -> Held:
    if device.type != "cuda":
        resident = psutil.Process().memory_info().rss
        return Held(resident, resident, 0, 0)
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return Held(
        reserved=stats["reserved_bytes.all.current"],
        lost=total - free,
        allocations=stats["segment.all.allocated"],
        retries=stats["num_alloc_retries"],
    )
