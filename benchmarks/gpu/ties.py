"""Whether tokens are those of another run, where rounding may choose between two near-ties."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

NEAR_TIE = 1e-4
"""Log-probability between two tokens of which rounding in float32 may choose either."""


class Pair(NamedTuple):
    """Tokens of one sequence in two runs."""

    wanted: Sequence[int]
    gaps: Sequence[float]
    """Of each wanted token, its log-probability less that of the next likeliest."""
    given: Sequence[int]


class Parted(NamedTuple):
    """How many sequences part from the wanted ones."""

    elsewhere: int
    """At a token that was not nearly tied: they are wrong."""
    at_near_ties: int


def compare(pairs: Iterable[Pair], near: float = NEAR_TIE) -> Parted:
    """Count the sequences that part; a beginning of the wanted one does not.

    Args:
        pairs: sequences in both runs.
        near: gap below which rounding may choose the other token.
    """
    gaps = [gap for pair in pairs if (gap := _gap(pair)) is not None]
    at_near_ties = sum(gap < near for gap in gaps)
    return Parted(len(gaps) - at_near_ties, at_near_ties)


def _gap(pair: Pair) -> float | None:
    """Return the gap behind the first token that differs; None: none does."""
    tokens = zip(pair.wanted, pair.given, strict=False)
    return next((pair.gaps[at] for at, (one, other) in enumerate(tokens) if one != other), None)
