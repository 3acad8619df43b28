"""From LibriSpeech to manifests, a vocabulary and, if asked for, cached features, for the task speech_manifest.

    OUT/train.tsv                     all subsets whose name begins with train, as one split
    OUT/dev-clean.tsv, ...            every other subset, as a split of its name
    OUT/train.dropped.jsonl, ...      what was left out of the split, and why
    OUT/summary.json                  utterances, hours, speakers and faults of each split
    OUT/dict.txt, OUT/spm.model       the vocabulary, from the transcripts of train only
    OUT/features/                     with --features: filterbanks that data loaders map into memory

An interrupted run goes on where it was. A speaker whose files have changed is looked at again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from speech_mt.arguments import integer, positive_int
from speech_mt.data import librispeech
from speech_mt.data.feature_cache import extract_features
from speech_mt.data.features import MIN_MEL_BINS, FeatureConfig
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.data.parallel_map import parallel_map
from speech_mt.data.stage import atomic_path, run_stage
from speech_mt.data.validation import Fault, FaultCounts, read_faults, write_faults
from speech_mt.data.vocabulary import MIN_PIECES, build_vocabulary
from speech_mt.errors import InputError, run

WORKERS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Part:
    """The checked utterances of one speaker, kept in a file.

    Attributes:
        file: JSON with the lists ``utterances`` and ``faults``.
        speaker: the speaker's folder.
        fingerprint: changes with the names, sizes and times of the speaker's files.
        chapters: names of the chapters, which begin the ids of their utterances.
    """

    file: Path
    speaker: Path
    fingerprint: str
    chapters: list[str]


def check_speaker(job: tuple[Path, Path]) -> Part:
    """Check all utterances of a speaker's folder, unless the part's file holds the result for these files."""
    speaker, file = job
    listing = hashlib.sha256()
    for path in sorted(path for path in speaker.rglob("*") if path.is_file()):
        listing.update(f"{path.relative_to(speaker)} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    chapters = sorted(f"{speaker.name}-{path.name}" for path in speaker.iterdir() if path.is_dir())
    part = Part(file, speaker, f"{speaker.absolute()} {listing.hexdigest()}", chapters)
    if fingerprint_of(file) != part.fingerprint:
        utterances, faults = librispeech.read_speaker(speaker)
        found = {
            "fingerprint": part.fingerprint,
            "utterances": [asdict(utterance) | {"audio": str(utterance.audio)} for utterance in utterances],
            "faults": [asdict(fault) for fault in faults],
        }
        with atomic_path(file) as temporary:
            temporary.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    return part


def check_split(root: Path, subsets: list[str], folder: Path, workers: int) -> list[Part]:
    """Check every speaker of some subsets, several at a time, in order."""
    jobs = [
        (speaker, folder / subset / f"{speaker.name}.json")
        for subset in subsets
        for speaker in librispeech.speakers(root, subset)
    ]
    parts = parallel_map(check_speaker, jobs, workers)
    return list(tqdm(parts, total=len(jobs), desc=", ".join(subsets), unit=" speakers", mininterval=1))


def repeated_chapters(parts: list[Part], owners: dict[str, Path]) -> dict[str, str]:
    """Chapters that another speaker's folder has already, and that folder; ``owners`` is added to."""
    return {
        chapter: str(owners[chapter])
        for part in parts
        for chapter in part.chapters
        if owners.setdefault(chapter, part.speaker) != part.speaker
    }


def fingerprint_of(file: Path) -> str | None:
    """Of the files that a part was made from; None without a whole part."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["fingerprint"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def split_rows(parts: list[Part], repeated: dict[str, str], out: Path) -> Iterator[dict[str, object]]:
    """The rows of a split's manifest; audio that lies in ``out`` is named relative to it, so both can move."""
    for part in parts:
        for utterance in json.loads(part.file.read_text(encoding="utf-8"))["utterances"]:
            if utterance["id"].rpartition("-")[0] not in repeated:
                audio = Path(utterance["audio"]).absolute()
                yield {
                    "id": utterance["id"],
                    "audio": audio.relative_to(out.absolute()) if audio.is_relative_to(out.absolute()) else audio,
                    "duration": utterance["duration"],
                    "text": utterance["text"],
                    "speaker": part.speaker.name,
                }


def split_faults(parts: list[Part], repeated: dict[str, str]) -> Iterator[Fault]:
    """All that is wrong with a split."""
    for part in parts:
        found = json.loads(part.file.read_text(encoding="utf-8"))
        yield from (Fault(**fault) for fault in found["faults"])
        for utterance in found["utterances"]:
            if owner := repeated.get(utterance["id"].rpartition("-")[0]):
                message = f"{utterance['where']}: {owner} has this chapter already; keep one"
                yield Fault("duplicate id", utterance["id"], message)


def write_split(split: str, parts: list[Part], repeated: dict[str, str], out: Path) -> str:
    """Write a split's manifest, the list of what it leaves out, and its entry of the summary.

    Raises:
        InputError: nothing sound is left.
    """
    dropped = out / f"{split}.dropped.jsonl"
    write_faults(dropped, split_faults(parts, repeated))
    faults = FaultCounts(read_faults(dropped))
    rows = split_rows(parts, repeated, out)
    if (first := next(rows, None)) is None:
        raise InputError(f"{split}: no utterance without a fault; see {dropped}")
    (out / f".features-{split}.completed").unlink(missing_ok=True)  # the new manifest does not point to them
    write_manifest(out / f"{split}.tsv", chain([first], rows))
    manifest = read_manifest(out / f"{split}.tsv")
    entry = {
        "utterances": len(manifest),
        "hours": round(float(manifest.duration.sum()) / 3600, 4),
        "speakers": len(set(manifest.column("speaker"))),
        "shortest": float(manifest.duration.min()),
        "longest": float(manifest.duration.max()),
        "dropped": len(faults.subjects),
        "faults": dict(faults.kinds.most_common()),
    }
    summary = read_summary(out) | {split: entry}
    with atomic_path(out / "summary.json") as temporary:
        temporary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return f"{entry['utterances']:,} utterances, {entry['dropped']:,} dropped"


