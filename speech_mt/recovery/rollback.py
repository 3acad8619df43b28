"""After a spike of the loss: back to the last checkpoint, on with the data that follow, at a smaller rate.

PaLM (Chowdhery et al. 2022, section 5.1) went back some hundred updates and left out the batches around a spike. Here
the run goes back to ``checkpoint_last.pt`` and the data do not: the batches since are left out.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fairseq.logging import metrics
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

from speech_mt.errors import InputError

logger = logging.getLogger(__name__)
MOST_ROLLBACKS = 10  # of a training: after that, something else is wrong


def install() -> None:
    """Let fairseq's trainer scale the learning rate by its criterion's ``lr_scale``."""
    from fairseq.trainer import Trainer

    if Trainer.lr_step_update.__module__ == __name__:
        return
    stock = Trainer.lr_step_update

    def lr_step_update(self: Trainer) -> float:
        rate = stock(self)
        scale = getattr(self.get_criterion(), "lr_scale", 1.0)
        if scale == 1.0 or _keeps_its_rate(self):
            return rate
        scaled = getattr(self, "_scaled_rates", {})
        for i, group in enumerate(self.optimizer.param_groups):
            if group["lr"] != scaled.get(i):  # the scheduler has just set it
                scaled[i] = group["lr"] = group["lr"] * scale
        self._scaled_rates = scaled
        metrics.log_scalar("lr", self.get_lr(), weight=0, priority=300)
        return self.get_lr()

    Trainer.lr_step_update = lr_step_update


def roll_back(cfg: Any, trainer: Any, update: int) -> None:
    """Go back; all ranks call it at the same update.

    Raises:
        InputError: it has been done too often.
    """
    criterion = trainer.get_criterion()
    path = Path(cfg.checkpoint.save_dir, "checkpoint_last.pt")
    if not path.exists():
        logger.warning(f"update {update}: the loss spiked, and there is no {path} to go back to")
        return
    if criterion.rollbacks == MOST_ROLLBACKS:
        raise InputError(
            f"--rollback-on-spike: update {update}: the loss spiked again after {MOST_ROLLBACKS} rollbacks; the last "
            f"good checkpoint is {path}"
        )
    rollbacks, scale = criterion.rollbacks + 1, criterion.lr_scale * criterion.rollback_on_spike
    skipped = criterion.nonfinite.skipped
    trainer.load_checkpoint(str(path), reset_meters=True)
    criterion.rollbacks, criterion.lr_scale, criterion.nonfinite.skipped = rollbacks, scale, skipped
    if _keeps_its_rate(trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] *= criterion.rollback_on_spike
    trainer._scaled_rates = {}
    trainer.lr_step_update()
    logger.warning(
        f"update {update}: the loss spiked: back to {path}, update {trainer.get_num_updates()}, on with the data that "
        f"follow, learning rate times {scale:g} (rollback {rollbacks})"
    )


def _keeps_its_rate(trainer: Any) -> bool:
    """Whether the scheduler changes the optimizer's rate now and then, and does not set it at every update."""
    scheduler = trainer.lr_scheduler
    return isinstance(scheduler, ReduceLROnPlateauLRSchedule) and scheduler.warmup_end
