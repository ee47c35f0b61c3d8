"""Compares decode steps as CUDA graphs with launched steps: their tokens and their times.

The figures decide whether `cuda_graphs` is on by default. In a rehearsal, a graph repeats the
captured action, and kernels run in Triton's interpreter.
"""

import os
import random
import time
from functools import partial

import torch

from benchmarks.gpu.figures import Figure, Job, Report, count, none_of
from benchmarks.gpu.models import random_model
from benchmarks.gpu.rates import seconds_of
from benchmarks.gpu.sequences import (
    BLOCKS_EACH,
    TURNS,
    Sequence,
    make_runner,
    run_step,
)
from benchmarks.gpu.steps import CONTEXT, KINDS, decodes, dense_config
from benchmarks.gpu.ties import compare
from benchmarks.gpu.tokens import GREEDY, Outputs, families, load_family, pairs
from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import BLOCK_TOKENS
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.runner.step_graphs import Action, Capture, CudaCapture, NewCapture

PROMPT_TOKENS = 40
OUTPUT_TOKENS = 64
LEAST_GAIN = 1.0
"""Minimum speed of a step as a graph, relative to a launched step."""
JUDGED = (1, 8)
"""Numbers of rows for which the host's launches limit a step. With more rows, the device does."""


def run(job: Job, report: Report) -> None:
    if not job.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
        triton.runs_on = lambda device: True  # type: ignore[assignment]
    new_capture: NewCapture = CudaCapture if job.on_gpu else again
    same_tokens(job, new_capture, report)
    if job.on_gpu:
        times(job, new_capture, report)


def again() -> Capture:
    """Return a function that repeats an action by calling it, for devices without graphs."""

    def capture(action: Action) -> Action:
        return action

    return capture


def same_tokens(job: Job, new_capture: NewCapture, report: Report) -> None:
    """Compare the float32 tokens of launched steps with the tokens of graphs."""
    device = torch.device(job.device)
    name, changes = next(iter(families(job.tiny).items()))
    if job.tiny:
        changes = changes | {"num_hidden_layers": 1}
    loaded = load_family(job.scratch / "graphs", name, changes, device)
    wanted = outputs(loaded, device, None, job.tiny, report)
    given = outputs(loaded, device, new_capture, job.tiny, report)
    parted = compare(pairs(wanted, given))
    report(none_of("sequences with other tokens", parted.elsewhere))
    report(Figure("sequences that parted at a near-tie", parted.at_near_ties, ""))


def outputs(
    loaded: LoadedModel,
    device: torch.device,
    new_capture: NewCapture | None,
    tiny: bool,
    report: Report,
) -> Outputs:
    """Generate from a few prompts together. With `new_capture`, also judge the number of graphs."""
    runner = make_runner(loaded, device, torch.float32, TURNS, TURNS * BLOCKS_EACH, 96, new_capture)
    runner.run_largest()
    if new_capture is not None:
        report(count("graphs", runner.num_graphs, 1))
    chooser = random.Random(7)
    vocab = loaded.model_config.vocab
    sequences = []
    for index in range(TURNS):
        prompt = [chooser.randrange(vocab) for _ in range(PROMPT_TOKENS // (index + 1))]
        sequences.append(Sequence(index, prompt, len(prompt), GREEDY))
    for _ in range(OUTPUT_TOKENS // 2 if not tiny else 4):
        run_step(runner, sequences, PROMPT_TOKENS)
    return [{"tokens": each.output, "gaps": each.gaps} for each in sequences]


def times(job: Job, new_capture: NewCapture, report: Report) -> None:
    """Report the time of decode steps in Llama-3-8B's shape, and the time to capture them."""
    device = torch.device(job.device)
    loaded = random_model(dense_config(job.tiny), torch.bfloat16, device)
    vocab = loaded.model_config.vocab
    rows = 32
    blocks = -(-CONTEXT // BLOCK_TOKENS)

    took: dict[tuple[str, int], float] = {}
    for capture in (None, new_capture):
        runner = make_runner(loaded, device, torch.bfloat16, rows, rows * blocks, CONTEXT, capture)
        runner.warm_up()

        if capture is not None:
            began = time.perf_counter()
            runner.run_largest()
            report(Figure("capturing all graphs", time.perf_counter() - began, "s"))

        for kind, sampling in KINDS.items():
            for batch in (1, 8, rows):
                plan = decodes(batch, CONTEXT, blocks, vocab, sampling)
                seconds = seconds_of(partial(runner.execute, plan), device)
                name = f"{batch} x {CONTEXT}, {kind}"
                if capture is None:
                    took[kind, batch] = seconds
                    report(Figure(f"launched, {name}", seconds * 1e3, "ms"))
                    continue

                report(Figure(f"graph, {name}", seconds * 1e3, "ms"))
                gain = took[kind, batch] / seconds
                aim = LEAST_GAIN if batch in JUDGED else None
                report(Figure(f"graph, {name}, times as fast", gain, "", aim))

        del runner
