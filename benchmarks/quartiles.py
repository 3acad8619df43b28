"""How far the values of interleaved rounds lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of at least two values, none beyond the values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
