"""Quantiles of measured values."""

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least the fraction `share` of all values does not exceed.

    The result is 0 if there are no values.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
