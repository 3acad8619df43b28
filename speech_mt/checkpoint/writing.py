"""Write a checkpoint whole or not at all."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from speech_mt.checkpoint.loading import load_checkpoint
from speech_mt.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS)


def check_output(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """See, before any work, that the result can be written to ``path`` and costs no training; make its folder.

    Raises:
        InputError: ``path`` is one of ``inputs``, no file, a checkpoint that a training can go on from, or something
            else than a checkpoint; or its folder may not be written to.
        OSError: its folder cannot be made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent}: no permission to write into this folder: choose another output")
    if not path.exists():
        return
    if not path.is_file():
        raise InputError(f"{path} is no file that can be replaced: choose another output")
    for source in inputs:
        if Path(source).exists() and path.samefile(source):
            raise InputError(f"{path} is also an input, which would be lost: choose another output")
    if path.stat().st_size == 0:
        return
    try:
        state = load_checkpoint(path)
    except InputError as error:
        raise InputError(f"{path} is not a checkpoint that may be replaced: choose another output") from error
    if state.get("last_optimizer_state"):
        raise InputError(
            f"{path} has an optimizer's state, without which a training cannot go on: choose another output"
        )


def save_checkpoint(state: Mapping[str, Any], path: str | os.PathLike[str], attempts: int = 3) -> None:
    """Write ``state`` to ``path``; until all of it is on the disk, the file that was there stays.

    What may pass (a network drive) is tried again after a pause; a full disk, or a folder that is not there or
    may not be written to, is not.

    Raises:
        OSError: with ``path`` as its file name; nothing is left behind.
    """
    _replace(path, lambda file: torch.save(state, file), attempts)


def copy_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str], attempts: int = 3) -> None:
    """Copy a checkpoint as :func:`save_checkpoint` writes one."""

    def copy(file: BinaryIO) -> None:
        with open(source, "rb") as original:
            while block := original.read(1 << 24):
                file.write(block)

    _replace(path, copy, attempts)


def _replace(path: str | os.PathLike[str], write: Callable[[BinaryIO], None], attempts: int) -> None:
    temporary = f"{path}.tmp"  # a fixed name: what a killed run leaves is overwritten by the next
    for attempt in range(1, attempts + 1):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            return
        except BaseException as error:
            with suppress(OSError):  # such as that there is no such folder
                Path(temporary).unlink()
            cause = error if isinstance(error, OSError) else error.__context__  # torch.save wraps it up
            if not isinstance(cause, OSError):
                raise
            if cause.errno in (*FULL, *NOWHERE) or attempt == attempts:
                raise OSError(cause.errno, cause.strerror, str(path)) from error
        time.sleep(2.5)
