"""Word and character error rate of transcripts, over the whole corpus.

    python scripts/score_wer.py generate-test-clean.txt --worst 10
    python scripts/score_wer.py generate-test-clean.txt --ref test-clean.tsv --lowercase

Files are plain text (an utterance a line), the output of fairseq-generate, LibriSpeech *.trans.txt or a
tab-separated manifest with columns id and text. Without --ref, the T- lines of the fairseq-generate output
are the reference.
"""

from __future__ import annotations

import argparse
import json

from speech_mt.errors import run
from speech_mt.scoring.hypotheses import read_parallel
from speech_mt.scoring.normalization import POST_PROCESS, Normalization
from speech_mt.scoring.wer import score_wer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hypotheses", metavar="HYP", help="transcripts to score")
    parser.add_argument("--ref", metavar="REF", help="reference transcripts")
    parser.add_argument(
        "--post-process", choices=POST_PROCESS, help="remove these subword marks from texts that have them"
    )
    parser.add_argument("--lowercase", action="store_true", help="lower-case both sides")
    parser.add_argument(
        "--remove-punctuation", action="store_true", help="on both sides; apostrophes are kept"
    )
    parser.add_argument(
        "--worst", type=int, default=0, metavar="N", help="show the N utterances with most errors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if args.worst < 0:
        parser.error(f"--worst {args.worst}: give a number of utterances")

    text = read_parallel(args.hypotheses, [args.ref] if args.ref else [], args.post_process)
    normalization = Normalization(lowercase=args.lowercase, remove_punctuation=args.remove_punctuation)
    report = score_wer(text, normalization, args.worst)
    print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if args.json else report)


if __name__ == "__main__":
    run(main)
