"""Write a checkpoint whole or not at all."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(state: Mapping[str, Any], path: str | os.PathLike[str], attempts: int = 3) -> None:
    """Write ``state`` to ``path``; until all of it is on the disk, the file that was there stays.

    What may pass (a network drive) is tried again after a pause; a full disk is not.

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
            Path(temporary).unlink(missing_ok=True)
            cause = error if isinstance(error, OSError) else error.__context__  # torch.save wraps it up
            if not isinstance(cause, OSError):
                raise
            if cause.errno in FULL or attempt == attempts:
                raise OSError(cause.errno, cause.strerror, str(path)) from error
        time.sleep(2.5)
