"""Measure how the cost of a token grows with the sequences, the context and the KV pool.

Scheduling is measured without a model, as the CPU time to plan and commit a decode step. Steps are
measured with the real runner and a KV pool of zeros. The number of sequences, and contexts up to
8k, are measured with the model from `--source`. Contexts up to 32k, and sizes of the KV pool, are
measured with a small random model. Every figure is the best of several measurements. Verdicts use
CPU time, because other programs on the same cores add to it less than to the elapsed time. The
benchmark takes a minute.

examples:
  python -m benchmarks growth --only scheduling
  python -m benchmarks growth --plot growth.svg --json growth.json

exit status: 0 no cost grows faster than the model's own cost, 1 some cost does
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.step import BLOCK, chunk, load_runner
from benchmarks.support.options import SMOLLM2, new_parser
from benchmarks.support.plots import Line, Panel, draw
from benchmarks.support.small_models import MODELS, write_model
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.model_config.dtypes import resolve_dtype
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.step_plan import SampledToken, StepPlan
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 1024, 4096, 8192)
LONG_CONTEXTS = (1024, 4096, 8192, 16384, 32768)
POOLS = (512, 2048, 8192)
SCHEDULED = ((1, 256), (8, 256), (32, 256), (64, 256), (256, 256), (256, 2048), (256, 8192))
"""Pairs of a number of sequences and their context in tokens."""

MAX_SCHEDULE_MS = 0.5
WINDOW = BLOCK
"""Number of steps in which each sequence needs one more block."""
TOLERANCE = 1.25
"""Maximum ratio of a measured cost to its reference."""
LONG = "llama, long context"
MODELS[LONG] = {
    **MODELS["llama, grouped heads, tied"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "max_position_embeddings": max(LONG_CONTEXTS),
}


AXES = ("scheduling", "sequences", "context", "long context", "KV pool")


PLOTS: "tuple[tuple[str, str, str, Callable[[Cost], int], Callable[[Cost], float]], ...]" = (
    (
        "scheduling",
        "scheduling: CPU ms a step, contexts of 256 tokens",
        "sequences",
        lambda cost: cost.sequences,
        lambda cost: cost.cpu_ms,
    ),
    (
        "sequences",
        "CPU ms a token, contexts of 256 tokens",
        "sequences",
        lambda cost: cost.sequences,
        lambda cost: cost.cpu_ms_a_token,
    ),
    (
        "context",
        "CPU ms a token, 4 sequences",
        "tokens of context",
        lambda cost: cost.context,
        lambda cost: cost.cpu_ms_a_token,
    ),
    (
        "long context",
        "CPU ms a token, one sequence of a small model",
        "tokens of context",
        lambda cost: cost.context,
        lambda cost: cost.cpu_ms_a_token,
    ),
    (
        "KV pool",
        "CPU ms a token, 8 sequences of 1,024 tokens of a small model",
        "blocks of the KV pool",
        lambda cost: cost.pool_blocks,
        lambda cost: cost.cpu_ms_a_token,
    ),
)
"""For each plot: axis of the costs, title, unit, and functions for the x and y values."""


@dataclass(frozen=True)
class Cost:
    """The cost of one decode step."""

    axis: str
    sequences: int
    context: int
    """Number of tokens in each sequence's context."""
    pool_blocks: int
    ms: float
    cpu_ms: float

    @property
    def cpu_ms_a_token(self) -> float:
        return self.cpu_ms / self.sequences


def main() -> int:
    parser = new_parser("growth", __doc__)
    parser.add_argument("--source", default=SMOLLM2, help="model source URI (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds a figure (%(default)s)")
    parser.add_argument("--only", choices=["scheduling", "steps"], help="measure this part alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw all figures as SVG")
    arguments = parser.parse_args()

    costs: list[Cost] = []
    print("cost of       sequences  context  pool blocks  ms a step     CPU ms  CPU ms a token")

    if arguments.only != "steps":
        costs += schedule_costs(arguments.seconds)
    if arguments.only != "scheduling":
        dtype = resolve_dtype(arguments.dtype, torch.device("cpu"))
        costs += step_costs(arguments.source, dtype, arguments.seconds)
        costs += long_costs(dtype, arguments.seconds)

    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in costs], indent=1) + "\n")
    if arguments.plot:
        plot(arguments.plot, costs)

    faults = find_faults(costs)
    for fault in faults:
        print(f"fault: {fault}")
    if not faults:
        print("nothing grows faster than the model itself")
    return bool(faults)


