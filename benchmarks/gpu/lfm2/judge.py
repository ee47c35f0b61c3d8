"""The work of a run, its measurements and their judgement."""

import math
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.figures import Figure

PUBLISHED = 358.56
"""Samples a second of the same work in float32 on four GPUs, which one GPU has to exceed."""

PUBLISHED_SAMPLES = 1024
PUBLISHED_TOKENS = 32

TOLERANCE = 1e-5
"""Bound of the difference of a logit, as a share of the largest logit."""

SAFE_MARGIN = 4e-6
"""Smallest difference between the sigmoids of the last expert chosen and the first not chosen.
Rounding in float32 over all layers changes them by less."""

LOGIT_MARGIN = TOLERANCE
"""Smallest difference of the two likeliest tokens, as a share of the largest logit."""

MAX_REPLACED = 0.15
"""Largest share of replaced samples."""

MEDIAN_TOLERANCE = 1.25
"""Largest ratio to the error of a plain implementation in the same type."""

MAX_PEAK_GB = 55.0
"""Of the 78 GiB of an H100. The weights are 33 GB in float32."""


@dataclass(frozen=True)
class Work:
    """The work of a run, the same in every process."""

    device: str
    size: str
    """A key of `benchmarks.gpu.lfm2.weights.SIZES`."""
    dtype: str = "float32"
    stages: int = 1
    samples: int = PUBLISHED_SAMPLES
    tokens: int = PUBLISHED_TOKENS
    """Tokens of each sample."""
    micro_batches: int = 8
    spare: float = 0.5
    runs: int = 3
    all_positions: bool = False
    """Whether the logits of all positions are compared, not those after the last token alone."""
    against_transformers: int = 0
    """Samples that are compared with transformers, too."""

    def device_of(self, rank: int) -> torch.device:
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device("cpu")

    @property
    def judges_speed(self) -> bool:
        """Whether the work is that of the published rate."""
        published = (PUBLISHED_SAMPLES, PUBLISHED_TOKENS)
        is_whole = self.size == "full" and (self.samples, self.tokens) == published
        return is_whole and self.device == "cuda" and self.dtype == "float32"


@dataclass(frozen=True)
class Agreement:
    """How logits compare with those expected."""

    top1: int
    """Rows whose likeliest token is the same."""
    rows: int
    largest: float
    """The largest difference, as a share of the largest logit."""
    median: float
    """The median over rows of the difference's length, as a share of the logits'."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one run."""

    own: Agreement
    """The engine against the plain float32 reference."""
    plain: Agreement | None
    """A plain implementation in the engine's type against the same reference (None in float32)."""
    transformers: Agreement | None
    """The engine against transformers, for few samples."""
    seconds: float
    """Seconds of a step of all samples to their last logits."""
    all_seconds: float | None
    """Seconds of a step to the logits of all positions."""
    num_replaced: int
    busiest_expert: float
    """Tokens of the busiest expert, times the mean."""
    idlest_expert: float
    peak_bytes: int | None = None
    """Peak of allocated GPU memory."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by name."""
    transformers_error: str = ""
    """Why transformers computed nothing."""


def figures_of(work: Work, measured: Measured) -> list[Figure]:
    """Judge a run. Bounds in words: exceeding the published rate, differences below 1e-5."""
    label = f"LFM2 {work.size} {work.dtype}, {work.samples} x {work.tokens}"
    where = "all positions" if work.all_positions else "last positions"
    # A figure that is equal to its aim passes, but these bounds themselves do not.
    above = math.nextafter(PUBLISHED, math.inf) if work.judges_speed else None
    below = math.nextafter(TOLERANCE, 0)
    of_largest = "of the largest logit"

    figures = [
        Figure(f"{label}, to last logits", work.samples / measured.seconds, "samples/s", above)
    ]
    if measured.all_seconds is not None:
        rate = work.samples / measured.all_seconds
        figures.append(Figure(f"{label}, to all logits", rate, "samples/s"))

    own = measured.own
    if measured.plain is None:
        name = f"{label}, top-1 equal at {where}"
        figures.append(Figure(name, own.top1, f"of {own.rows}", own.rows))
        name = f"{label}, greatest difference at {where}"
        figures.append(Figure(name, own.largest, of_largest, below, True))
    else:
        name = f"{label}, median difference at {where}"
        times = own.median / measured.plain.median
        unit = "times that of a plain implementation"
        figures.append(Figure(name, times, unit, MEDIAN_TOLERANCE, True))

    looked_at = work.samples + measured.num_replaced
    share = measured.num_replaced / looked_at
    name = f"{label}, replaced as near ties"
    figures.append(Figure(name, share, f"of {looked_at} samples", MAX_REPLACED, True))

    if measured.transformers is not None:
        samples = measured.transformers.rows // work.tokens
        name = f"{label}, greatest difference from transformers, {samples} samples"
        is_judged = work.dtype == "float32"
        aim = below if is_judged else None
        figures.append(Figure(name, measured.transformers.largest, of_largest, aim, is_judged))
    if measured.peak_bytes is not None:
        peak = measured.peak_bytes / 1e9
        figures.append(Figure(f"{label}, greatest memory", peak, "GB", MAX_PEAK_GB, True))
    for phase, seconds in measured.phases.items():
        figures.append(Figure(f"{label}, {phase}", seconds, "s"))
    return figures


def failures(figures: list[Figure], measured: Measured) -> list[str]:
    """Return why a run does not pass: a reason for each figure that does not."""
    broken = [measured.transformers_error] if measured.transformers_error else []
    return broken + [
        f"{each.name}: {each.value:.7g} {each.unit}, "
        f"not {'at most' if each.is_limit else 'at least'} {each.aim:.7g}"
        for each in figures
        if not each.passes
    ]
