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


CONFIG_MISTAKES = {"ValidationError", "ConfigKeyError"}
"""omegaconf's: what fairseq-hydra-train's file or arguments say does not fit the options there are."""


def summary(error: BaseException) -> str | None:
    """The one line that a user's mistake deserves; None for anything else.

    A mistake is an :class:`~speech_mt.errors.InputError`, an operating-system error, or what fairseq itself raises with
    a message: an assertion, a bare ``Exception`` or a ``ValueError``; or what omegaconf says of a configuration. What a
    DataLoader worker or a spawned process raised is the text of a traceback within another exception: so it is the
    text of the last traceback that is read.
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
    if kind in CONFIG_MISTAKES and message:
        wrong, _, key = re.split(" (?:reference|object)_type=", message)[0].partition(" full_key: ")
        return f"{key}: {wrong}" if key else wrong
    files = re.findall(r'^  File "(.+?)", line', frames, re.MULTILINE)
    if kind == "KeyError" and files and files[-1].endswith("fairseq/registry.py"):
        return f"{message}: no criterion, optimizer, schedule or other choice has this _name"
    by_fairseq = bool(files) and re.search(r"(^|/)fairseq(_cli)?/(?!.*speech_mt/)", files[-1]) is not None
    raised_there = kind in ("AssertionError", "Exception") or (kind == "ValueError" and _ends_in_raise(frames))
    if raised_there and message and by_fairseq and error.__context__ is None:
        return message
    return None


def _ends_in_raise(frames: str) -> bool:
    """Whether the last line of code that a traceback shows raises the error, rather than calls what does."""
    return frames.rpartition('  File "')[2].partition("\n")[2].lstrip().startswith("raise ")


def excepthook(kind: type[BaseException], error: BaseException, tb: types.TracebackType | None) -> None:
    """``sys.excepthook``: Python exits with code 1 after it."""
    if issubclass(kind, BrokenPipeError):  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
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
