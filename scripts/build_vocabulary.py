"""Make dict.txt, and for sentencepiece spm.model, from the transcripts of the training manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from speech_mt.arguments import integer
from speech_mt.data.manifest import read_manifest
from speech_mt.data.vocabulary import MIN_PIECES, build_vocabulary
from speech_mt.errors import InputError, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("manifest", type=Path, help="such as data/train.tsv; the files are written beside it")
    parser.add_argument("--vocab-type", choices=("char", "sentencepiece"), default="char")
    parser.add_argument("--lowercase", action="store_true", help="lower-case the transcripts first")
    parser.add_argument(
        "--size",
        type=integer(MIN_PIECES),
        default=argparse.SUPPRESS,
        help="number of pieces (sentencepiece; default: 1000)",
    )
    parser.add_argument(
        "--model-type", choices=("unigram", "bpe"), default="unigram", help="of sentencepiece"
    )
    parser.add_argument("--force", action="store_true", help="replace another vocabulary")
    args = parser.parse_args()
    if "size" in args and args.vocab_type == "char":
        raise InputError(f"--size {args.size}: characters are as many as there are; or --vocab-type sentencepiece")

    texts = read_manifest(args.manifest).column("text")
    if args.lowercase:
        texts = [text.lower() for text in texts]
    folder = args.manifest.parent
    symbols = build_vocabulary(
        lambda: texts,
        folder,
        vocab_type=args.vocab_type,
        size=getattr(args, "size", 1000),
        model_type=args.model_type,
        force=args.force,
    )
    print(f"{folder / 'dict.txt'}: {symbols} symbols")


if __name__ == "__main__":
    run(main)
