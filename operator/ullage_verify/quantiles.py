"""Quantiles of measured values."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    Without values, return 0.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
