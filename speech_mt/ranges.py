"""Numbers that an option may have; what lies outside is refused by the option's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speech_mt.errors import InputError


class Range(NamedTuple):
    """An interval of finite numbers: least <= x <= most, or with ``open``, least < x and x < most."""

    least: float
    most: float = math.inf
    open: tuple[bool, bool] = (False, False)

    def __contains__(self, value: object) -> bool:
        above = value > self.least if self.open[0] else value >= self.least
        below = value < self.most if self.open[1] else value <= self.most
        return bool(above and below and math.isfinite(value))

    def __str__(self) -> str:
        if self.least == -math.inf:
            return "finite"
        below = "" if self.most == math.inf else f" and {'below' if self.open[1] else 'at most'} {self.most:g}"
        return f"{'above' if self.open[0] else 'at least'} {self.least:g}{below}"


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open=(True, False))
FINITE = Range(-math.inf)
PROBABILITY = Range(0, 1, open=(False, True))  # of dropping something: never everything


def check_ranges(options: object, ranges: Mapping[str, Range]) -> None:
    """Look at the options that are set.

    Args:
        options: a config or namespace; options that it lacks, and those that are None, are not looked at.
        ranges: name of the option, with underscores -> where its value has to lie.

    Raises:
        InputError: the first that does not, that is infinite or NaN, or that is a word where a number belongs.
    """
    for name, allowed in ranges.items():
        value = getattr(options, name, None)
        if value is None or str(value).startswith("${"):  # the value of another option
            continue
        for number in _numbers(value):
            if number not in allowed:
                given = ",".join(map(str, value)) if _is_list(value) else value
                wanted = "finite" if math.isinf(number) else allowed
                raise InputError(f"--{name.replace('_', '-')} {given}: has to be {wanted}")


def _numbers(value: object) -> list[float]:
    """A number, or each of several; fairseq leaves some options as they were typed until later."""
    words = value if _is_list(value) else str(value).strip("[()]").split(",")
    try:
        return [float(word) for word in words]
    except ValueError:
        return [math.nan]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
