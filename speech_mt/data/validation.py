"""What can be wrong with an utterance, found before training: every fault, not the first.

Preparation and validation share these checks. A fault is not an exception: it is noted, and the work goes on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from speech_mt.data.audio import AudioError, open_audio, read_blocks
from speech_mt.data.features import FRAME_LENGTH_MS, frame_count
from speech_mt.data.stage import atomic_path
from speech_mt.data.transcripts import Tokenizer, target_sizes, too_short_for_ctc
from speech_mt.errors import InputError

_SHOWN = 20


@dataclass(frozen=True)
class Fault:
    """Why an utterance cannot be used.

    Attributes:
        kind: what is wrong in a few words, for counts.
        subject: id of the utterance, or the file if it is not one utterance's.
        message: the place and what was found there.
    """

    kind: str
    subject: str
    message: str


@dataclass(frozen=True)
class Utterance:
    """A candidate for training or decoding.

    Attributes:
        where: the line of its transcript, for messages.
        duration: seconds; 0 if unknown.
    """

    id: str
    audio: Path
    text: str
    where: str
    duration: float = 0.0


@dataclass(frozen=True)
class TargetLimits:
    """What bounds a transcript; see the options of the same names of the task ``speech_manifest``."""

    sample_rate: int = 16000
    ctc_subsampling: int = 0
    max_source_positions: int = 6000
    max_target_positions: int = 1024


def check_audio(utterance_id: str, path: Path, sample_rate: int, resample: bool = False) -> tuple[float, list[Fault]]:
    """Decode a whole file, a block at a time; return its length in seconds and all that is wrong with it.

    Args:
        utterance_id: for messages.
        path: the audio file.
        sample_rate: expected, Hz.
        resample: whether another rate is no fault.
    """
    samples, low, high = 0, np.inf, -np.inf
    faults: list[tuple[str, str]] = []
    rate = sample_rate
    try:
        with open_audio(path) as file:
            rate = file.samplerate
            if rate != sample_rate and not resample:
                faults.append(("sample rate", f"{path}: sampled at {rate} Hz, expected {sample_rate} Hz"))
            if file.channels != 1:
                faults.append(("not mono", f"{path}: {file.channels} channels, expected 1; mix them down to one"))
            for block in read_blocks(file):
                samples += len(block)
                low, high = min(low, block.min()), max(high, block.max())
    except AudioError as error:
        faults.append((error.kind, str(error)))
    else:
        if frame_count(samples, rate) == 0:
            length = 1000 * samples / rate
            window = f"one window of {FRAME_LENGTH_MS:.0f} ms"
            faults.append(("shorter than a window", f"{path}: {length:.1f} ms of audio, less than {window}"))
        if low == high:
            faults.append(("silence", f"{path}: digital silence, every one of {samples} samples is {low:g}"))
    return samples / rate, [Fault(kind, utterance_id, message) for kind, message in faults]


def check_transcript(utterance: Utterance, unknown: Collection[str]) -> list[Fault]:
    """Whether there are words, of known characters only.

    Args:
        utterance: whose text is looked at.
        unknown: what of the text the vocabulary lacks. Characters that do not print are refused in any case.
    """
    if not utterance.text.strip():
        return [Fault("empty transcript", utterance.id, f"{utterance.where}: the transcript is empty")]
    hidden = {c for c in utterance.text if c != " " and (c == "\ufffd" or not c.isprintable())}
    if odd := sorted(hidden.union(unknown)):
        return [
            Fault(
                "odd characters",
                utterance.id,
                f"{utterance.where}: holds {', '.join(map(repr, odd[:_SHOWN]))}, which the vocabulary lacks "
                f"or which does not print: {utterance.text!r}",
            )
        ]
    return []


def check_targets(utterances: list[Utterance], tokenizer: Tokenizer, limits: TargetLimits) -> Iterator[Fault]:
    """Yield the utterances whose audio or target has a length that training or decoding refuses."""
    if not utterances:
        return
    samples = np.rint([utterance.duration * limits.sample_rate for utterance in utterances])
    frames = frame_count(samples.astype(np.int64), limits.sample_rate)
    targets = target_sizes((utterance.text for utterance in utterances), tokenizer)
    short = too_short_for_ctc(frames, targets, limits.ctc_subsampling)
    for k, utterance in enumerate(utterances):
        if not utterance.duration:
            continue  # its audio has a fault already
        if short[k]:
            yield Fault(
                "too long for CTC",
                utterance.id,
                f"{utterance.where}: {targets.units[k]} target units need {targets.ctc_frames[k]} encoder frames, "
                f"{utterance.duration:g} s of audio give {frames[k] // limits.ctc_subsampling}",
            )
        if frames[k] > limits.max_source_positions:
            yield Fault(
                "audio too long",
                utterance.id,
                f"{utterance.where}: {frames[k]} frames, --max-source-positions is {limits.max_source_positions}",
            )
        if targets.units[k] >= limits.max_target_positions:
            yield Fault(
                "transcript too long",
                utterance.id,
                f"{utterance.where}: {targets.units[k] + 1} target units with the end of sentence, "
                f"--max-target-positions is {limits.max_target_positions}",
            )


def decode_line(raw: bytes) -> str:
    """A line of a text file without its line end and byte-order mark.

    Raises:
        ValueError: saying what makes it no line of text.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").removesuffix(b"\r")
    for byte, name in ((b"\0", "a NUL"), (b"\r", "a carriage return without a line feed")):
        if byte in raw:
            raise ValueError(f"holds {name}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte 0x{raw[error.start]:02X})") from None


class DuplicateIds:
    """Finds ids that were met before."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def check(self, utterances: Iterable[Utterance]) -> Iterator[Fault]:
        """Yield a fault for each utterance whose id is already that of another place."""
        for utterance in utterances:
            if (first := self._places.setdefault(utterance.id, utterance.where)) != utterance.where:
                message = f"{utterance.where}: the id is already that of {first}; ids must be unique"
                yield Fault("duplicate id", utterance.id, message)


class FaultCounts:
    """How many utterances and files have a fault, and of what kind.

    Attributes:
        subjects: ids and files with a fault.
        kinds: number of faults of each kind.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.subjects: set[str] = set()
        self.kinds: Counter[str] = Counter()
        self.add(faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """Count further faults; of one utterance with several, or found twice, there is one subject."""
        for fault in faults:
            self.subjects.add(fault.subject)
            self.kinds[fault.kind] += 1


def write_faults(path: Path, faults: Iterable[Fault]) -> None:
    """Write faults as JSON, one a line."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for fault in faults:
            file.write(json.dumps(asdict(fault), ensure_ascii=False) + "\n")


def read_faults(path: Path) -> Iterator[Fault]:
    """Read what :func:`write_faults` wrote; :class:`InputError` if it is not that."""
    try:
        with open(path, encoding="utf-8") as file:
            yield from (Fault(**json.loads(line)) for line in file)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: not a list of faults ({error}); delete it and prepare again") from None
