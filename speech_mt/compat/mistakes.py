"""A user's mistake ends in one line, a bug in a traceback; with ``SPEECH_MT_TRACEBACK=1`` both do."""

from __future__ import annotations

import os
import re
import sys
import traceback
import types

MISTAKES = {
    "InputError",
    "MismatchError",
    "FileNotFoundError",
    "FileExistsError",
    "IsADirectoryError",
    "NotADirectoryError",
    "PermissionError",
    "OSError",
}


def summary(error: BaseException) -> str | None:
    """The one line that a user's mistake deserves; None for anything else.

    A mistake is an :class:`~speech_mt.errors.InputError`, an operating-system error, or an assertion or bare
    ``Exception`` of fairseq's that has a message. What a DataLoader worker or a spawned process raised is the
    text of a traceback within another exception: so it is the text of the last traceback that is read.
    """
    text = "".join(traceback.format_exception(error))
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    first = next((i for i, line in enumerate(lines) if line and not line[0].isspace()), len(lines))
    frames, raised = "\n".join(lines[:first]), " ".join(lines[first:])
    kind, _, message = raised.partition(": ")
    kind = kind.rpartition(".")[2]
    message = " ".join(message.split())
    if os_error := re.fullmatch(r"\[Errno \d+\] (.*?): '(.*)'", message):
        message = f"{os_error[2]}: {os_error[1]}"
    if kind in MISTAKES and message:
        return message
    files = re.findall(r'^  File "(.+?)", line', frames, re.MULTILINE)
    by_fairseq = bool(files) and re.search(r"(^|/)fairseq(_cli)?/(?!.*speech_mt/)", files[-1]) is not None
    if kind in ("AssertionError", "Exception") and message and by_fairseq and error.__context__ is None:
        return message
    return None


def excepthook(kind: type[BaseException], error: BaseException, tb: types.TracebackType | None) -> None:
    """``sys.excepthook``: Python exits with code 1 after it."""
    line = "interrupted" if kind is KeyboardInterrupt else summary(error)
    if line is None or os.environ.get("SPEECH_MT_TRACEBACK", "") not in ("", "0"):
        sys.__excepthook__(kind, error, tb)
    else:
        sys.stdout.flush()
        print(line if kind is KeyboardInterrupt else f"error: {line}", file=sys.stderr)


def hook_is_missing() -> bool:
    return sys.excepthook is not excepthook


def install_excepthook() -> None:
    sys.excepthook = excepthook
    # in fairseq-hydra-train, hydra prints what its job raised and exits, unless told to let it through
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
