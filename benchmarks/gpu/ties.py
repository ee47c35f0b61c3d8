"""Compares the tokens of two runs, between which rounding may decide near-ties differently."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

NEAR_TIE = 1e-4
"""Gap in log-probability below which rounding in float32 may choose either token."""


class Pair(NamedTuple):
    """The tokens of one sequence in two runs."""

    wanted: Sequence[int]
    gaps: Sequence[float]
    """Log-probability of each expected token minus that of the next likeliest token."""
    given: Sequence[int]


class Parted(NamedTuple):
    """The number of sequences that diverge from the expected sequences."""

    elsewhere: int
    """Number of sequences that diverge at a token without a near-tie, and are therefore wrong."""
    at_near_ties: int


def compare(pairs: Iterable[Pair], near: float = NEAR_TIE) -> Parted:
    """Count the sequences that diverge. A prefix of the expected sequence does not diverge.

    Args:
        pairs: the sequences of both runs.
        near: gap below which rounding may choose the other token.
    """
    gaps = [gap for pair in pairs if (gap := _gap(pair)) is not None]
    at_near_ties = sum(gap < near for gap in gaps)
    return Parted(len(gaps) - at_near_ties, at_near_ties)


def _gap(pair: Pair) -> float | None:
    """Return the gap at the first token that differs, or None if no token differs."""
    tokens = zip(pair.wanted, pair.given, strict=False)
    return next((pair.gaps[at] for at, (one, other) in enumerate(tokens) if one != other), None)
