"""Speech manifests: a tab-separated table per split, an utterance a row.

The header names the columns: ``id audio duration text speaker`` and any others. ``audio`` is relative to the
manifest's folder unless absolute; ``duration`` is in seconds. ``features``, ``offset`` and ``frames``, if
there, point into a file of cached features (:mod:`speech_mt.data.feature_cache`).

Nothing is quoted or escaped, so what is written is what is read: ``say "hi"``, ``null`` and ``NA`` are text
like any other. The price is that a field cannot hold a tab or a line break.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError

REQUIRED_COLUMNS = ("id", "audio", "duration", "text", "speaker")
_FORBIDDEN = {"\t": "a tab", "\n": "a line break", "\r": "a carriage return", "\0": "a NUL"}


class Manifest:
    """A split's table, kept as the bytes of the file and the place of each field in them.

    That is about the size of the file in memory, with no Python object per field, and forked data-loader
    workers share it. Rows count from 0; row ``i`` is line ``i + 2`` of the file.

    Attributes:
        path: where the table came from, for messages and for relative audio paths.
        columns: names in the header, in order.
        duration: seconds, float64 of shape (rows,).
    """

    def __init__(self, path: Path, content: bytes) -> None:
        """Parse ``content``, the bytes of a manifest file. A byte-order mark and CRLF line ends are accepted.

        Raises:
            InputError: naming file and line, if the text is not UTF-8, holds a NUL or a lone carriage return,
                lacks a required column or any row, or has a row of another width than the header, a missing
                or repeated id or a duration that is not a number of seconds.
        """
        self.path = Path(path)
        header, _, self._body = self._checked_text(content).partition(b"\n")
        self.columns = tuple(header.decode().split("\t"))
        self._check_header()
        self._starts, self._ends = self._find_fields()
        self._check_ids()
        self.duration = self.numbers("duration")

    def __len__(self) -> int:
        return len(self._ends)

    def field(self, row: int, column: str) -> str:
        """Text of one field, exactly as written."""
        k = self.columns.index(column)
        return self._body[self._starts[row, k] : self._ends[row, k]].decode()

    def row(self, row: int) -> dict[str, str]:
        """All fields of a row by column name."""
        return {column: self.field(row, column) for column in self.columns}

    def column(self, column: str) -> list[str]:
        """The fields of one column."""
        k = self.columns.index(column)
        places = zip(self._starts[:, k].tolist(), self._ends[:, k].tolist(), strict=True)
        return [self._body[i:j].decode() for i, j in places]

    def numbers(self, column: str) -> np.ndarray:
        """One column as float64 of shape (rows,); :class:`InputError` if a field is not a finite number >=
        0."""
        values = np.array([_number(field) for field in self.column(column)])
        if not (valid := np.isfinite(values) & (values >= 0)).all():
            row = int(np.argmin(valid))
            raise InputError(
                f"{self.where(row)}: {column} is {self.field(row, column)!r}, expected a number not below 0"
            )
        return values

    def audio_path(self, row: int) -> Path:
        """The utterance's audio file."""
        return self.path.parent / self.field(row, "audio")

    def where(self, row: int) -> str:
        """The utterance's place, for messages."""
        return f"{self.path} line {row + 2}, utterance {self.field(row, 'id')!r}"

    def _checked_text(self, content: bytes) -> bytes:
        content = content.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")
        try:
            content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            byte = content[error.start]
            raise InputError(
                f"{self.path} line {line} is not UTF-8 (byte 0x{byte:02X}); convert the file to UTF-8"
            ) from None
        for character in "\r\0":
            if (place := content.find(character.encode())) >= 0:
                line = content.count(b"\n", 0, place) + 1
                raise InputError(f"{self.path} line {line} holds {_FORBIDDEN[character]}; remove it")
        return content

    def _check_header(self) -> None:
        missing = [column for column in REQUIRED_COLUMNS if column not in self.columns]
        if missing:
            raise InputError(
                f"{self.path} line 1: no column {', '.join(missing)}; expected a tab-separated header with "
                f"{', '.join(REQUIRED_COLUMNS)}, found {', '.join(self.columns)!r}"
            )
        for column, count in Counter(self.columns).items():
            if count > 1:
                raise InputError(f"{self.path} line 1: column {column!r} appears {count} times")

    def _find_fields(self) -> tuple[np.ndarray, np.ndarray]:
        """First and past-the-end byte of every field, int64 of shape (rows, columns)."""
        if not self._body:
            raise InputError(f"{self.path} has a header and no utterance")
        if not self._body.endswith(b"\n"):
            self._body += b"\n"
        body = np.frombuffer(self._body, dtype=np.uint8)
        separators = np.flatnonzero((body == ord("\t")) | (body == ord("\n")))
        fields_per_line = np.diff(np.flatnonzero(body[separators] == ord("\n")), prepend=-1)
        wrong = np.flatnonzero(fields_per_line != len(self.columns))
        if len(wrong):
            raise InputError(
                f"{self.path} line {wrong[0] + 2} has {fields_per_line[wrong[0]]} fields, the header has "
                f"{len(self.columns)}; fields are separated by one tab and cannot hold one"
            )
        starts = np.concatenate([[0], separators[:-1] + 1])
        return starts.reshape(-1, len(self.columns)), separators.reshape(-1, len(self.columns))

    def _check_ids(self) -> None:
        first_row: dict[str, int] = {}
        for row, identifier in enumerate(self.column("id")):
            if not identifier:
                raise InputError(f"{self.path} line {row + 2} has no id")
            if first_row.setdefault(identifier, row) != row:
                raise InputError(
                    f"{self.path} line {row + 2}: id {identifier!r} is already that of line "
                    f"{first_row[identifier] + 2}; ids must be unique"
                )


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest file; see :class:`Manifest` for what raises :class:`InputError`."""
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}: no such manifest; it is a table with columns {', '.join(REQUIRED_COLUMNS)}"
        )
    return Manifest(path, path.read_bytes())


def write_manifest(path: str | Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write ``rows`` atomically; each maps the same columns, the required ones among them, to text or
    numbers.

    Raises:
        InputError: naming file and row, for a row with other columns than the first, a field that holds a
            tab, line break, carriage return or NUL, or anything :class:`Manifest` refuses to read.
    """
    with atomic_path(Path(path)) as temporary:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(_lines(path, rows))
        Manifest(Path(path), temporary.read_bytes())  # refuses now what reading would refuse later


def manifest_bytes(path: str | Path, rows: Iterable[Mapping[str, object]]) -> bytes:
    """The content of a manifest file with these rows; ``path`` only names it in messages."""
    return "".join(_lines(path, rows)).encode()


def _lines(path: str | Path, rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    columns: tuple[str, ...] = ()
    for line, row in enumerate(rows, start=2):
        if not columns:
            columns = tuple(row)
            yield "\t".join(columns) + "\n"
        if tuple(row) != columns:
            raise InputError(
                f"{path} line {line}: columns {tuple(row)} differ from those of line 2, {columns}"
            )
        fields = [str(value) for value in row.values()]
        for column, field in zip(columns, fields, strict=True):
            for character, name in _FORBIDDEN.items():
                if character in field:
                    raise InputError(
                        f"{path} line {line}, utterance {row.get('id')!r}: {column} holds {name}; "
                        f"replace it by a space, a field cannot hold one: {field!r}"
                    )
        yield "\t".join(fields) + "\n"


def _number(field: str) -> float:
    try:
        return float(field)
    except ValueError:
        return float("nan")
