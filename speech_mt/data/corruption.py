"""Spoilt test data, to see what a model trained on clean data makes of it: audio through torchaudio, text by character.

| audio | level | |
|---|---|---|
| noise | dB | white noise at this ratio of signal to noise |
| lowpass | Hz | a second-order low-pass filter with this cut-off |
| clipping | 0 to 1 | all beyond this share of the peak is cut off |
| speed | factor | played faster (above 1) or slower, with pitch |
| reverberation | s | a synthetic room: noise that decays by 60 dB in this time, as loud as the direct sound |

What is random depends on the generator alone: the same utterance is spoilt alike for every model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchaudio import functional

from speech_mt.errors import InputError


def _noise(samples: Tensor, sample_rate: int, level: float, random: np.random.Generator) -> Tensor:
    return functional.add_noise(samples, _normal(len(samples), random), torch.tensor(level))


def _lowpass(samples: Tensor, sample_rate: int, level: float, random: np.random.Generator) -> Tensor:
    return functional.lowpass_biquad(samples, sample_rate, level)


def _clipping(samples: Tensor, sample_rate: int, level: float, random: np.random.Generator) -> Tensor:
    peak = level * samples.abs().max()
    return samples.clamp(-peak, peak)


def _speed(samples: Tensor, sample_rate: int, level: float, random: np.random.Generator) -> Tensor:
    return functional.speed(samples, sample_rate, level)[0]


def _reverberation(samples: Tensor, sample_rate: int, level: float, random: np.random.Generator) -> Tensor:
    length = max(2, int(level * sample_rate))
    decay = 10.0 ** (-3 * torch.arange(length) / length)  # 60 dB are a factor of 1000
    tail = _normal(length, random) * decay
    response = tail / tail.norm()
    response[0] = 1.0
    return functional.fftconvolve(samples, response)[: len(samples)]


def _normal(count: int, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.standard_normal(count, dtype=np.float32))


AUDIO_CORRUPTIONS: dict[str, Callable[[Tensor, int, float, np.random.Generator], Tensor]] = {
    "noise": _noise,
    "lowpass": _lowpass,
    "clipping": _clipping,
    "speed": _speed,
    "reverberation": _reverberation,
}
_LEVELS = {"noise": (-100, 100), "lowpass": (1, None), "clipping": (0, 1), "speed": (0.1, 10), "reverberation": (0, 10)}


def corrupt_audio(
    samples: np.ndarray, sample_rate: int, kind: str, level: float, random: np.random.Generator
) -> np.ndarray:
    """Spoil one utterance.

    Args:
        samples: float32 (n,).
        kind: a key of :data:`AUDIO_CORRUPTIONS`; its level as in the table above.

    Returns:
        float32 (n,), or (about n / level,) of another speed.

    Raises:
        InputError: no such corruption, or a level that means nothing.
    """
    if kind not in AUDIO_CORRUPTIONS:
        raise InputError(f"corruption {kind!r}: there are {', '.join(AUDIO_CORRUPTIONS)}")
    low, high = _LEVELS[kind][0], _LEVELS[kind][1] or sample_rate / 2
    if not low <= level <= high:
        raise InputError(f"{kind} of level {level:g}: give one from {low:g} to {high:g}")
    spoilt = AUDIO_CORRUPTIONS[kind](torch.from_numpy(samples), sample_rate, level, random)
    return spoilt.numpy().astype(np.float32, copy=False)


def corrupt_text(text: str, rate: float, random: np.random.Generator) -> str:
    """Each character, with this probability, is left out, doubled, replaced by another of the text, or changes places
    with the next; spaces stay, so that the number of words does.

    Raises:
        InputError: no probability.
    """
    if not 0 <= rate <= 1:
        raise InputError(f"character noise of rate {rate:g}: a probability")
    letters = sorted(set(text) - {" "})
    result, i = [], 0
    while i < len(text):
        character = text[i]
        i += 1
        if character == " " or random.random() >= rate:
            result.append(character)
            continue
        kind = random.integers(4)
        if kind == 0:
            continue
        if kind == 1:
            result += [character, character]
        elif kind == 2:
            result.append(letters[random.integers(len(letters))])
        elif i < len(text) and text[i] != " ":
            result += [text[i], character]
            i += 1
        else:
            result.append(character)
    return "".join(result)