def report(cost: Cost) -> Cost:
    place = f"{cost.axis:12}  {cost.sequences:9}  {cost.context:7}  {cost.pool_blocks:11}"
    print(f"{place}  {cost.ms:9.3f}  {cost.cpu_ms:9.3f}  {cost.cpu_ms_a_token:14.4f}", flush=True)
    return cost


# scheduling -----------------------------------------------------------------------------------


def schedule_costs(seconds: float) -> list[Cost]:
    """Measure the CPU time for scheduling a step.

    Each figure is the mean over the steps that fill one block.
    """
    costs = []
    for sequences, context in SCHEDULED:
        num_steps = 80 * WINDOW
        scheduler, num_blocks = filled_scheduler(sequences, context, num_steps + 2 * WINDOW)
        gc.collect()
        gc.freeze()
        best = [float("inf")] * WINDOW
        deadline = time.perf_counter() + seconds
        for step in range(num_steps):
            best[step % WINDOW] = min(best[step % WINDOW], scheduling_s(scheduler))
            if time.perf_counter() > deadline and step >= 4 * WINDOW:
                break
        gc.unfreeze()
        ms = sum(best) / WINDOW * 1e3
        costs.append(report(Cost("scheduling", sequences, context, num_blocks, ms, ms)))
    return costs


