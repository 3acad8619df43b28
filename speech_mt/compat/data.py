"""Batches that hold every sample, blocks of tokens under numpy 2, and audio without sox."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from speech_mt.errors import InputError


def last_batch_is_dropped() -> bool:
    from fairseq.data import data_utils

    batches = data_utils.batch_by_size(
        np.arange(3),
        None,
        num_tokens_vec=np.ones(3, dtype=np.int64),
        max_sentences=2,
        required_batch_size_multiple=2,
    )
    return sum(map(len, batches)) < 3


def keep_last_batch() -> None:
    from fairseq.data import data_utils

    stock = data_utils.batch_by_size

    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
        """fairseq's batches, which are consecutive slices of ``indices``, and the slice that it left out."""
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = list(stock(indices, *args, **kwargs))
        batched = sum(map(len, batches))
        return [*batches, indices[batched:]] if batched < len(indices) else batches

    data_utils.batch_by_size = batch_by_size


def numpy_compat_is_missing() -> bool:
    return not hasattr(np, "compat")


def provide_numpy_compat() -> None:
    np.compat = SimpleNamespace(long=int)  # all that fairseq takes from it, and what it was


def missing_data_is_unexplained() -> bool:
    from fairseq.data import data_utils

    return data_utils.infer_language_pair.__module__ == data_utils.__name__


def explain_missing_data() -> None:
    from fairseq.data import data_utils

    stock = data_utils.infer_language_pair

    def infer_language_pair(path: str) -> Any:
        if not Path(path).is_dir():
            raise InputError(
                f"{path}: no such data folder; python scripts/prepare_text.py makes one from text, and make demo that "
                "of examples/numbers, runs/numbers/data/mt/bin"
            )
        return stock(path)

    data_utils.infer_language_pair = infer_language_pair


def sox_is_missing() -> bool:
    from fairseq.data.audio import audio_utils

    without_sox = importlib.util.find_spec("torchaudio.sox_effects") is None
    return without_sox and audio_utils.convert_waveform is not convert_waveform


def convert_without_sox() -> None:
    from fairseq.data.audio import audio_utils

    audio_utils.convert_waveform = convert_waveform


def convert_waveform(
    waveform: np.ndarray | torch.Tensor,
    sample_rate: int,
    normalize_volume: bool = False,
    to_mono: bool = False,
    to_sample_rate: int | None = None,
) -> tuple[np.ndarray | torch.Tensor, int]:
    """Normalise, resample and mix down a waveform (channels x samples), in sox's order: gain, rate, channels.

    The peak becomes 1 (sox ``gain -n``: 0 dBFS), but digital silence stays. Channels are averaged.
    Resampling is torchaudio's windowed sinc with a Hann window.
    """
    converted = torch.as_tensor(waveform)
    if normalize_volume and (peak := converted.abs().max()) > 0:
        converted = converted / peak
    if to_sample_rate is not None and to_sample_rate != sample_rate:
        from torchaudio.functional import resample

        converted, sample_rate = resample(converted, sample_rate, to_sample_rate), to_sample_rate
    if to_mono and converted.shape[0] > 1:
        converted = converted.mean(dim=0, keepdim=True)
    return (converted.numpy() if isinstance(waveform, np.ndarray) else converted), sample_rate
