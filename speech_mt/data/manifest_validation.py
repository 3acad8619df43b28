"""Every fault of a manifest and of what it points to.

:class:`~speech_mt.data.manifest.Manifest` refuses a file at its first fault, as training should; here a line with
a fault is noted and the next one is read. Audio is decoded in full; of all this, memory holds a few rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from speech_mt.data.feature_cache import cached_log_mel, has_cache
from speech_mt.data.manifest import REQUIRED_COLUMNS, read_manifest
from speech_mt.data.parallel_map import parallel_map
from speech_mt.data.transcripts import CharacterTokenizer, SentencePieceTokenizer, Tokenizer
from speech_mt.data.validation import (
    DuplicateIds,
    Fault,
    TargetLimits,
    Utterance,
    check_audio,
    check_targets,
    check_transcript,
    decode_line,
)
from speech_mt.data.vocabulary import read_dictionary
from speech_mt.errors import InputError

_ROWS_AT_ONCE = 16
_DURATION_TOLERANCE_S = 0.1  # as reading features has it


@dataclass(frozen=True)
class ManifestChecks:
    """What the data is checked against.

    Attributes:
        tokenizer: of the vocabulary; None: targets are not measured, and characters need only print.
        limits: of lengths.
        resample: whether audio of another rate is no fault.
        num_mel_bins: of cached features.
        workers: processes that decode audio.
    """

    tokenizer: Tokenizer | None
    limits: TargetLimits
    resample: bool = False
    num_mel_bins: int = 80
    workers: int = 1


def check_manifest(path: Path, checks: ManifestChecks, ids: DuplicateIds) -> Iterator[list[Fault]]:
    """Yield the faults of a few rows at a time, in order; at the end those of cached features.

    Args:
        path: the manifest.
        checks: see :class:`ManifestChecks`.
        ids: those of other manifests; this one's are added.
    """
    check = partial(_check_audio, sample_rate=checks.limits.sample_rate, resample=checks.resample)
    for entries, audio_faults in parallel_map(check, _chunks(path), checks.workers):
        utterances = [entry for entry in entries if isinstance(entry, Utterance)]
        faults = [entry for entry in entries if isinstance(entry, Fault)]
        faults += ids.check(utterances)
        faults += audio_faults
        for utterance in utterances:
            faults += check_transcript(utterance, checks.tokenizer.unknown(utterance.text) if checks.tokenizer else ())
        if checks.tokenizer:
            faults += check_targets(utterances, checks.tokenizer, checks.limits)
        yield faults
    yield list(_check_cache(path, checks))


def load_tokenizer(folder: Path, vocab_type: str, lowercase: bool = False) -> Tokenizer:
    """The tokenizer of a data folder; :class:`InputError` if its ``dict.txt`` or ``spm.model`` cannot be used."""
    indices = read_dictionary(folder / "dict.txt")
    if vocab_type == "char":
        return CharacterTokenizer(indices, lowercase)
    if not (folder / "spm.model").is_file():
        raise InputError(f"{folder / 'spm.model'}: no such file; make it by scripts/build_vocabulary.py")
    return SentencePieceTokenizer(folder / "spm.model", indices, lowercase)


def _chunks(path: Path) -> Iterator[list[Utterance | Fault]]:
    entries = _read_rows(path)
    while chunk := list(islice(entries, _ROWS_AT_ONCE)):
        yield chunk


def _read_rows(path: Path) -> Iterator[Utterance | Fault]:
    """The rows of a manifest, or what is wrong with their lines."""
    with open(path, "rb") as file:
        try:
            columns = decode_line(next(file, b"")).split("\t")
        except ValueError as error:
            yield Fault("not a manifest", str(path), f"{path} line 1 {error}")
            return
        if missing := [column for column in REQUIRED_COLUMNS if column not in columns]:
            message = f"{path} line 1: no column {', '.join(missing)}, found {columns}"
            yield Fault("not a manifest", str(path), message)
            return
        line = 1
        for line, raw in enumerate(file, start=2):
            place = f"{path} line {line}"
            try:
                fields = decode_line(raw).split("\t")
                if len(fields) != len(columns):
                    raise ValueError(f"has {len(fields)} fields, the header has {len(columns)}")
                row = dict(zip(columns, fields, strict=True))
                if not row["id"]:
                    raise ValueError("has no id")
                yield Utterance(
                    row["id"],
                    path.parent / row["audio"],
                    row["text"],
                    f"{place}, utterance {row['id']!r}",
                    _seconds(row["duration"]),
                )
            except ValueError as error:
                yield Fault("faulty row", place, f"{place} {error}")
        if line == 1:
            yield Fault("not a manifest", str(path), f"{path}: has a header and no utterance")


def _seconds(field: str) -> float:
    seconds = float(field)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"has the duration {field!r}, expected seconds above 0")
    return seconds


def _check_audio(
    entries: list[Utterance | Fault], sample_rate: int, resample: bool
) -> tuple[list[Utterance | Fault], list[Fault]]:
    """Decode the audio of some rows, in a worker process; returns the rows too."""
    faults: list[Fault] = []
    for entry in entries:
        if isinstance(entry, Fault):
            continue
        seconds, found = check_audio(entry.id, entry.audio, sample_rate, resample)
        if not found and abs(seconds - entry.duration) > _DURATION_TOLERANCE_S:
            message = f"duration is {entry.duration:g} s, but {entry.audio} lasts {seconds:g} s"
            found.append(Fault("duration", entry.id, f"{entry.where}: {message}; correct it, or the file if cut short"))
        faults += found
    return entries, faults


def _check_cache(path: Path, checks: ManifestChecks) -> Iterator[Fault]:
    """Faults of the cached features, if there are any; of a faulty manifest they are not looked at."""
    try:
        manifest = read_manifest(path)
    except InputError:
        return  # each of its faults has been found
    if not has_cache(manifest):
        return
    for row in range(len(manifest)):
        identifier = manifest.field(row, "id")
        try:
            features = cached_log_mel(manifest, row, checks.num_mel_bins, checks.limits.sample_rate)
        except InputError as error:
            yield Fault("cached features", identifier, str(error))
        else:
            if not np.isfinite(features.numpy()).all():
                yield Fault("cached features", identifier, f"{manifest.where(row)}: its cached features are not finite")
