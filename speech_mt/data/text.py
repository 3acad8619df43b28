"""The one-pass check of a parallel text, before anything is learned from it.

Line k of the source must stay the translation of line k of the target. That holds only if every tool agrees
on what ends a line: text-mode readers also break at a lone carriage return, ``str.splitlines`` at eight more
characters. Here a line ends at ``b"\\n"`` and nowhere else, and what others could take for an end is replaced
or refused, so that alignment survives whatever reads the text next.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError


@dataclass
class SideReport:
    """What was met in one file of a parallel text. All fields but ``path`` count lines."""

    path: str
    lines: int = 0
    empty: int = 0  # nothing printable but spaces
    crlf: int = 0  # ended by CR LF, read as if by LF
    byte_order_marks: int = 0  # a leading U+FEFF, removed
    inner_line_breaks: int = 0  # U+2028, U+2029, NEL, VT, FF and U+001C to U+001E, each replaced by a space


@dataclass
class ParallelReport:
    """What was met in a parallel text, and what became of its pairs.

    Each dropped or flagged pair is counted once, under the first reason that applies: empty, too long, ratio.
    ``duplicates`` are kept pairs beyond the first of their kind.
    """

    source: SideReport
    target: SideReport
    pairs: int = 0
    kept: int = 0
    empty: int = 0
    too_long: int = 0
    bad_ratio: int = 0
    duplicates: int = 0
    dropping: bool = False
    pair_hashes: array = field(default_factory=lambda: array("q"), repr=False)
    source_hashes: array = field(default_factory=lambda: array("q"), repr=False)

    def counts(self) -> dict:
        """Every count, as JSON can hold it."""
        hidden = ("pair_hashes", "source_hashes")
        return {key: value for key, value in asdict(self).items() if key not in hidden}

    def summary(self) -> str:
        """One line: the kept pairs and every count that is not zero."""
        fate = "dropped" if self.dropping else "kept"
        notes = {
            f"with an empty side ({fate})": self.empty,
            f"too long ({fate})": self.too_long,
            f"of unlike length ({fate})": self.bad_ratio,
            "duplicates (kept)": self.duplicates,
        }
        for side in (self.source, self.target):
            name = Path(side.path).name
            notes[f"CRLF lines in {name}"] = side.crlf
            notes[f"byte order marks in {name} (removed)"] = side.byte_order_marks
            notes[f"lines with an inner line break in {name} (now a space)"] = side.inner_line_breaks
        found = [f"{count:,} {what}" for what, count in notes.items() if count]
        return f"{self.kept:,} of {self.pairs:,} pairs" + (f": {', '.join(found)}" if found else "")


def read_lines(path: Path, report: SideReport) -> Iterator[str]:
    """Yield the cleaned lines of a UTF-8 file one by one, counting into ``report``; a line ends at LF only.

    Raises:
        InputError: bytes that are not UTF-8, a NUL, or a carriage return that is not part of CR LF; it names
            the file, the line and the byte.
    """
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            report.lines = number
            if raw.startswith(codecs.BOM_UTF8):
                report.byte_order_marks += 1
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.endswith(b"\r\n"):
                report.crlf += 1
                raw = raw.removesuffix(b"\r\n")
            raw = raw.removesuffix(b"\n")
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} line {number} is not UTF-8 (byte 0x{raw[error.start]:02X}, "
                    f"{error.start + 1} bytes into the line): convert the file, for example with "
                    "iconv -f LATIN1 -t UTF-8"
                ) from None
            for character, name in (("\0", "a NUL"), ("\r", "a carriage return without a line feed")):
                if character in line:
                    raise InputError(
                        f"{path} line {number} holds {name} (byte 0x{ord(character):02X}, "
                        f"{raw.index(character.encode()) + 1} bytes into the line): delete or replace it"
                    )
            unbroken = " ".join(line.splitlines())
            report.inner_line_breaks += unbroken != line
            report.empty += is_empty(unbroken)
            yield unbroken


def count_lines(path: Path) -> int:
    """Lines of a file; only LF ends one, and the last may lack it.

    Raises:
        InputError: the file is empty.
    """
    count, block = 0, b""
    with open(path, "rb") as file:
        while more := file.read(1 << 24):
            block = more
            count += block.count(b"\n")
    if not block:
        raise InputError(f"{path} is empty")
    return count + (not block.endswith(b"\n"))


def is_empty(line: str) -> bool:
    """Whether nothing is left of ``line`` without spaces, control and format characters (as U+200B)."""
    return not any(character.isprintable() and character != " " for character in line)


def check_parallel(
    source_path: Path,
    target_path: Path,
    *,
    drop: bool = False,
    max_length: int | None = None,
    max_length_ratio: float | None = None,
    write_to: tuple[Path, Path] | None = None,
) -> ParallelReport:
    """Check a parallel text in one pass, and optionally write it out cleaned.

    Memory is two 8-byte hashes a pair, kept to count duplicates here and overlaps later.

    Args:
        source_path, target_path: UTF-8 files; line k of one is the translation of line k of the other.
        drop: leave out the pairs found wanting (training data). Otherwise all are kept and only counted,
            since a held-out set must stay aligned with its references line by line.
        max_length: the most characters either side may have (not every language parts its words).
        max_length_ratio: the most times one side may be longer than the other, in characters.
        write_to: where the kept pairs go, source and target; they appear only if the whole text is sound.

    Raises:
        InputError: see :func:`read_lines`; also unequal numbers of lines, or no pair to keep.
    """
    report = ParallelReport(SideReport(str(source_path)), SideReport(str(target_path)), dropping=drop)
    sides = read_lines(source_path, report.source), read_lines(target_path, report.target)
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(
                open(stack.enter_context(atomic_path(path)), "w", encoding="utf-8", newline="\n")
            )
            for path in write_to or ()
        ]
        for source, target in zip_longest(*sides):
            if source is None or target is None:
                continue  # unequal: read on, so that the message can give both counts
            report.pairs += 1
            empty = is_empty(source) or is_empty(target)
            shorter, longer = sorted((len(source), len(target)))
            too_long = max_length is not None and longer > max_length
            bad_ratio = max_length_ratio is not None and longer > max_length_ratio * shorter
            if empty:
                report.empty += 1
            elif too_long:
                report.too_long += 1
            elif bad_ratio:
                report.bad_ratio += 1
            if drop and (empty or too_long or bad_ratio):
                continue
            report.kept += 1
            if not empty:
                report.source_hashes.append(hash(source))
                report.pair_hashes.append(hash((source, target)))
            for file, line in zip(outputs, (source, target), strict=False):
                file.write(line + "\n")
        if report.source.lines != report.target.lines:
            raise InputError(
                f"{source_path} has {report.source.lines:,} lines but {target_path} has "
                f"{report.target.lines:,}: line k of both must be translations of each other"
            )
        if not report.kept:
            raise InputError(f"{source_path} and {target_path} hold no usable pair: {report.summary()}")
    report.duplicates = len(report.pair_hashes) - len(np.unique(report.pair_hashes))
    return report


def overlap(held_out: ParallelReport, train: ParallelReport) -> dict[str, int]:
    """How many held-out ``pairs``, and how many held-out ``sources``, also occur in the training data."""
    return {
        "pairs": int(np.isin(held_out.pair_hashes, train.pair_hashes).sum()),
        "sources": int(np.isin(held_out.source_hashes, train.source_hashes).sum()),
    }
