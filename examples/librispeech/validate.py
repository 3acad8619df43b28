"""Find every fault of a corpus or of prepared data before training does, and list them all.

    validate.py DATA                                                 manifests, audio, cached features, targets
    validate.py --root LibriSpeech --subsets train-clean-100         a corpus, before anything is prepared

DATA is a folder with train.tsv, ... and dict.txt, such as prepare.py makes; what that left out counts too.
Above --max-bad the exit code is 1; at or below it the faults are reported and the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from speech_mt.arguments import integer, non_negative_int, positive_int
from speech_mt.data import librispeech
from speech_mt.data.features import MIN_SAMPLE_RATE
from speech_mt.data.manifest_validation import ManifestChecks, check_manifest, load_tokenizer
from speech_mt.data.parallel_map import parallel_map
from speech_mt.data.transcripts import CharacterTokenizer
from speech_mt.data.validation import DuplicateIds, Fault, FaultCounts, TargetLimits, check_targets, read_faults
from speech_mt.data.vocabulary import UNKNOWN, WORD_BOUNDARY
from speech_mt.errors import InputError, run


def corpus_faults(root: Path, subsets: list[str], limits: TargetLimits, workers: int) -> Iterator[list[Fault]]:
    """The faults of a corpus in LibriSpeech's layout, a speaker at a time; targets are characters."""
    tokenizer = character_tokenizer()
    ids = DuplicateIds()
    folders = [folder for subset in subsets for folder in librispeech.speakers(root, subset)]
    checked = parallel_map(librispeech.read_speaker, folders, workers)
    for utterances, faults in tqdm(checked, total=len(folders), desc=str(root), unit=" speakers", mininterval=1):
        yield [*faults, *ids.check(utterances), *check_targets(utterances, tokenizer, limits)]


def character_tokenizer() -> CharacterTokenizer:
    """Of LibriSpeech's alphabet."""
    symbols = [UNKNOWN, WORD_BOUNDARY, *sorted(librispeech.ALPHABET - {" "})]
    return CharacterTokenizer({symbol: index for index, symbol in enumerate(symbols)})


def data_faults(args: argparse.Namespace, limits: TargetLimits) -> Iterator[list[Fault]]:
    """What preparation left out, and the faults of every manifest in a folder, a few rows at a time."""
    if not args.data.is_dir():
        raise InputError(f"{args.data}: no such folder; it holds train.tsv, other manifests and dict.txt")
    manifests = sorted(args.data.glob("*.tsv"), key=lambda path: (path.stem != "train", path.name))
    if not manifests:
        yield [Fault("not a manifest", str(args.data), f"{args.data}: holds no manifest (*.tsv)")]
    for dropped in sorted(args.data.glob("*.dropped.jsonl")):
        yield list(read_faults(dropped))
    try:
        tokenizer = load_tokenizer(args.data, args.vocab_type, args.lowercase)
    except InputError as error:
        yield [Fault("no vocabulary", str(args.data / "dict.txt"), str(error))]
        tokenizer = None
    checks = ManifestChecks(tokenizer, limits, args.resample, args.num_mel_bins, args.workers)
    ids = DuplicateIds()
    for manifest in manifests:
        yield from tqdm(check_manifest(manifest, checks, ids), desc=str(manifest), unit=" x 16 rows", mininterval=1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, metavar="DATA", help="prepared data")
    parser.add_argument("--root", type=Path, help="the folder LibriSpeech")
    parser.add_argument("--subsets", nargs="+", default=[], metavar="SUBSET", help="such as train-clean-100")
    parser.add_argument(
        "--max-bad",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="utterances and files with a fault to put up with; default: %(default)s",
    )
    parser.add_argument(
        "--workers", type=positive_int, default=len(os.sched_getaffinity(0)), help="processes; default: every core"
    )
    model = parser.add_argument_group("as in training (defaults of the task speech_manifest)")
    model.add_argument(
        "--ctc-subsampling", type=non_negative_int, default=0, help="find what is too long for CTC; 0: do not look"
    )
    model.add_argument("--vocab-type", choices=("char", "sentencepiece"), default="char")
    model.add_argument("--lowercase", action="store_true")
    model.add_argument("--sample-rate", type=integer(MIN_SAMPLE_RATE), default=TargetLimits.sample_rate)
    model.add_argument("--resample", action="store_true")
    model.add_argument("--num-mel-bins", type=positive_int, default=ManifestChecks.num_mel_bins)
    model.add_argument("--max-source-positions", type=positive_int, default=TargetLimits.max_source_positions)
    model.add_argument("--max-target-positions", type=positive_int, default=TargetLimits.max_target_positions)
    args = parser.parse_args()
    if args.data is None and args.root is None:
        parser.error("give DATA, or --root and --subsets, or both")
    if (args.root is None) != (not args.subsets):
        parser.error("--root and --subsets go together")
    return args


def main() -> None:
    args = parse_args()
    limits = TargetLimits(args.sample_rate, args.ctc_subsampling, args.max_source_positions, args.max_target_positions)
    sources = []
    if args.root is not None:
        sources.append(corpus_faults(args.root, args.subsets, limits, args.workers))
    if args.data is not None:
        sources.append(data_faults(args, limits))
    counts = FaultCounts()
    for faults in chain(*sources):
        for fault in faults:
            tqdm.write(f"{fault.kind}: {fault.message}")
        counts.add(faults)
    if not (bad := len(counts.subjects)):
        print("no fault found")
        return
    print(f"\n{bad:,} utterances or files with a fault:")
    for kind, count in counts.kinds.most_common():
        print(f"{count:>8,}  {kind}")
    if bad > args.max_bad:
        raise InputError(
            f"{bad:,} utterances or files have a fault, --max-bad allows {args.max_bad:,}: mend them or take them out"
        )
    print(f"at most --max-bad {args.max_bad:,}: go on")


if __name__ == "__main__":
    run(main)
