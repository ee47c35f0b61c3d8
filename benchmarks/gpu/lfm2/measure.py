"""Measures a workload: chooses samples, computes them on every stage, times and compares them.

Samples whose result could depend on rounding are replaced before the measurement. In such samples,
two experts are almost equally good for a token, or two answers are almost equally good at a
compared position. The number of replaced samples is reported as a separate figure.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.float32 import describe, forbid_tf32
from benchmarks.gpu.lfm2.judge import (
    LOGIT_MARGIN,
    SAFE_MARGIN,
    Agreement,
    Measured,
    Work,
    figures_of,
)
from benchmarks.gpu.lfm2.oracle import transformers_logits
from benchmarks.gpu.lfm2.reference import Reference, compute_reference
from benchmarks.gpu.lfm2.stage import load_stage, make_plan, make_runner
from benchmarks.gpu.lfm2.weights import SeededWeights, make_model_config, make_prompts
from ullage_engine.model_config.dtypes import DTYPES
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.parallel.layout import RankLayout, device_map
from ullage_engine.parallel.pipeline import PipelineRank, RankGroup
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.runner.model_runner import ModelRunner

REFERENCE_TIMEOUT_S = 3600.0
"""Seconds for which the other stages wait for the last stage, which computes the reference."""

SLICE_ROWS = 2048
"""Number of rows whose logits are in memory at once: half a gigabyte in float32 at full size."""

FULL = Work(device="cuda", size="full", all_positions=True, against_transformers=8)
TINY = Work(
    device="cpu",
    size="tiny",
    samples=10,
    tokens=7,
    runs=1,
    all_positions=True,
    against_transformers=8,
)


class TooFewSamples(ValueError):
    """The results of too many random prompts could depend on rounding."""


Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of computed and expected logits [rows, vocab], one slice of rows after another."""


def figures(device: torch.device, tiny: bool) -> Iterator[Figure]:
    """Compute a single stage in this process, and yield the benchmark's figures."""
    work = replace(TINY if tiny else FULL, device=device.type)
    measured = run_rank(0, work, None)
    assert measured is not None, "the only stage is the last"
    yield from figures_of(work, measured)
    if measured.transformers_error:
        raise RuntimeError(measured.transformers_error)


def run_rank(rank: int, work: Work, store: Path | None) -> Measured | None:
    """Compute one stage, from its weights to the result. Only the last stage returns a result."""
    device = work.device_of(rank)
    layout = RankLayout(pipeline=work.stages)
    forbid_tf32()
    say(f"rank {rank}: {describe(device)}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)

    if store is None:
        return _Stage(rank, work, layout, None).run()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // work.stages))
    group = RankGroup(layout, rank, store, device, REFERENCE_TIMEOUT_S)
    measured = _Stage(rank, work, layout, group).run()
    group.close()
    return measured


@dataclass
class Phases:
    """Measures the seconds of each phase by name, and prints them when the phase ends."""

    device: torch.device
    prefix: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] = time.perf_counter() - started
        say(f"{self.prefix}{name}: {self.seconds[name]:.2f} s")


@dataclass(frozen=True)
class _Chosen:
    """The chosen samples and their expected results."""

    prompts: torch.Tensor
    reference: torch.Tensor
    """The reference's normalised hidden states [samples, compared positions, hidden]."""
    plain: torch.Tensor | None
    """The same from a plain implementation in the engine's data type (None for float32)."""
    head: torch.Tensor
    num_replaced: int
    load: torch.Tensor


