"""The table of a study: a row a run, its setting and its result, two frozen dataclasses of int, float and str."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError

Trial = TypeVar("Trial")
Result = TypeVar("Result")
_CONVERT = {"int": int, "float": float, "str": str}


def read_table(path: Path, trial: type[Trial], result: type[Result]) -> dict[Trial, Result]:
    """The rows; none where there is no file.

    Raises:
        InputError: the file is not one of this study; names its line.
    """
    if not path.exists():
        return {}
    rows: dict[Trial, Result] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in (reader := csv.DictReader(file)):
            try:
                rows[_parse(trial, row)] = _parse(result, row)
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(
                    f"{path}, line {reader.line_num}: not a row of this study ({error}); move the file away"
                ) from None
    return rows


def write_table(path: Path, rows: Mapping[Trial, Result], trial: type[Trial], result: type[Result]) -> None:
    """Write the rows, all or none; floats with 5 digits."""
    columns = [field.name for kind in (trial, result) for field in fields(kind)]
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_format(asdict(setting) | asdict(outcome)) for setting, outcome in rows.items())


def _parse(kind: type, row: Mapping[str, str]):  # noqa: ANN202
    return kind(**{field.name: _CONVERT[field.type](row[field.name]) for field in fields(kind)})


def _format(row: Mapping[str, object]) -> dict[str, object]:
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
