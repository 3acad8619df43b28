"""Make dict.txt, and for sentencepiece spm.model, from the transcripts of the training manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from speech_mt.arguments import integer
from speech_mt.data.manifest import read_manifest
from speech_mt.data.vocabulary import MIN_PIECES, build_vocabulary
from speech_mt.errors import run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("manifest", type=Path, help="such as data/train.tsv; the files are written beside it")
    parser.add_argument("--vocab-type", choices=("char", "sentencepiece"), default="char")
    parser.add_argument("--lowercase", action="store_true", help="lower-case the transcripts first")
    parser.add_argument(
        "--size", type=integer(MIN_PIECES), default=1000, help="number of pieces (sentencepiece)"
    )
    parser.add_argument(
        "--model-type", choices=("unigram", "bpe"), default="unigram", help="of sentencepiece"
    )
    args = parser.parse_args()

    texts = read_manifest(args.manifest).column("text")
    if args.lowercase:
        texts = [text.lower() for text in texts]
    folder = args.manifest.parent
    symbols = build_vocabulary(
        lambda: texts, folder, vocab_type=args.vocab_type, size=args.size, model_type=args.model_type
    )
    print(f"{folder / 'dict.txt'}: {symbols} symbols")


if __name__ == "__main__":
    run(main)
