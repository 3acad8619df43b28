"""Audio files to mono float32 samples, through libsndfile (FLAC, WAV, Ogg and others)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from speech_mt.errors import InputError


def read_audio(path: str | Path, sample_rate: int, resample: bool = False) -> np.ndarray:
    """Read a whole file as mono samples in [-1, 1]; several channels are averaged.

    Args:
        path: the audio file.
        sample_rate: samples per second wanted.
        resample: convert a file with another rate instead of refusing it.

    Returns:
        float32 of shape (samples,), at ``sample_rate``.

    Raises:
        InputError: naming the file, if it is missing, empty, truncated, not decodable, holds samples that are
            not finite, or has another rate and ``resample`` is off.
    """
    try:
        with _open(path) as file:
            rate, declared = file.samplerate, file.frames
            channels = file.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InputError(f"{path}: cannot be decoded ({error}); is the file damaged or cut short?") from None
    if len(channels) == 0:
        raise InputError(f"{path}: holds no audio (0 samples)")
    if len(channels) < declared:
        raise InputError(f"{path}: truncated, {len(channels)} of {declared} samples could be read")
    samples = channels.mean(axis=1)
    if not np.isfinite(samples).all():
        raise InputError(f"{path}: holds samples that are not finite numbers")
    if rate == sample_rate:
        return samples
    if not resample:
        raise InputError(
            f"{path}: sampled at {rate} Hz, expected {sample_rate} Hz; set --sample-rate {rate} or --resample"
        )
    return _resample(samples, rate, sample_rate)


def audio_duration(path: str | Path) -> float:
    """Length in seconds by the file's header, without decoding it; :class:`InputError` if it cannot be
    opened."""
    with _open(path) as file:
        return file.frames / file.samplerate


def conversions(path: str | Path, sample_rate: int) -> list[str]:
    """What :func:`read_audio` does to a file to get mono samples at ``sample_rate``, in words; often nothing."""
    with _open(path) as file:
        made = [f"{file.channels} channels averaged"] if file.channels > 1 else []
        return made + ([f"resampled from {file.samplerate} Hz"] if file.samplerate != sample_rate else [])


def _open(path: str | Path) -> soundfile.SoundFile:
    if not Path(path).is_file():
        raise InputError(f"{path}: no such audio file")
    try:
        return soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        raise InputError(f"{path}: not an audio file that libsndfile can open ({error})") from None


def _resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    import torch  # here, so that reading audio needs no torch
    from torchaudio.functional import resample

    return resample(torch.from_numpy(samples), rate, new_rate).numpy()
