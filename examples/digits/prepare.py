"""Manifests, letters and features of two small sets of real speech: spoken digits (FSDD) and spelled words (AN4).

    OUT/fsdd/train.tsv   takes 5 to 49 of each speaker and digit, 2,700 clips: the official training set
    OUT/fsdd/test.tsv    takes 0 to 4, 300 clips: the official test set
    OUT/fsdd/tuning.tsv, valid.tsv   the training set in two, takes 10 to 49 and 5 to 9, to choose options by
    OUT/an4/train.tsv, test.tsv      60 and 10 utterances of letters, numbers and commands

Each folder also gets dict.txt, the letters of its training transcripts, and features/: 80 log-mel filterbanks of the
audio at 16 kHz (FSDD is recorded at 8 kHz). A second run does nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from speech_mt.data.feature_cache import extract_features
from speech_mt.data.features import FeatureConfig
from speech_mt.data.manifest import write_manifest
from speech_mt.data.stage import run_stage
from speech_mt.data.vocabulary import WORD_BOUNDARY, character_counts, write_dictionary
from speech_mt.errors import InputError, run

Row = Mapping[str, str]
SAMPLE_RATE = 16000
TEST_TAKES, VALID_TAKES = range(5), range(5, 10)


# corpus -> the ids that its clips have
IDS = {"fsdd": re.compile(r"\d_\w+_\d+"), "an4": re.compile(r"[^-]+-[^-]+-.+")}


def take(row: Row) -> int:
    """Of a clip of FSDD, whose id is digit_speaker_take."""
    return int(row["id"].rsplit("_", 1)[1])


# corpus -> its folder of audio, samples a second, and split -> which rows of its manifest
CORPORA: dict[str, tuple[str, int, dict[str, Callable[[Row], bool]]]] = {
    "fsdd": (
        "recordings",
        8000,
        {
            "train": lambda row: take(row) not in TEST_TAKES,
            "test": lambda row: take(row) in TEST_TAKES,
            "tuning": lambda row: take(row) not in (*TEST_TAKES, *VALID_TAKES),
            "valid": lambda row: take(row) in VALID_TAKES,
        },
    ),
    "an4": (
        "audio",
        16000,
        {"train": lambda row: row["split"] == "train", "test": lambda row: row["split"] == "valid"},
    ),
}


def write_manifests(corpus: str, source: Path, folder: Path) -> str:
    """The splits' manifests and the dictionary of the training transcripts.

    Raises:
        InputError: the corpus is not there, or its table is not what it should be.
    """
    audio, rate, splits = CORPORA[corpus]
    table = source / "manifest.tsv"
    if not table.is_file():
        raise InputError(f"{table}: no such file; SPEECH_MT_DATA or --data names the folder that holds fsdd and an4")
    rows = read_rows(corpus, table)
    (folder / ".features.completed").unlink(missing_ok=True)  # the new manifests do not point to them
    counts = []
    for split, belongs in splits.items():
        chosen = [row for row in rows if belongs(row)]
        if not chosen:
            raise InputError(f"{table}: of its {len(rows)} utterances none is for {split}: take the whole corpus")
        write_manifest(
            folder / f"{split}.tsv",
            [
                {
                    "id": row["id"],
                    "audio": (source / audio / f"{row['id']}.flac").absolute(),
                    "duration": int(row["n_samples"]) / rate,
                    "text": row["text"],
                    "speaker": row.get("speaker") or re.split("[-_]", row["id"])[1],
                }
                for row in chosen
            ],
        )
        counts.append(f"{len(chosen)} {split}")
        if split == "train":
            letters = character_counts(row["text"] for row in chosen)
            letters.setdefault(WORD_BOUNDARY, 0)  # single words have none
            write_dictionary(folder / "dict.txt", letters)
    return ", ".join(counts)


def read_rows(corpus: str, table: Path) -> list[Row]:
    """The rows of a corpus's table.

    Raises:
        InputError: a column is missing; an id or a number of samples is malformed, and in which line.
    """
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        missing = {"id", "text", "split", "n_samples"} - set(reader.fieldnames or ())
        rows = list(reader)
    if missing:
        raise InputError(f"{table}: no column {', '.join(sorted(missing))}: it is not the table of {corpus}")
    for number, row in enumerate(rows, start=2):
        if not IDS[corpus].fullmatch(row["id"]):
            shape = "digit_speaker_take" if corpus == "fsdd" else "utterance-speaker-letter"
            raise InputError(f"{table} line {number}: the id {row['id']!r} is not {shape}: mend or remove the line")
        if not re.fullmatch("[1-9][0-9]*", row["n_samples"]):
            raise InputError(
                f"{table} line {number}: n_samples is {row['n_samples']!r}, not a whole number: mend or remove the line"
            )
    return rows


def cache_features(corpus: str, folder: Path) -> str:
    """The filterbanks of every split."""
    config = FeatureConfig(SAMPLE_RATE, resample=CORPORA[corpus][1] != SAMPLE_RATE)
    for split in CORPORA[corpus][2]:
        extract_features(folder / f"{split}.tsv", config=config, workers=len(os.sched_getaffinity(0)))
    return f"{config.num_mel_bins} bins at {SAMPLE_RATE} Hz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--data", type=Path, default=os.environ.get("SPEECH_MT_DATA"), help="default: $SPEECH_MT_DATA")
    parser.add_argument("--corpora", nargs="+", choices=list(CORPORA), default=list(CORPORA))
    args = parser.parse_args()
    if args.data is None:
        raise InputError("set SPEECH_MT_DATA, or give --data: the folder that holds fsdd and an4")
    for corpus in args.corpora:
        folder, source = args.out / corpus, args.data / corpus
        settings = {"source": str(source.absolute())}
        manifests = [folder / f"{split}.tsv" for split in CORPORA[corpus][2]]
        write, cache = partial(write_manifests, corpus, source, folder), partial(cache_features, corpus, folder)
        run_stage(folder, "manifests", settings, write, outputs=[*manifests, folder / "dict.txt"])
        run_stage(folder, "features", settings, cache, outputs=[folder / "features"])


if __name__ == "__main__":
    run(main)
