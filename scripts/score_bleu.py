"""BLEU and chrF of translations, with their signatures.

    python scripts/score_bleu.py generate-test.txt
    python scripts/score_bleu.py system.de --ref newstest2014.de --compound-split --by-length

Files are plain text (a sentence a line) or the output of fairseq-generate. Without --ref, the T- lines of the
fairseq-generate output are the reference.
"""

from __future__ import annotations

import argparse
import json

from speech_mt.errors import run
from speech_mt.scoring.bleu import score_bleu
from speech_mt.scoring.hypotheses import read_parallel
from speech_mt.scoring.normalization import POST_PROCESS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hypotheses", metavar="HYP", help="translations to score")
    parser.add_argument("--ref", nargs="+", metavar="REF", default=[], help="references, one file each")
    parser.add_argument(
        "--post-process", choices=POST_PROCESS, help="remove these subword marks from texts that have them"
    )
    parser.add_argument(
        "--tokenized",
        action="store_true",
        help="the text is tokenised already: split on spaces only (tok:none)",
    )
    parser.add_argument(
        "--compound-split",
        action="store_true",
        help="also the tokenised BLEU of WMT en-de papers (get_ende_bleu.sh)",
    )
    parser.add_argument("--by-length", action="store_true", help="also BLEU by length of the reference")
    parser.add_argument("--paired", metavar="OTHER_HYP", help="paired bootstrap of HYP against this baseline")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()

    text = read_parallel(args.hypotheses, args.ref, args.post_process)
    baseline = None
    if args.paired:
        baseline = read_parallel(args.paired, args.ref or [args.hypotheses], args.post_process)
    report = score_bleu(
        text,
        compound_split=args.compound_split,
        tokenized=args.tokenized,
        by_length=args.by_length,
        baseline=baseline,
    )
    print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if args.json else report)


if __name__ == "__main__":
    run(main)
