"""What the monitor asks of fairseq's training loop: a checkpoint, or an end.

fairseq calls ``validate_and_save`` after every update with all that this takes; a criterion sees none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from fairseq.distributed.utils import is_master

from speech_mt.diagnostics.tensorboard import log_now
from speech_mt.errors import InputError

ON_COLLAPSE = ("warn", "stop", "checkpoint")
Loop = Callable[..., Any]


def install() -> None:
    """Let fairseq-train ask the criterion after every update; without effect in other programs."""
    for name in ("fairseq_cli.train", "__main__"):
        module = sys.modules.get(name)
        loop = getattr(module, "validate_and_save", None)
        if loop is not None and not hasattr(loop, "__wrapped__"):
            module.validate_and_save = acting_on_collapse(loop)


def acting_on_collapse(loop: Loop) -> Loop:
    """fairseq's ``validate_and_save``, which first does what ``--on-collapse`` says about new collapses.

    Raises:
        InputError: with ``stop``; a checkpoint from which training can go on is written before.
    """

    @wraps(loop)
    def validate_and_save(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *rest: Any) -> Any:  # noqa: ANN401
        criterion = trainer.get_criterion()
        collapses = getattr(criterion, "collapses", [])
        if collapses:
            criterion.collapses = []
            path = Path(cfg.checkpoint.save_dir, f"checkpoint_collapse_{trainer.get_num_updates()}.pt")
            trainer.consolidate_optimizer()
            trainer.save_checkpoint(path, {"train_iterator": epoch_itr.state_dict(), "val_loss": None})
            if criterion.on_collapse == "stop":
                if cfg.common.tensorboard_logdir and is_master(cfg.distributed_training):
                    log_now(cfg.common.tensorboard_logdir, trainer.get_num_updates())
                raise InputError(f"--on-collapse stop: {collapses[0]}; --restore-file {path} goes on from here")
        return loop(cfg, trainer, task, epoch_itr, *rest)

    return validate_and_save
