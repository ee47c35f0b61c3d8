"""How many answers a request wants, which of how many, and each one's seed."""

import math
from dataclasses import dataclass

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.core.request import BeamParams
from ullage_rpc.errors import ServiceError, invalid
from ullage_rpc.limits import (
    MAX_BEAM_STOP_TOKENS,
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_SAMPLES,
)

_SEED_STRIDE = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Answers to one prompt."""

    n: int = 1
    """Returned."""
    num_generated: int = 1
    """Generated; of a beam search the hypotheses asked for."""
    beam: BeamParams | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed side by side."""
        return self.beam.width if self.beam else self.num_generated

    @property
    def is_ranked(self) -> bool:
        """Not all are returned."""
        return self.num_generated > self.n

    @property
    def is_streamed(self) -> bool:
        """The answers are known while they grow."""
        return not self.is_ranked and self.beam is None


def sample_seed(seed: int, index: int) -> int:
    """The seed of the answer `index`: (seed + index * 0x9E3779B97F4A7C15) mod 2^64.

    The first answer has the request's own. The stride is odd, so no two answers share a seed; asked
    for alone with its seed an answer is the same.
    """
    return (seed + index * _SEED_STRIDE) % _SEEDS


def check_samples(request: pb.GenerateRequest) -> None:
    """Raises ServiceError INVALID_ARGUMENT that names the field."""
    samples = request.samples
    n = _n(samples)
    _check("n", n, 1, MAX_SAMPLES)
    if samples.HasField("beam"):
        _check_beam(request, n)
    elif samples.HasField("best_of"):
        _check("best_of", samples.best_of, n, MAX_SAMPLES)


def sample_plan(samples: pb.Samples) -> SamplePlan:
    """The plan of samples that were checked."""
    n = _n(samples)
    if not samples.HasField("beam"):
        return SamplePlan(n, samples.best_of if samples.HasField("best_of") else n)
    beam = samples.beam
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    return SamplePlan(n, n, BeamParams(width=beam.width, length_penalty=penalty))


def _n(samples: pb.Samples) -> int:
    return samples.n if samples.HasField("n") else 1


def _check_beam(request: pb.GenerateRequest, n: int) -> None:
    samples, beam = request.samples, request.samples.beam
    if samples.HasField("best_of"):
        field = "samples.best_of"
        raise invalid(field, f"{field} is {samples.best_of} with a beam search; leave it out")
    _check_alone(request)
    _check("beam.width", beam.width, 1, MAX_BEAM_WIDTH)
    _check("n", n, 1, beam.width)
    penalty = beam.length_penalty
    if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
        raise _wrong("beam.length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    count = len(request.stop.stop_token_ids)
    if count > MAX_BEAM_STOP_TOKENS:
        field = "stop.stop_token_ids"
        message = f"{count} stop tokens in a beam search; give at most {MAX_BEAM_STOP_TOKENS}"
        raise invalid(field, message)


def _check_alone(request: pb.GenerateRequest) -> None:
    """What would change which tokens may be chosen, and does not in a search."""
    given = {
        "grammar": request.HasField("grammar"),
        "sampling.logit_bias": bool(request.sampling.logit_bias),
        "stop.min_tokens": bool(request.stop.min_tokens),
    }
    for field, is_given in given.items():
        if is_given:
            raise invalid(field, f"{field} cannot be followed by a beam search; leave one out")


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise _wrong(name, value, least, most)


def _wrong(name: str, value: float, least: float, most: float) -> ServiceError:
    field = f"samples.{name}"
    return invalid(field, f"{field} is {value:g}; give {least:g} to {most:g}")
