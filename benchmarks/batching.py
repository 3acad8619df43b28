"""Padding of dynamic batches on utterances as long as LibriSpeech's.

The corpus itself is not needed. Two simulations of train-clean-100's 28,539 utterances, from the real durations d of
the train-clean-100 utterances in $SPEECH_MT_DATA:

    bootstrap   d drawn with replacement, each moved by up to 0.5 s
    beta        lo + (hi - lo) Beta(a, b), a and b from the mean and variance of d, lo 1.4 s and hi 24.5 s

Batches are those of training: sorted by length, ties at random, --max-tokens frames with padding. Padding is the share
of a batch's frames beyond its utterances' ends.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import soundfile

from speech_mt.errors import InputError, run

UTTERANCES = 28_539
SHORTEST, LONGEST = 1.4, 24.5  # seconds


def real_durations(folder: Path) -> np.ndarray:
    """Seconds of the utterances below a folder of LibriSpeech."""
    files = sorted(folder.glob("*/*/*.flac"))
    if not files:
        raise InputError(f"{folder}: no */*/*.flac; SPEECH_MT_DATA or --data names the folder with LibriSpeech/")
    return np.array([soundfile.info(file).duration for file in files])


def bootstrap(durations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many as train-clean-100 has, drawn with replacement and moved a little."""
    drawn = rng.choice(durations, UTTERANCES) + rng.uniform(-0.5, 0.5, UTTERANCES)
    return drawn.clip(SHORTEST, LONGEST)


def beta(durations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many from the Beta distribution with the mean and variance of ``durations``."""
    unit = (durations - SHORTEST).clip(0) / (LONGEST - SHORTEST)
    mean, variance = unit.mean(), unit.var()
    concentration = mean * (1 - mean) / variance - 1
    drawn = rng.beta(mean * concentration, (1 - mean) * concentration, UTTERANCES)
    return SHORTEST + (LONGEST - SHORTEST) * drawn


def dataset(durations: np.ndarray):  # noqa: ANN201 (fairseq is imported late)
    """A training set of utterances that long; their audio is never read."""
    from speech_mt.data.features import FeatureConfig
    from speech_mt.data.manifest import Manifest, manifest_bytes
    from speech_mt.data.speech_dataset import SpeechDataset
    from speech_mt.data.transcripts import CharacterTokenizer

    name = Path("simulated.tsv")
    rows = ({"id": i, "audio": "-", "duration": d, "text": "a", "speaker": "-"} for i, d in enumerate(durations))
    letters = CharacterTokenizer({"<unk>": 3, "|": 4, "a": 5})
    return SpeechDataset(
        Manifest(name, manifest_bytes(name, rows)), FeatureConfig(), letters, pad=1, eos=2, training=True
    )


def padding(frames: np.ndarray, batches: list[np.ndarray]) -> float:
    """Share of all batches' frames that is padding."""
    padded = sum(len(batch) * frames[batch].max() for batch in batches)
    return 1 - sum(frames[batch].sum() for batch in batches) / padded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPEECH_MT_DATA"), help="default: $SPEECH_MT_DATA")
    parser.add_argument("--max-tokens", type=int, default=24_000, help="frames of 10 ms a batch, padding included")
    args = parser.parse_args()
    if args.data is None:
        raise InputError("set SPEECH_MT_DATA, or give --data: the folder with LibriSpeech/")
    real = real_durations(args.data / "LibriSpeech" / "train-clean-100")
    print(f"{len(real)} real utterances, mean {real.mean():.2f} s, deviation {real.std():.2f} s")
    print(f"{'simulation':12}{'hours':>8}{'batches':>9}{'padding':>9}{'in random order':>17}")
    for simulate in (bootstrap, beta):
        durations = simulate(real, np.random.default_rng(1))
        data = dataset(durations)
        sorted_batches = data.batch_by_size(data.ordered_indices(), max_tokens=args.max_tokens)
        shuffled = np.random.default_rng(2).permutation(len(data))
        random_batches = data.batch_by_size(shuffled, max_tokens=args.max_tokens)
        print(
            f"{simulate.__name__:12}{durations.sum() / 3600:8.1f}{len(sorted_batches):9}"
            f"{padding(data.frames, sorted_batches):9.2%}{padding(data.frames, random_batches):17.2%}"
        )


if __name__ == "__main__":
    run(main)
