"""What the monitor asks of fairseq's training loop: a checkpoint, an end, or to go back.

fairseq calls ``validate_and_save`` after every update with all that this takes; a criterion sees none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from fairseq.distributed.utils import is_master

from speech_mt.compat.programs import train_module
from speech_mt.diagnostics.tensorboard import log_now
from speech_mt.errors import InputError
from speech_mt.recovery.rollback import roll_back

ON_COLLAPSE = ("warn", "stop", "checkpoint")
Loop = Callable[..., Any]


def install() -> None:
    """Let fairseq-train ask the criterion after every update; without effect in other programs."""
    train = train_module()
    if train is not None and not hasattr(train.validate_and_save, "acts_on_trouble"):
        train.validate_and_save = acting_on_trouble(train.validate_and_save)


def acting_on_trouble(loop: Loop) -> Loop:
    """fairseq's ``validate_and_save``, which first does what the criterion's options say about new trouble.

    Collapses are saved or end the run with ``--on-collapse``; batches that are not finite end it when
    ``--skip-nonfinite`` is spent; a spike of the loss sends it back with ``--rollback-on-spike``.

    Raises:
        InputError: for an end; a checkpoint from which training can go on is written before.
    """

    @wraps(loop)
    def validate_and_save(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *rest: Any) -> Any:  # noqa: ANN401
        criterion = trainer.get_criterion()
        update = trainer.get_num_updates()
        nonfinite = getattr(criterion, "nonfinite", None)
        if nonfinite is not None and nonfinite.stop:
            path = _save(cfg, trainer, epoch_itr, f"checkpoint_nonfinite_{update}.pt")
            raise InputError(f"{nonfinite.stop}; --restore-file {path} goes on after this batch")
        if collapses := getattr(criterion, "collapses", []):
            criterion.collapses = []
            path = _save(cfg, trainer, epoch_itr, f"checkpoint_collapse_{update}.pt")
            if criterion.on_collapse == "stop":
                if cfg.common.tensorboard_logdir and is_master(cfg.distributed_training):
                    log_now(cfg.common.tensorboard_logdir, update)
                raise InputError(f"--on-collapse stop: {collapses[0]}; --restore-file {path} goes on from here")
        if getattr(criterion, "spiked", False):
            criterion.spiked = False
            roll_back(cfg, trainer, update)
        return loop(cfg, trainer, task, epoch_itr, *rest)

    validate_and_save.acts_on_trouble = True
    return validate_and_save


def _save(cfg: Any, trainer: Any, epoch_itr: Any, name: str) -> Path:  # noqa: ANN401
    path = Path(cfg.checkpoint.save_dir, name)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(path, {"train_iterator": epoch_itr.state_dict(), "val_loss": None})
    return path
