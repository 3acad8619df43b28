"""Word and character error rate of transcripts, over the whole corpus.

    python scripts/score_wer.py generate-test-clean.txt --worst 10
    python scripts/score_wer.py generate-test-clean.txt --ref test-clean.tsv --lowercase
    python scripts/score_wer.py --set dev=generate-dev.txt --set test=transcripts.tsv:test.tsv

Files are plain text (an utterance a line), the output of fairseq-generate, LibriSpeech *.trans.txt or a
tab-separated manifest with columns id and text. Without --ref, the T- lines of the fairseq-generate output
are the reference.
"""

from __future__ import annotations

import argparse
import json

from speech_mt.errors import InputError, run
from speech_mt.scoring.hypotheses import read_parallel
from speech_mt.scoring.normalization import POST_PROCESS, Normalization
from speech_mt.scoring.wer import WerReport, results_table, score_wer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hypotheses", metavar="HYP", nargs="?", help="transcripts to score")
    parser.add_argument("--ref", metavar="REF", help="reference transcripts")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=HYP[:REF]",
        help="instead of HYP: a row of one table; once for each set",
    )
    parser.add_argument(
        "--post-process", choices=POST_PROCESS, help="remove these subword marks from texts that have them"
    )
    parser.add_argument("--lowercase", action="store_true", help="lower-case both sides")
    parser.add_argument("--remove-punctuation", action="store_true", help="on both sides; apostrophes are kept")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="show the N utterances with most errors")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if args.worst < 0:
        parser.error(f"--worst {args.worst}: give a number of utterances")

    if bool(args.hypotheses) == bool(args.set):
        parser.error("give one file HYP, or sets by --set NAME=HYP")
    if args.set and (args.ref or args.worst):
        parser.error("--ref and --worst belong to one file HYP; for --set write NAME=HYP:REF")

    normalization = Normalization(lowercase=args.lowercase, remove_punctuation=args.remove_punctuation)

    def score(hypotheses: str, reference: str | None) -> WerReport:
        text = read_parallel(hypotheses, [reference] if reference else [], args.post_process)
        return score_wer(text, normalization, args.worst)

    if args.set:
        reports = {name: score(*files) for name, files in named_sets(args.set).items()}
        as_dict = {name: report.as_dict() for name, report in reports.items()}
        print(json.dumps(as_dict, indent=2, ensure_ascii=False) if args.json else results_table(reports))
    else:
        report = score(args.hypotheses, args.ref)
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if args.json else report)


def named_sets(sets: list[str]) -> dict[str, tuple[str, str | None]]:
    """Name -> hypotheses and, if given, references, in their order."""
    named: dict[str, tuple[str, str | None]] = {}
    for entry in sets:
        name, _, files = entry.partition("=")
        hypotheses, _, reference = files.partition(":")
        if not name or not hypotheses:
            raise InputError(f"--set {entry}: write NAME=HYP or NAME=HYP:REF")
        if name in named:
            raise InputError(f"--set {entry}: there is a set {name} already; give each its own name")
        named[name] = hypotheses, reference or None
    return named


if __name__ == "__main__":
    run(main)
