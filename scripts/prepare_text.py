r"""Turn a parallel text into fairseq data: check it, learn a joint vocabulary, encode, binarise.

    prepare_text.py --source-lang de --target-lang en --trainpref corpus/train --validpref corpus/valid \
        --testpref corpus/test --destdir data --vocab-size 8000

reads corpus/train.de, corpus/train.en and so on, and makes data/bin for fairseq-train. An interrupted run
goes on where it was. Decode with `fairseq-generate data/bin --post-process sentencepiece`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from speech_mt.arguments import integer, non_negative_int, number, positive_int
from speech_mt.data.parallel_corpus import LengthLimits, ParallelCorpus, Vocabulary, prepare_parallel_corpus
from speech_mt.data.vocabulary import MIN_CHARACTER_COVERAGE, MIN_PIECES
from speech_mt.errors import InputError, run


def parse_args() -> argparse.Namespace:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source-lang", required=True, help="suffix of the source files, such as de")
    parser.add_argument("--target-lang", required=True, help="suffix of the target files, such as en")
    for split in ("train", "valid", "test"):
        parser.add_argument(
            f"--{split}pref",
            required=split != "test",
            help=f"path of the {split} files without the suffix"
            + (", or several with commas between: test, test1, test2, ... for --gen-subset" * (split == "test")),
        )
    parser.add_argument("--destdir", required=True, type=Path, help="folder to make")
    vocabulary = parser.add_argument_group("vocabulary (sentencepiece, from the training text only)")
    vocabulary.add_argument(
        "--vocab-size", required=True, type=integer(MIN_PIECES), help="exact number of pieces"
    )
    vocabulary.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe")
    vocabulary.add_argument(
        "--character-coverage",
        type=number(MIN_CHARACTER_COVERAGE, 1),
        default=1.0,
        help="share of the running text to spell without <unk>: 0.9995 if noisy, or Chinese or Japanese",
    )
    vocabulary.add_argument(
        "--byte-fallback", action="store_true", help="spell the other characters as bytes"
    )
    vocabulary.add_argument(
        "--max-lines", type=non_negative_int, default=0, help="learn from a sample of so many lines; 0: all"
    )
    limits = parser.add_argument_group("limits (train: pairs beyond are dropped; valid, test: counted)")
    limits.add_argument("--max-length", type=positive_int, help="in characters, either side")
    limits.add_argument(
        "--max-length-ratio", type=number(1), help="longer side over shorter side, in characters"
    )
    parser.add_argument(
        "--workers", type=positive_int, default=len(os.sched_getaffinity(0)), help="default: every core"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.source_lang == args.target_lang:
        raise InputError(
            f"--source-lang and --target-lang are both {args.source_lang}: their files would be the same"
        )
    prefixes = {"train": args.trainpref, "valid": args.validpref}
    for i, prefix in enumerate(args.testpref.split(",") if args.testpref else ()):
        prefixes[f"test{i or ''}"] = prefix
    prepare_parallel_corpus(
        ParallelCorpus(args.source_lang, args.target_lang, prefixes),
        args.destdir,
        Vocabulary(
            args.vocab_size, args.model_type, args.character_coverage, args.byte_fallback, args.max_lines
        ),
        LengthLimits(args.max_length, args.max_length_ratio),
        args.workers,
    )


if __name__ == "__main__":
    run(main)
