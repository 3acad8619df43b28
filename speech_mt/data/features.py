"""Kaldi's log-mel filterbanks and their normalisation.

The filterbanks are those of Kaldi's ``compute-fbank-feats``: 25 ms Povey windows every 10 ms, edges snipped,
DC offset removed, pre-emphasis 0.97, power spectrum, natural logarithm, waveform scaled to the 16-bit range,
and no dither, so that the same audio always gives the same features. They are those of
``torchaudio.compliance.kaldi.fbank``, whose mel filters are used, up to rounding, in half the time or less: see
benchmarks/bench_features.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from speech_mt.data.audio import read_audio
from speech_mt.data.manifest import Manifest
from speech_mt.data.speed import change_speed
from speech_mt.errors import InputError

FRAME_LENGTH_MS = 25.0
FRAME_SHIFT_MS = 10.0
MIN_SAMPLE_RATE = 1000
MIN_MEL_BINS = 4
NORMALIZATIONS = ("utterance", "per_bin", "none")
_FRAMES_AT_ONCE = 256  # all of the work on them fits into a core's cache
_PREEMPHASIS = 0.97
_LOW_FREQUENCY = 20.0  # Hz, where the first filter begins
_DURATION_TOLERANCE_FRAMES = 10  # durations may be rounded to a tenth of a second


@dataclass(frozen=True)
class FeatureConfig:
    """What turns an audio file into features.

    Attributes:
        sample_rate: of the audio, Hz.
        resample: convert audio of another rate instead of refusing it.
        num_mel_bins: channels of a frame.
        normalization: one of :data:`NORMALIZATIONS`.
    """

    sample_rate: int = 16000
    resample: bool = False
    num_mel_bins: int = 80
    normalization: str = "utterance"

    def __post_init__(self) -> None:
        """:class:`InputError` for numbers that no filterbank has."""
        if self.sample_rate < MIN_SAMPLE_RATE:
            raise InputError(f"--sample-rate {self.sample_rate}: has to be at least {MIN_SAMPLE_RATE} Hz")
        most = _fft_size(self.sample_rate) // 2
        if not MIN_MEL_BINS <= self.num_mel_bins <= most:
            raise InputError(
                f"--num-mel-bins {self.num_mel_bins}: has to be {MIN_MEL_BINS} to {most} at "
                f"{self.sample_rate} Hz, where a spectrum has {most} frequencies"
            )


def frame_count(samples: np.ndarray | int, sample_rate: int) -> np.ndarray:
    """Number of frames that :func:`log_mel_filterbank` gives for so many samples; 0 if shorter than one
    window."""
    window, shift = _samples(sample_rate, FRAME_LENGTH_MS), _samples(sample_rate, FRAME_SHIFT_MS)
    return np.maximum((np.asarray(samples) - window) // shift + 1, 0)


def log_mel_filterbank(samples: np.ndarray, sample_rate: int, num_mel_bins: int = 80) -> Tensor:
    """Log-mel filterbanks of one utterance.

    Args:
        samples: float32 of shape (samples,), in [-1, 1].
        sample_rate: samples per second.
        num_mel_bins: filters, spaced evenly in mel from 20 Hz to half the sample rate.

    Returns:
        float32 of shape (frames, num_mel_bins); finite also for digital silence (log of the float32 epsilon).

    Raises:
        InputError: if there are fewer samples than one window has.
    """
    if frame_count(len(samples), sample_rate) == 0:
        milliseconds = 1000 * len(samples) / sample_rate
        raise InputError(
            f"{milliseconds:.1f} ms of audio are shorter than one window of {FRAME_LENGTH_MS:.0f} ms"
        )
    window, filters = _window_and_filters(sample_rate, num_mel_bins)
    length, padding = len(window), _fft_size(sample_rate) - len(window)
    frames = (torch.from_numpy(samples) * 32768).unfold(0, length, _samples(sample_rate, FRAME_SHIFT_MS))
    energies = torch.empty(len(frames), num_mel_bins)
    for block, out in zip(frames.split(_FRAMES_AT_ONCE), energies.split(_FRAMES_AT_ONCE), strict=True):
        block = block - block.mean(dim=1, keepdim=True)
        padded = torch.nn.functional.pad(block, (0, padding))
        padded[:, 1:length].sub_(block[:, :-1], alpha=_PREEMPHASIS)
        padded[:, 0].mul_(1 - _PREEMPHASIS)  # Kaldi takes the sample before the first for equal to it
        padded[:, :length].mul_(window)
        spectrum = torch.fft.rfft(padded)
        torch.mm(spectrum.real.square() + spectrum.imag.square(), filters, out=out)
    return energies.clamp_(min=torch.finfo(torch.float32).eps).log_()


def _samples(sample_rate: int, milliseconds: float) -> int:
    return int(sample_rate * milliseconds * 0.001)


def _fft_size(sample_rate: int) -> int:
    """The power of two that holds a window."""
    return 1 << (_samples(sample_rate, FRAME_LENGTH_MS) - 1).bit_length()


@lru_cache
def _window_and_filters(sample_rate: int, num_mel_bins: int) -> tuple[Tensor, Tensor]:
    """The Povey window (samples,) and the mel filters (frequencies, num_mel_bins), which sum power to bins."""
    from torchaudio.compliance.kaldi import get_mel_banks

    window = torch.hann_window(_samples(sample_rate, FRAME_LENGTH_MS), periodic=False).pow(0.85)
    # high frequency 0: half the sample rate; the last three arguments are of vocal tract length warping: none
    filters, _ = get_mel_banks(
        num_mel_bins, _fft_size(sample_rate), float(sample_rate), _LOW_FREQUENCY, 0.0, 100.0, -500.0, 1.0
    )
    return window, torch.nn.functional.pad(filters, (0, 1)).T.contiguous()  # the highest frequency is in none


def utterance_log_mel(manifest: Manifest, row: int, config: FeatureConfig, speed: float = 1.0) -> Tensor:
    """Filterbanks of one row's audio played at ``speed``, not normalised, float32 of shape (frames, num_mel_bins).

    Raises:
        InputError: naming the utterance, if its audio is unusable (see :func:`read_audio`,
            :func:`log_mel_filterbank`) or more than 0.1 s longer or shorter than the manifest says: batches
            are made from the manifest's durations.
    """
    try:
        samples = read_audio(manifest.audio_path(row), config.sample_rate, config.resample)
        changed = change_speed(samples, config.sample_rate, speed)
        features = log_mel_filterbank(changed, config.sample_rate, config.num_mel_bins)
    except InputError as error:
        raise InputError(f"{manifest.where(row)}: {error}") from None
    expected = frame_count(round(manifest.duration[row] * config.sample_rate / speed), config.sample_rate)
    if abs(len(features) - expected) > _DURATION_TOLERANCE_FRAMES:
        raise InputError(
            f"{manifest.where(row)}: duration is {manifest.duration[row]:g} s, but {manifest.audio_path(row)}"
            f" lasts {len(samples) / config.sample_rate:g} s; correct the manifest, or the file if cut short"
        )
    return features


def normalize(features: Tensor, method: str) -> Tensor:
    """Shift and scale features to zero mean and unit variance.

    Args:
        features: (frames, bins).
        method: ``utterance``, one mean and one standard deviation over all frames and bins of the utterance,
            as in the speech recognition experiments of sigmaReparam (Zhai et al., 2023, arXiv:2303.06296);
            ``per_bin``, one pair per bin over the frames (cepstral mean and variance normalisation); or
            ``none``.

    Returns:
        float32 of the same shape. Where the deviation is 0 (digital silence, a single frame per bin) the
        result is 0.
    """
    if method == "none":
        return features
    dims = {"utterance": (0, 1), "per_bin": (0,)}[method]
    features = features.double()  # sums are exact for a constant input, which then gives exactly 0
    deviation, mean = torch.std_mean(features, dim=dims, correction=0, keepdim=True)
    return ((features - mean) / deviation.clamp(min=1e-5)).float()
