"""Comparison of tokens with another run, in which rounding may decide near-ties."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

NEAR_TIE = 1e-4
"""Gap in log-probability below which rounding in float32 may choose either token."""


class Pair(NamedTuple):
    """Tokens of one sequence in two runs."""

    wanted: Sequence[int]
    gaps: Sequence[float]
    """Log-probability of each wanted token less that of the next likeliest."""
    given: Sequence[int]


class Parted(NamedTuple):
    """How many sequences part from the wanted ones."""

    elsewhere: int
    """Sequences that part at a token without a near tie: these are wrong."""
    at_near_ties: int


def compare(pairs: Iterable[Pair], near: float = NEAR_TIE) -> Parted:
    """Count the sequences that part. A prefix of the wanted one does not part.

    Args:
        pairs: sequences of both runs.
        near: gap below which rounding may choose the other token.
    """
    gaps = [gap for pair in pairs if (gap := _gap(pair)) is not None]
    at_near_ties = sum(gap < near for gap in gaps)
    return Parted(len(gaps) - at_near_ties, at_near_ties)


def _gap(pair: Pair) -> float | None:
    """Return the gap at the first token that differs, or None if none does."""
    tokens = zip(pair.wanted, pair.given, strict=False)
    return next((pair.gaps[at] for at, (one, other) in enumerate(tokens) if one != other), None)
