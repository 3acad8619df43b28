"""One training at a time writes a ``--save-dir``."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, TextIO

from speech_mt.errors import InputError

_held: dict[str, TextIO] = {}  # open, and so locked, until the process ends


def is_shared_in_silence() -> bool:
    from fairseq import checkpoint_utils

    return checkpoint_utils.load_checkpoint.__module__ == checkpoint_utils.__name__


def claim_before_training() -> None:
    """The process that saves claims the folder before it looks for a checkpoint there."""
    from fairseq import checkpoint_utils

    stock = checkpoint_utils.load_checkpoint

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        if trainer.data_parallel_rank == 0 and not cfg.no_save:
            claim(cfg.save_dir)
        return stock(cfg, trainer, **kwargs)

    checkpoint_utils.load_checkpoint = load_checkpoint


def claim(folder: str) -> None:
    """Lock ``folder`` for this process until it ends, however it ends; a second call is free.

    What a killed training was writing there is deleted.

    Raises:
        InputError: another process has it.
    """
    folder = os.path.realpath(folder)
    if folder in _held:
        return
    os.makedirs(folder, exist_ok=True)
    file = open(os.path.join(folder, ".lock"), "a+")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # lockf: the workers of a killed training do not keep it
    except (BlockingIOError, PermissionError):
        file.seek(0)
        process = file.read().strip() or "unknown"
        file.close()
        raise InputError(
            f"{folder}: another training (process {process}) saves there; wait for it or give another --save-dir"
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    _held[folder] = file
    for unfinished in Path(folder).glob("*.pt.tmp"):
        unfinished.unlink()