class _Stage:
    """The part of a workload that one process computes."""

    def __init__(self, rank: int, work: Work, layout: RankLayout, group: RankGroup | None) -> None:
        self._rank = rank
        self._work = work
        self._layout = layout
        self._group = group
        self._device = work.device_of(rank)
        self._dtype = DTYPES[work.dtype]
        self._whole = make_model_config(work.size)
        self._weights = SeededWeights(self._whole, self._dtype, self._device)
        self._phases = Phases(self._device, f"rank {rank}: " if work.stages > 1 else "")

    def run(self) -> Measured | None:
        """Run the workload, and return the measurements (None on all stages but the last)."""
        work = self._work
        phases = self._phases
        chosen = None
        if self._layout.is_last(self._rank):
            with phases("reference"):
                chosen = choose_samples(work, self._whole, self._weights)
            say(f"{chosen.num_replaced} samples replaced, whose routing or answer hung on rounding")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the weights need the memory of the reference
        prompts = self._share(chosen)

        say(str(device_map(self._whole, self._layout, self._device.type)[self._rank]))
        with phases("weights and buffers"):
            loaded = load_stage(self._whole, self._weights, self._layout, self._rank)
            runner = self._make_runner(loaded)
        plan = make_plan(prompts.tolist())
        with phases("first step"):  # libraries initialise
            _last_logits(runner, plan)
        with phases("timed steps"):
            last_s, last = self._timed(lambda: _last_logits(runner, plan))
        if chosen is None:
            return None

        all_s = None
        if work.all_positions:
            out = torch.empty(SLICE_ROWS, self._whole.vocab, dtype=self._dtype, device=self._device)
            with phases("timed steps to all logits"):
                all_s, _ = self._timed(lambda: _count(_all_logits(runner, plan, out)))
        with phases("comparison"):
            computed = _all_logits(runner, plan, out) if work.all_positions else _slices(last)
            own = agreement(_beside(computed, chosen.reference, chosen.head))
            plain = None
            if chosen.plain is not None:
                rows = _slices(chosen.plain.flatten(0, 1))
                logits = ((each @ chosen.head.to(each.dtype).t()).float() for each in rows)
                plain = agreement(_beside(logits, chosen.reference, chosen.head))
        theirs = None
        error = ""
        if work.against_transformers:
            try:
                with phases("transformers"):
                    theirs = compare_with_transformers(runner, loaded, prompts, work)
            except Exception as cause:  # its versions raise many types; keep the other measurements
                error = f"transformers: {type(cause).__name__}: {cause}"
        return Measured(
            own=own,
            plain=plain,
            transformers=theirs,
            seconds=last_s,
            all_seconds=all_s,
            num_replaced=chosen.num_replaced,
            busiest_expert=float(chosen.load.max()),
            idlest_expert=float(chosen.load.min()),
            peak_bytes=peak_bytes(self._device),
            phases=phases.seconds,
            transformers_error=error,
        )

    def _make_runner(self, loaded: LoadedModel) -> ModelRunner:
        work = self._work
        rows = work.samples * work.tokens
        pipeline_rank = PipelineRank(
            self._group, rows, self._whole.hidden, self._dtype, work.micro_batches
        )
        return make_runner(
            loaded, work.samples, work.tokens, self._device, self._dtype, pipeline_rank
        )

    def _share(self, chosen: _Chosen | None) -> torch.Tensor:
        """Broadcast the samples that the last stage has chosen, and return them on every stage."""
        work = self._work
        prompts = torch.zeros(work.samples, work.tokens, dtype=torch.int64, device=self._device)
        if chosen is not None:
            prompts.copy_(chosen.prompts)
        if work.stages > 1:
            dist.broadcast(prompts, work.stages - 1)
        return prompts.cpu()

    def _timed(self, step: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        """Return the median seconds until all stages have finished a step, and the last result."""
        seconds = []
        for _ in range(self._work.runs):
            self._wait_for_all()
            started = time.perf_counter()
            result = step()
            self._wait_for_all()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds), result

    def _wait_for_all(self) -> None:
        synchronize(self._device)
        if self._work.stages > 1:
            dist.barrier(device_ids=[self._device.index] if self._device.type == "cuda" else None)


def choose_samples(work: Work, whole: ModelConfig, weights: SeededWeights) -> _Chosen:
    """Choose the first random prompts whose results do not depend on rounding.

    Raises:
        TooFewSamples: there are not enough such prompts.
    """
    prompts = make_prompts(whole, int(work.samples * (1 + work.spare)), work.tokens)
    reference = compute_reference(whole, weights, prompts)

    positions = slice(None) if work.all_positions else slice(-1, None)
    hidden = reference.hidden[:, positions]

    is_safe = (reference.margins > SAFE_MARGIN) & (answer_margins(reference, hidden) > LOGIT_MARGIN)
    safe = is_safe.nonzero()[: work.samples, 0]
    if len(safe) < work.samples:
        raise TooFewSamples(
            f"--spare {work.spare}: only {len(safe)} of {len(prompts)} prompts are such that "
            f"rounding decides nothing, not {work.samples}; give a larger --spare"
        )

    prompts = prompts[safe.cpu()]
    plain = None
    if work.dtype != "float32":
        plain = compute_reference(whole, weights, prompts, DTYPES[work.dtype]).hidden[:, positions]

    return _Chosen(
        prompts=prompts,
        reference=hidden[safe],
        plain=plain,
        head=reference.head,
        num_replaced=int(safe[-1]) + 1 - work.samples,
        load=reference.load / reference.load.float().mean(),
    )


