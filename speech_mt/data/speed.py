"""Speed perturbation: utterances played slower or faster in training (Ko et al., Interspeech 2015).

Pitch changes with speed, as on a tape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speech_mt.errors import InputError

_STREAM = 1  # sets these random numbers apart from those of SpecAugment


@dataclass(frozen=True)
class SpeedPerturbation:
    """Speeds to choose from, each as often as the others; 1 is the recording's."""

    speeds: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> SpeedPerturbation | None:
        """``"0.9,1.0,1.1"``, or nothing for None.

        Raises:
            InputError: something is no speed from 0.5 to 2.
        """
        if not text:
            return None
        try:
            speeds = tuple(float(part) for part in text.split(","))
        except ValueError:
            speeds = (0.0,)
        if any(not 0.5 <= speed <= 2 for speed in speeds):
            raise InputError(f"--speed-perturb {text!r}: give speeds from 0.5 to 2 with commas between: 0.9,1.0,1.1")
        return cls(speeds)

    def of_epoch(self, seed: int, epoch: int, utterances: int) -> np.ndarray:
        """The speed of every utterance in one epoch, float64: a function of nothing but the arguments."""
        return np.random.default_rng((seed, epoch, _STREAM)).choice(self.speeds, size=utterances)


def change_speed(samples: np.ndarray, sample_rate: int, speed: float) -> np.ndarray:
    """Play float32 samples (n,) at ``speed``: n / speed samples, rounded up, by torchaudio's windowed sinc."""
    if speed == 1:
        return samples
    import torch  # here, so that reading audio needs no torch
    from torchaudio.functional import resample

    return resample(torch.from_numpy(samples), round(sample_rate * speed), sample_rate).numpy()
