"""Speed of filterbanks against torchaudio's, in one interleaved run on one core.

    python benchmarks/bench_features.py [--audio LibriSpeech/dev-clean] [--rounds 10]

Every round does the same audio by every method, so that a busy machine slows all of them alike; a ratio is the
median over rounds of torchaudio's time divided by the method's. Without --audio the audio is noise, 2 to 20
seconds each, written as FLAC to a temporary folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import soundfile
import torch
import torchaudio
from quartiles import quartiles
from torch import Tensor
from torchaudio.compliance import kaldi

from speech_mt.arguments import positive_int
from speech_mt.data.audio import read_audio
from speech_mt.data.feature_cache import extract_features
from speech_mt.data.features import log_mel_filterbank
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.errors import InputError, run

RATE = 16000
TORCHAUDIO = "torchaudio.compliance.kaldi.fbank"


def filterbank(samples: np.ndarray) -> Tensor:
    return log_mel_filterbank(samples, RATE)


def torchaudio_fbank(samples: np.ndarray) -> Tensor:
    """What :func:`log_mel_filterbank` computes, by torchaudio, in the precision of ``samples``."""
    return kaldi.fbank(torch.from_numpy(samples)[None] * 32768, num_mel_bins=80, dither=0.0, sample_frequency=RATE)


def largest_error(method: Callable[[np.ndarray], Tensor], audio: list[np.ndarray]) -> float:
    """The largest difference of any filterbank to torchaudio's in double precision."""
    return max((method(x) - torchaudio_fbank(x.astype(np.float64))).abs().max().item() for x in audio)


def time_once(method: Callable[[], object]) -> float:
    start = time.perf_counter()
    method()
    return time.perf_counter() - start


def noise(folder: Path) -> list[Path]:
    """Twenty files of noise, 2 to 20 seconds."""
    generator = np.random.default_rng(0)
    paths = [folder / f"{k}.flac" for k in range(20)]
    for path, seconds in zip(paths, np.linspace(2, 20, len(paths)), strict=True):
        soundfile.write(path, generator.normal(0, 0.1, int(RATE * seconds)), RATE)
    return paths


def cache(paths: list[Path], folder: Path) -> None:
    """What scripts/extract_features.py does, from the files to shards on disk, by one process."""
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        manifest = Path(inner) / "train.tsv"
        row = {"text": "", "speaker": ""}
        durations = (soundfile.info(path).duration for path in paths)
        rows = [
            {"id": k, "audio": path.absolute(), "duration": seconds} | row
            for k, (path, seconds) in enumerate(zip(paths, durations, strict=True))
        ]
        write_manifest(manifest, rows)
        extract_features(manifest)
        assert len(read_manifest(manifest)) == len(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audio", type=Path, help="folder with FLAC files of 16 kHz, searched in depth")
    parser.add_argument("--files", type=positive_int, default=50, help="of the folder, at most; default: %(default)s")
    parser.add_argument("--rounds", type=positive_int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        paths = sorted(args.audio.rglob("*.flac"))[: args.files] if args.audio else noise(Path(folder))
        if not paths:
            raise InputError(f"{args.audio}: holds no FLAC files")
        audio = [read_audio(path, RATE) for path in paths]
        seconds = sum(map(len, audio)) / RATE
        ours, theirs = (largest_error(method, audio) for method in (filterbank, torchaudio_fbank))
        methods: dict[str, Callable[[], object]] = {
            TORCHAUDIO: lambda: [torchaudio_fbank(x) for x in audio],
            "log_mel_filterbank": lambda: [filterbank(x) for x in audio],
            "soundfile.read + torchaudio": lambda: [
                torchaudio_fbank(soundfile.read(path, dtype="float32")[0]) for path in paths
            ],
            "read_audio + log_mel_filterbank": lambda: [filterbank(read_audio(path, RATE)) for path in paths],
            "extract_features, to disk": lambda: cache(paths, Path(folder)),
        }
        times: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(args.rounds + 1):
            for name, method in methods.items():
                times[name].append(time_once(method))

    print(f"torch {torch.__version__}, torchaudio {torchaudio.__version__}, one thread, {args.rounds} rounds")
    print(f"{len(paths)} files, {seconds:.0f} s of audio; largest error {ours:.3f}, of torchaudio {theirs:.3f}")
    print(f"{'':<36}{'times real time':>16}{'times faster than torchaudio (quartiles)':>42}")
    base = times[TORCHAUDIO][1:]
    for name, (_, *values) in times.items():
        low, ratio, high = quartiles([b / value for b, value in zip(base, values, strict=True)])
        print(f"{name:<36}{seconds / median(values):>16.0f}{f'{ratio:.2f} ({low:.2f} to {high:.2f})':>42}")


if __name__ == "__main__":
    run(main)
