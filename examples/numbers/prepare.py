"""Make the built-in corpus: number words for translation, and the same spoken in English for recognition.

    OUT/mt/bin                             German to English, for fairseq-train
    OUT/mt/raw/{train,valid,test}.{de,en}  the same as text
    OUT/mt/spm.model                       its 250 BPE pieces, joint
    OUT/speech/{train,valid,test}.tsv      manifests of OUT/speech/audio, which is laid out as LibriSpeech is
    OUT/speech/dict.txt                    the characters of the training transcripts

No number of a valid or test split is in the train split of its task. An interrupted run goes on where it was,
and a second run does nothing.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

from speech_mt.data.numbers import (
    SplitSizes,
    plan_spoken_numbers,
    speak_all,
    write_manifests,
    write_number_pairs,
    write_transcripts,
)
from speech_mt.data.parallel_corpus import ParallelCorpus, Vocabulary, prepare_parallel_corpus
from speech_mt.data.stage import run_stage
from speech_mt.errors import run

SEED = 1
PAIRS = SplitSizes(train=11_100, valid=300, test=600)
SPOKEN = SplitSizes(train=750, valid=50, test=200)  # 0 to 999, by two voices
SMOKE_PAIRS = SplitSizes(train=400, valid=40, test=60)
SMOKE_SPOKEN = SplitSizes(train=100, valid=10, test=20)
PIECES = 250


def prepare_translation(folder: Path, sizes: SplitSizes) -> None:
    """Write number words, then do with them what scripts/prepare_text.py does with any parallel text."""
    words = folder / "words"
    settings = {"seed": SEED, **asdict(sizes)}
    corpus = ParallelCorpus("de", "en", {split: str(words / split) for split in ("train", "valid", "test")})
    write = partial(write_number_pairs, words, ("de", "en"), sizes, SEED)
    run_stage(folder, "words", settings, write, outputs=corpus.files())
    prepare_parallel_corpus(corpus, folder, Vocabulary(PIECES), workers=len(os.sched_getaffinity(0)))


def prepare_speech(folder: Path, sizes: SplitSizes) -> None:
    """Say each number once by every voice, and write the manifests."""
    settings = {"seed": SEED, **asdict(sizes)}
    audio = folder / "audio"
    utterances = plan_spoken_numbers(sizes, SEED)
    run_stage(folder, "transcripts", settings, lambda: write_transcripts(utterances, audio))
    spoken = [utterance.path(audio) for utterance in utterances]
    run_stage(folder, "audio", settings, lambda: speak_all(utterances, audio), outputs=spoken)
    made = [folder / name for name in ("train.tsv", "valid.tsv", "test.tsv", "dict.txt")]
    run_stage(folder, "manifests", settings, lambda: write_manifests(utterances, folder), outputs=made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--only", choices=("mt", "speech"), help="make one of the two")
    parser.add_argument(
        "--smoke", action="store_true", help="a few hundred pairs and utterances, to try things out"
    )
    args = parser.parse_args()
    if args.only != "speech":
        prepare_translation(args.out / "mt", SMOKE_PAIRS if args.smoke else PAIRS)
    if args.only != "mt":
        prepare_speech(args.out / "speech", SMOKE_SPOKEN if args.smoke else SPOKEN)


if __name__ == "__main__":
    run(main)
