"""SpecAugment: random bands of frequency and time set to zero while training (Park et al., 2019,
arXiv:1904.08779).

Time warping is left out: the paper finds that it matters least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, from_numpy


@dataclass(frozen=True)
class SpecAugment:
    """A masking policy, named by the paper's symbols in brackets.

    Attributes:
        freq_masks: number of frequency masks [m_F].
        freq_width: each is 0 to ``freq_width`` - 1 bins wide [F].
        time_masks: number of time masks [m_T].
        time_width: each is 0 to ``time_width`` - 1 frames wide [T] ...
        time_fraction: ... and narrower than this part of the utterance [p].
    """

    freq_masks: int
    freq_width: int
    time_masks: int
    time_width: int
    time_fraction: float

    def masks(self, frames: int, bins: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Which frames and which bins of an utterance to mask, bool of shape (frames,) and (bins,).

        A mask starts in [0, length - width), so that the last frame and the last bin always stay: no utterance is
        ever masked as a whole.
        """
        time_width = min(self.time_width, int(frames * self.time_fraction))
        time = _mask(frames, self.time_masks, time_width, rng)
        freq = _mask(bins, self.freq_masks, self.freq_width, rng)
        return from_numpy(time), from_numpy(freq)


def apply_masks(features: Tensor, time: Tensor, freq: Tensor) -> Tensor:
    """A copy of ``features`` (..., frames, bins) with the frames and bins of the masks (..., frames) and (..., bins)
    set to 0, the mean of normalised features."""
    return features.masked_fill(time[..., :, None] | freq[..., None, :], 0.0)


POLICIES: dict[str, SpecAugment | None] = {
    "none": None,
    # LibriSpeech basic and double of the paper's table 1, without the time warp
    "lb": SpecAugment(freq_masks=1, freq_width=27, time_masks=1, time_width=100, time_fraction=1.0),
    "ld": SpecAugment(freq_masks=2, freq_width=27, time_masks=2, time_width=100, time_fraction=1.0),
    # many short time masks: the CTC Transformers for LibriSpeech 100 h of slimIPL (Likhomanenko et al., 2021,
    # arXiv:2010.11524), the lineage of sigmaReparam's speech experiments
    "librispeech_100h": SpecAugment(
        freq_masks=2, freq_width=30, time_masks=10, time_width=50, time_fraction=0.1
    ),
}


def mask_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random state of one utterance in one epoch.

    It depends on nothing else, so a resumed run, or one with other data-loader workers, draws the same masks.
    """
    return np.random.default_rng((seed, epoch, index))


def _mask(length: int, masks: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Union of ``masks`` random intervals, bool of shape (length,)."""
    if length == 0:
        return np.zeros(0, dtype=bool)
    widths = rng.integers(0, max(1, min(width, length)), size=masks)
    starts = rng.integers(0, length - widths)
    places = np.arange(length)
    return ((places >= starts[:, None]) & (places < (starts + widths)[:, None])).any(axis=0)
