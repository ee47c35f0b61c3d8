"""The workload of a run, its measurements, and the verdict on them."""

import math
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.figures import Figure

PUBLISHED = 358.56
"""Samples/s of the same workload in float32 on four GPUs, which a single GPU must exceed."""

PUBLISHED_SAMPLES = 1024
PUBLISHED_TOKENS = 32

TOLERANCE = 1e-5
"""Limit on the difference of a logit, as a share of the largest logit."""

SAFE_MARGIN = 4e-6
"""Minimum difference between the sigmoids of the last expert chosen and the first one not chosen.
Rounding in float32 over all layers changes the sigmoids by less."""

LOGIT_MARGIN = TOLERANCE
"""Minimum logit difference between the two likeliest tokens, as a share of the largest logit."""

MAX_REPLACED = 0.15
"""Maximum share of replaced samples."""

MEDIAN_TOLERANCE = 1.25
"""Maximum ratio of the engine's error to a plain implementation's error in the same data type."""

MAX_PEAK_GB = 55.0
"""Maximum memory, out of an H100's 78 GiB. The weights are 33 GB in float32."""


@dataclass(frozen=True)
class Work:
    """The workload of a run, which is the same in every process."""

    device: str
    size: str
    """A key of `benchmarks.gpu.lfm2.weights.SIZES`."""
    dtype: str = "float32"
    stages: int = 1
    samples: int = PUBLISHED_SAMPLES
    tokens: int = PUBLISHED_TOKENS
    """Number of tokens per sample."""
    micro_batches: int = 8
    spare: float = 0.5
    runs: int = 3
    all_positions: bool = False
    """Whether to compare the logits at all positions, and not only after the last token."""
    against_transformers: int = 0
    """Number of samples that are also compared with transformers."""

    def device_of(self, rank: int) -> torch.device:
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device("cpu")

    @property
    def judges_speed(self) -> bool:
        """Whether this is the workload of the published rate, so that the speed is judged."""
        published = (PUBLISHED_SAMPLES, PUBLISHED_TOKENS)
        is_whole = self.size == "full" and (self.samples, self.tokens) == published
        return is_whole and self.device == "cuda" and self.dtype == "float32"


@dataclass(frozen=True)
class Agreement:
    """The agreement between computed and expected logits."""

    top1: int
    """Number of rows with the same likeliest token."""
    rows: int
    largest: float
    """The largest difference, as a share of the largest logit."""
    median: float
    """The median over rows of the difference's norm, as a share of the logits' norm."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one run."""

    own: Agreement
    """The engine compared with the plain float32 reference."""
    plain: Agreement | None
    """A plain implementation in the engine's dtype compared with the reference (None: float32)."""
    transformers: Agreement | None
    """The engine compared with transformers for a few samples (None if not compared)."""
    seconds: float
    """Time in seconds of a step that computes every sample's last logits."""
    all_seconds: float | None
    """Time in seconds of a step that computes the logits at all positions."""
    num_replaced: int
    busiest_expert: float
    """Number of tokens of the busiest expert, divided by the mean over all experts."""
    idlest_expert: float
    peak_bytes: int | None = None
    """Peak of the allocated GPU memory in bytes."""
    phases: dict[str, float] = field(default_factory=dict)
    """Duration of each phase in seconds, by the phase's name."""
    transformers_error: str = ""
    """The reason why transformers computed nothing (empty without an error)."""


def figures_of(work: Work, measured: Measured) -> list[Figure]:
    """Judge a run. The rate must exceed the published rate, and differences must be below 1e-5."""
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
    """Return a reason for each figure that does not pass."""
    broken = [measured.transformers_error] if measured.transformers_error else []
    return broken + [
        f"{each.name}: {each.value:.7g} {each.unit}, "
        f"not {'at most' if each.is_limit else 'at least'} {each.aim:.7g}"
        for each in figures
        if not each.passes
    ]
