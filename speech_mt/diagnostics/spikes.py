"""Spike score: the share of updates whose loss or gradient norm is far from its recent mean.

OLMo 2 (2025) counts values at least seven standard deviations from the mean of the last 1,000.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np


class SpikeScore:
    """Watches any number of series, such as loss and gradient norm, one value of each an update.

    A value is compared with those before it, and then joins them. A value that is not finite is always a spike
    and joins nothing. An update costs one pass over the window, whatever the length of the run.

    Args:
        window: number of recent values, for mean and standard deviation.
        deviations: distance from the mean, either way, from which a value is a spike.
        minimum: finite values that a series needs before it is judged (our choice).
    """

    def __init__(self, window: int = 1000, deviations: float = 7.0, minimum: int = 100) -> None:
        if not 2 <= minimum <= window:
            raise ValueError(f"minimum {minimum}: want at least 2 and at most the window, {window}")
        self.window, self.deviations, self.minimum = window, deviations, minimum
        self.updates = self.spikes = 0
        self._recent: dict[str, deque[float]] = {}

    @property
    def score(self) -> float:
        """Share of updates with a spike in any series; NaN before the first update."""
        return self.spikes / self.updates if self.updates else math.nan

    def update(self, **values: float) -> list[str]:
        """Add one update, e.g. ``update(loss=3.2, gradient_norm=1.1)``; return the names of what spiked."""
        spiked = [name for name, value in values.items() if self._is_spike(name, float(value))]
        self.updates += 1
        self.spikes += bool(spiked)
        return spiked

    def _is_spike(self, name: str, value: float) -> bool:
        recent = self._recent.setdefault(name, deque(maxlen=self.window))
        if not math.isfinite(value):
            return True
        spike = False
        if len(recent) >= self.minimum:
            # Running sums would be cheaper, and useless for as long as a value of 1e30 has been among them.
            past = np.array(recent)
            distance = abs(value - past.mean())
            spike = bool(distance > 0 and distance >= self.deviations * past.std())
        recent.append(value)
        return spike

    def state_dict(self) -> dict[str, object]:
        """Counts and windows as plain numbers: safe to save in a checkpoint."""
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"updates": self.updates, "spikes": self.spikes, "recent": recent}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue where :meth:`state_dict` was taken; a shorter window keeps the latest values."""
        self.updates, self.spikes = state["updates"], state["spikes"]
        self._recent = {name: deque(values, maxlen=self.window) for name, values in state["recent"].items()}