def filled_scheduler(sequences: int, context: int, num_output: int) -> tuple[Scheduler, int]:
    """Return a scheduler whose next step decodes all sequences, and its number of KV blocks."""
    num_blocks = sequences * (-(-(context + num_output) // BLOCK) + 1)

    profile = MemoryProfile(
        block_tokens=BLOCK,
        groups=(CacheGroup(bytes_per_token=1),),
        prefill_chunk_tokens=context,
        kv_pool_bytes=num_blocks * BLOCK,
    )
    limits = SchedulerLimits(
        max_model_len=context + num_output,
        max_sequences=sequences,
        prompt_tokens=sequences * context,
        is_chunked=True,
        decode_tokens=1 << 40,
    )

    lengths = OutputLengthEstimator(num_output, start=num_output)
    scheduler = Scheduler(profile, limits, ThroughputEstimator(), lengths)

    for number in range(sequences):
        request = EngineRequest(
            request_id=f"request-{number}",
            token_ids=[number] * context,  # no two prompts share a prefix
            num_prompt_tokens=context,
            max_tokens=num_output,
            sampling=SamplingParams(),
        )
        assert scheduler.submit(request) is None, "refused"

    scheduling_s(scheduler)
    return scheduler, num_blocks


def scheduling_s(scheduler: Scheduler) -> float:
    """Plan a step, commit made-up tokens, and return the total CPU seconds."""
    started = time.process_time()
    plan = scheduler.schedule()
    planned_s = time.process_time() - started
    sampled = [SampledToken(chunk.request_id, 1, 0.0, [], []) for chunk in plan.chunks]
    started = time.process_time()
    scheduler.commit(sampled)
    return planned_s + time.process_time() - started


# steps ----------------------------------------------------------------------------------------


def step_costs(source: str, dtype: torch.dtype, seconds: float) -> list[Cost]:
    """Measure decode steps for several numbers of sequences and several contexts."""
    device = torch.device("cpu")
    runner = load_runner(source, device, dtype, max_rows=max(SEQUENCES), warms_up=False)
    costs = [measure("sequences", runner, count, 256, 1024, seconds) for count in SEQUENCES]
    longest = runner.model_config.max_position
    return costs + [
        measure("context", runner, 4, context, 1024, seconds)
        for context in CONTEXTS
        if context <= longest
    ]


def long_costs(dtype: torch.dtype, seconds: float) -> list[Cost]:
    """Measure decode steps for long contexts and for several KV pool sizes, on a small model."""
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        source = write_model(LONG, Path(folder) / "model")
        limit = max(LONG_CONTEXTS)
        runner = load_runner(
            source,
            device,
            dtype,
            max_rows=8,
            max_model_len=limit,
            quantization="int8",
            warms_up=False,
        )
        runner.allocate_kv(2 * limit // BLOCK)
        pool = 2 * limit // BLOCK
        costs = [
            measure("long context", runner, 1, context, pool, seconds) for context in LONG_CONTEXTS
        ]
        for blocks in POOLS:
            runner.allocate_kv(blocks)
            costs.append(measure("KV pool", runner, 8, 1024, blocks, seconds))
    return costs


def measure(
    axis: str, runner: ModelRunner, sequences: int, context: int, pool: int, seconds: float
) -> Cost:
    """Return the cost of the fastest of several decode steps with a KV pool of `pool` blocks."""
    plan = StepPlan([chunk(row, 1, context - 1, pool) for row in range(sequences)])
    runner.execute(plan)
    best_s = best_cpu_s = float("inf")
    deadline = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < deadline or count < 3:
        started = time.perf_counter()
        cpu_started = time.process_time()
        runner.execute(plan)
        best_s = min(best_s, time.perf_counter() - started)
        best_cpu_s = min(best_cpu_s, time.process_time() - cpu_started)
        count += 1
    return report(Cost(axis, sequences, context, pool, best_s * 1e3, best_cpu_s * 1e3))


# verdicts -------------------------------------------------------------------------------------


def find_faults(costs: Sequence[Cost]) -> list[str]:
    """Return the costs that grow faster than the model's own cost.

    The cost of matmuls is constant on every axis, attention is linear in the context, and
    scheduling has a separate limit.
    """
    faults: list[str] = []
    scheduled = [each for each in costs if each.axis == "scheduling"]
    faults += [
        f"scheduling {each.sequences} sequences takes {each.ms:.2f} ms, over {MAX_SCHEDULE_MS}"
        for each in scheduled
        if each.ms > MAX_SCHEDULE_MS
    ]
    faults += grown(scheduled[-3:], "scheduling, by context", lambda each: each.cpu_ms)
    by_axis = {axis: [each for each in costs if each.axis == axis] for axis in AXES}
    faults += grown(by_axis["sequences"], "a token, by sequences", lambda each: each.cpu_ms_a_token)
    faults += grown(by_axis["KV pool"], "a step, by blocks of the pool", lambda each: each.cpu_ms)
    for axis in ("context", "long context"):
        faults += superlinear(by_axis[axis])
    return faults


def grown(costs: Sequence[Cost], what: str, value: Callable[[Cost], float]) -> list[str]:
    """Return where a cost first exceeds the smallest earlier cost by more than TOLERANCE."""
    for index, each in enumerate(costs[1:], 1):
        least = min(value(before) for before in costs[:index])
        if value(each) > TOLERANCE * least:
            place = f"{each.sequences} x {each.context} tokens, {each.pool_blocks} blocks"
            return [f"{what}: {value(each):.3f} ms at {place}, after {least:.3f}"]
    return []


def superlinear(costs: Sequence[Cost]) -> list[str]:
    """Return the longest context if its last tokens cost more than all earlier tokens.

    The cost of attention is linear. If KV no longer fits into a CPU cache, one or two segments of
    the line get steeper. If the cost per token grows with the context, every segment is steeper
    than the segment before.
    """
    slopes = [
        (each.cpu_ms - before.cpu_ms) / (each.context - before.context)
        for before, each in pairwise(costs)
    ]
    if len(slopes) < 2 or slopes[-1] <= TOLERANCE * max(slopes[:-1]):
        return []
    ns = f"{slopes[-1] * 1e6:.0f} ns for a token of context, after {max(slopes[:-1]) * 1e6:.0f}"
    return [f"{costs[-1].axis}: up to {costs[-1].context} tokens {ns}"]


def plot(path: Path, costs: Sequence[Cost]) -> None:
    """Plot the costs with one panel per axis."""
    panels = []
    for axis, title, unit, position, value in PLOTS:
        some = [each for each in costs if each.axis == axis]
        if axis == "scheduling":
            some = [each for each in some if each.context == SCHEDULED[0][1]]
        if some:
            lines = [Line("", [value(each) for each in some])]
            panels.append(Panel(title, lines, [float(position(each)) for each in some], unit))
    draw(path, "", (), panels)
