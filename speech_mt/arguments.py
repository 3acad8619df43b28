"""Types for argparse: numbers within a range. Another number gives one line that names the option."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import nan
from sys import float_info


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from ``least`` to ``most``, both included."""
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number, {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return number

    return parse


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A finite number from ``least`` to ``most``, both included."""
    wanted = f"a number of at least {least:g}" if most is None else f"a number, {least:g} to {most:g}"
    highest = float_info.max if most is None else most

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not least <= value <= highest:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


positive_int = integer(1)
non_negative_int = integer(0)
