"""Quantiles of measured values."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values at the fraction `share`, by the nearest-rank method.

    This is the smallest value such that at least the fraction `share` of all values are less than
    or equal to it. The result is 0 if there are no values.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