def answer_margins(reference: Reference, hidden: torch.Tensor) -> torch.Tensor:
    """Return the minimum lead of the likeliest token over each sample's positions [samples].

    The lead is the difference to the next likeliest token's logit, as a share of the largest
    logit. `hidden` is [samples, positions, hidden].
    """
    gaps = []
    largest = hidden.new_zeros(())
    for rows in _slices(hidden.flatten(0, 1)):
        logits = reference.logits(rows)
        first, second = logits.topk(2, dim=1).values.unbind(1)
        gaps.append(first - second)
        largest = torch.maximum(largest, logits.abs().amax())
    return torch.cat(gaps).view(hidden.shape[:2]).amin(1) / largest


def compare_with_transformers(
    runner: ModelRunner, loaded: LoadedModel, prompts: torch.Tensor, work: Work
) -> Agreement:
    """Compare the first samples' logits at all positions with those of transformers."""
    few = prompts[: work.against_transformers]
    theirs = transformers_logits(loaded, few).flatten(0, 1).float()
    ours = torch.empty_like(theirs, dtype=DTYPES[work.dtype])
    runner.write_logits(runner.hidden(make_plan(few.tolist())), ours)
    return agreement([(ours.float(), theirs)])


def agreement(pairs: Pairs) -> Agreement:
    """Compare computed with expected logits, one slice of rows after another."""
    top1 = rows = 0
    difference = largest = 0.0
    lengths = []
    for actual, expected in pairs:
        apart = actual - expected
        top1 += int((actual.argmax(1) == expected.argmax(1)).sum())
        rows += len(actual)
        # Not max() of Python, which may ignore NaN.
        difference = float(torch.maximum(apart.abs().amax().cpu(), torch.tensor(difference)))
        largest = max(largest, float(expected.abs().max()))
        lengths.append(apart.norm(dim=1) / expected.norm(dim=1))
    return Agreement(top1, rows, difference / largest, float(torch.cat(lengths).median()))


def _last_logits(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    """Return the logits after each sample's last token, in the samples' order.

    Only the last stage has these logits.
    """
    order: list[int] = []
    parts = []
    for chunks, logits in runner.logits(plan):
        order += [int(chunk.request_id) for chunk in chunks]
        # The next micro-batch overwrites them.
        parts.append(logits.clone())
    if not parts:
        return torch.empty(0)
    by_sample = torch.tensor(order).argsort()
    return torch.cat(parts)[by_sample.to(parts[0].device)]


def _all_logits(runner: ModelRunner, plan: StepPlan, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the logits of all rows in slices. Each slice is in `out` until the next slice."""
    hidden = runner.hidden(plan)
    for first in range(0, len(hidden), len(out)):
        rows = out[: len(hidden) - first]
        runner.write_logits(hidden, rows, first)
        yield rows


def _count(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute all rows, and return their number."""
    return torch.tensor(sum(len(each) for each in parts))


def _slices(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    for first in range(0, len(rows), SLICE_ROWS):
        yield rows[first : first + SLICE_ROWS]


def _beside(computed: Iterable[torch.Tensor], hidden: torch.Tensor, head: torch.Tensor) -> Pairs:
    """Yield computed logits with expected logits, which are computed from the reference's rows."""
    expected = _slices(hidden.flatten(0, 1))
    for actual, rows in zip(computed, expected, strict=True):
        yield actual.float(), rows @ head.t()


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak GPU memory that torch has allocated in bytes, or None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(text: str) -> None:
    # In one piece: several processes write at once.
    print(f"{text}\n", end="", flush=True)
