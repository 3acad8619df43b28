"""Compute the log-mel filterbanks of manifests once, so that training reads features instead of audio.

Adds the columns features, offset and frames to each manifest; training then uses them. Run again, it does
only what is not done yet.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from speech_mt.arguments import integer, positive_int
from speech_mt.data.feature_cache import extract_features
from speech_mt.data.features import MIN_MEL_BINS, MIN_SAMPLE_RATE, FeatureConfig
from speech_mt.errors import run


def main() -> None:
    defaults = FeatureConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("manifests", nargs="+", type=Path, metavar="MANIFEST", help="such as data/train.tsv")
    parser.add_argument(
        "--out", type=Path, help="folder for the features; None: features/ beside the manifest"
    )
    parser.add_argument(
        "--sample-rate", type=integer(MIN_SAMPLE_RATE), default=defaults.sample_rate, help="of the audio, Hz"
    )
    parser.add_argument("--resample", action="store_true", help="convert audio of another rate")
    parser.add_argument("--num-mel-bins", type=integer(MIN_MEL_BINS), default=defaults.num_mel_bins)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument(
        "--workers", type=positive_int, default=len(os.sched_getaffinity(0)), help="processes"
    )
    args = parser.parse_args()

    config = FeatureConfig(args.sample_rate, args.resample, args.num_mel_bins)
    for manifest in args.manifests:
        folder = extract_features(manifest, args.out, config, args.dtype, args.workers)
        print(f"{manifest}: features in {folder}")


if __name__ == "__main__":
    run(main)
