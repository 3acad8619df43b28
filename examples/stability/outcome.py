"""When a run is decided, and what it is then called.

All by the training loss in bits a token, a mean every INTERVAL updates (label smoothing 0.1 leaves at least 1.27 bits;
the best that ignores the input and the earlier tokens is about 4.9):

solved     below 1.4 bits for two intervals; stops
diverged   not finite, or 1 bit above the first interval; stops. Or, at the end, 1 bit above its lowest
stalled    from update 200: above 2 bits and, over 100 updates, not 0.1 bit better. Stops if also all tokens are alike
           in the last layers of encoder and decoder (cosine 0.95); such a run might still have left its plateau later
learning   anything else, after the last update
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

INTERVAL = 10
SOLVED, DIVERGED, ALIKE = 1.4, 1.0, 0.95
STALLED_ABOVE, PROGRESS = 2.0, 0.1
OUTCOMES = ("solved", "learning", "stalled", "diverged")


def decided(losses: Sequence[float], cosine: float) -> str | None:
    """The outcome of a run that need not go on, else None.

    Args:
        losses: a mean an interval, from the first on.
        cosine: between tokens, the smaller of encoder's and decoder's last layers.
    """
    if not math.isfinite(losses[-1]) or losses[-1] > losses[0] + DIVERGED:
        return "diverged"
    if len(losses) > 1 and max(losses[-2:]) < SOLVED:
        return "solved"
    if _stalls(losses) and cosine >= ALIKE:
        return "stalled"
    return None


def final(losses: Sequence[float]) -> str:
    """The outcome of an undecided run after its last update."""
    if losses[-1] > min(losses) + DIVERGED:
        return "diverged"
    return "stalled" if _stalls(losses) else "learning"


def _stalls(losses: Sequence[float]) -> bool:
    if len(losses) * INTERVAL < 200:
        return False
    now, before = fmean(losses[-5:]), fmean(losses[-15:-10])
    return now > STALLED_ABOVE and before - now < PROGRESS
