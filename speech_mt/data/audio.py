"""Audio files to mono float32 samples, through libsndfile (FLAC, WAV, Ogg and others)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

from speech_mt.errors import InputError

_BLOCK = 2**20  # samples: a minute
_UNKNOWN_LENGTH = 2**62  # libsndfile gives 2**63 - 1


class AudioError(InputError):
    """Audio that cannot be used.

    Attributes:
        kind: what is wrong in a few words, the same for all files with that fault.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_audio(path: str | Path, sample_rate: int, resample: bool = False) -> np.ndarray:
    """Read a whole file as mono samples in [-1, 1]; several channels are averaged.

    Args:
        path: the audio file.
        sample_rate: samples per second wanted.
        resample: convert a file with another rate instead of refusing it.

    Returns:
        float32 of shape (samples,), at ``sample_rate``.

    Raises:
        AudioError: see :func:`open_audio` and :func:`read_blocks`; also if the file has another rate and
            ``resample`` is off.
    """
    with open_audio(path) as file:
        rate = file.samplerate
        blocks = [block.mean(axis=1) for block in read_blocks(file)]
    samples = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    if rate == sample_rate:
        return samples
    if not resample:
        raise AudioError(
            "sample rate",
            f"{path}: sampled at {rate} Hz, expected {sample_rate} Hz; set --sample-rate {rate} or --resample",
        )
    return _resample(samples, rate, sample_rate)


def audio_duration(path: str | Path) -> float:
    """Length in seconds by the file's header, without decoding it; :class:`AudioError` as
    :func:`open_audio`."""
    with open_audio(path) as file:
        return file.frames / file.samplerate


def conversions(path: str | Path, sample_rate: int) -> list[str]:
    """What :func:`read_audio` does to a file to get mono samples at ``sample_rate``, in words; often nothing."""
    with open_audio(path) as file:
        made = [f"{file.channels} channels averaged"] if file.channels > 1 else []
        return made + ([f"resampled from {file.samplerate} Hz"] if file.samplerate != sample_rate else [])


def open_audio(path: str | Path) -> soundfile.SoundFile:
    """Open an audio file for reading.

    Raises:
        AudioError: naming the file, if it is missing, not audio, or has no length in its header.
    """
    if not Path(path).is_file():
        raise AudioError("missing audio", f"{path}: no such audio file")
    if Path(path).stat().st_size == 0:
        raise AudioError("no samples", f"{path}: not an audio file, but an empty one (0 bytes)")
    try:
        file = soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        raise AudioError(
            "not audio", f"{path}: not an audio file that libsndfile can open ({error.error_string})"
        ) from None
    if file.frames >= _UNKNOWN_LENGTH:
        file.close()
        raise AudioError(
            "no length",
            f"{path}: its header does not say how long it is; write the file again, not as a stream",
        )
    return file


def read_blocks(file: soundfile.SoundFile) -> Iterator[np.ndarray]:
    """Yield float32 blocks of shape (samples, channels) up to the end, whatever length the header claims.

    Raises:
        AudioError: naming the file, if it is empty, truncated, not decodable or holds samples that are not
            finite.
    """
    path, read = file.name, 0
    try:
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            read += len(block)
            if not np.isfinite(block).all():
                raise AudioError("samples not finite", f"{path}: holds samples that are not finite numbers")
            yield block
    except soundfile.LibsndfileError as error:
        raise AudioError(
            "cannot be decoded",
            f"{path}: cannot be decoded ({error.error_string.strip(' .')}); is the file damaged or cut short?",
        ) from None
    if file.frames == 0:
        raise AudioError("no samples", f"{path}: holds no audio (0 samples)")
    if read < file.frames:
        raise AudioError("truncated", f"{path}: truncated, {read} of {file.frames} samples could be read")


def _resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    import torch  # here, so that reading audio needs no torch
    from torchaudio.functional import resample

    return resample(torch.from_numpy(samples), rate, new_rate).numpy()