def read_summary(out: Path) -> dict[str, dict]:
    """What :func:`write_split` wrote of all splits.

    Raises:
        InputError: it is damaged.
    """
    path = out / "summary.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        raise InputError(f"{path} is damaged: delete {out}, and prepare again") from None


def print_summary(out: Path, splits: Iterable[str]) -> None:
    """A table of the splits, and how many of what was left out."""
    summary = read_summary(out)
    print(f"\n{'split':<12}{'utterances':>12}{'hours':>9}{'speakers':>10}{'seconds':>15}{'dropped':>9}")
    for split in splits:
        entry = summary[split]
        seconds = f"{entry['shortest']:.2f} to {entry['longest']:.2f}"
        print(
            f"{split:<12}{entry['utterances']:>12,}{entry['hours']:>9.2f}{entry['speakers']:>10,}"
            f"{seconds:>15}{entry['dropped']:>9,}"
        )
    for split in splits:
        if faults := summary[split]["faults"]:
            found = ", ".join(f"{count} {kind}" for kind, count in faults.items())
            print(f"{split}: left out for {found}; see {out / f'{split}.dropped.jsonl'}")


def train_texts(out: Path) -> Iterator[str]:
    """The transcripts of the training manifest."""
    manifest = read_manifest(out / "train.tsv")
    return (manifest.field(row, "text") for row in range(len(manifest)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder LibriSpeech")
    parser.add_argument(
        "--subsets", nargs="+", required=True, metavar="SUBSET", help="such as train-clean-100 dev-clean"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--download", action="store_true", help="fetch subsets that are not there from OpenSLR")
    parser.add_argument(
        "--address", default=librispeech.ADDRESS, help="of OpenSLR's resource 12 or a mirror; default: %(default)s"
    )
    parser.add_argument("--workers", type=positive_int, default=WORKERS, help="processes; default: every core")
    vocabulary = parser.add_argument_group("vocabulary")
    vocabulary.add_argument("--vocab-type", choices=("char", "sentencepiece"), default="char")
    vocabulary.add_argument("--vocab-size", type=integer(MIN_PIECES), default=1000, help="sentencepiece's pieces")
    vocabulary.add_argument("--model-type", choices=("unigram", "bpe"), default="unigram", help="of sentencepiece")
    features = parser.add_argument_group("features")
    features.add_argument("--features", action="store_true", help="cache filterbanks instead of reading audio")
    features.add_argument("--num-mel-bins", type=integer(MIN_MEL_BINS), default=FeatureConfig.num_mel_bins)
    features.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    config = FeatureConfig(librispeech.SAMPLE_RATE, num_mel_bins=args.num_mel_bins)
    out: Path = args.out
    splits: dict[str, list[str]] = {}
    for subset in dict.fromkeys(args.subsets):
        splits.setdefault("train" if subset.startswith("train") else subset, []).append(subset)
    if args.download:
        for subset in args.subsets:
            librispeech.download_subset(args.root, subset, args.address)
    owners: dict[str, Path] = {}
    inputs: dict[str, dict[str, str]] = {}
    for split, subsets in splits.items():
        parts = check_split(args.root, subsets, out / "parts", args.workers)
        repeated = repeated_chapters(parts, owners)
        listing = repr([part.fingerprint for part in parts] + sorted(repeated.items()))
        inputs[split] = {"corpus": hashlib.sha256(listing.encode()).hexdigest()[:16]}
        run_stage(
            out,
            f"manifest-{split}",
            {"subsets": subsets},
            partial(write_split, split, parts, repeated, out),
            inputs[split],
            [out / f"{split}.tsv"],
        )
    if "train" in splits:
        vocabulary = {"vocab_type": args.vocab_type}
        if args.vocab_type == "sentencepiece":
            vocabulary |= {"size": args.vocab_size, "model_type": args.model_type}
        run_stage(
            out,
            "vocabulary",
            vocabulary,
            lambda: f"{build_vocabulary(lambda: train_texts(out), out, **vocabulary, force=True)} symbols",
            inputs["train"],
            [out / "dict.txt", *([out / "spm.model"] if args.vocab_type == "sentencepiece" else [])],
        )
    elif not (out / "dict.txt").exists():
        print(f"no subset to train on, so no {out / 'dict.txt'}: copy that of the training data")
    if args.features:
        for split in splits:
            run_stage(
                out,
                f"features-{split}",
                {"num_mel_bins": args.num_mel_bins, "dtype": args.dtype},
                partial(cache_features, out / f"{split}.tsv", config, args.dtype, args.workers),
                inputs[split],
                [out / "features"],
            )
    print_summary(out, splits)


def cache_features(manifest: Path, config: FeatureConfig, dtype: str, workers: int) -> str:
    """Cache a split's features; return what is said of it."""
    folder = extract_features(manifest, None, config, dtype, workers)
    return f"in {folder.relative_to(manifest.parent)}"


if __name__ == "__main__":
    run(main)
