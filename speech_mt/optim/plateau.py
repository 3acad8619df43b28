"""``--lr-scheduler plateau``: linear warm-up, then a smaller learning rate whenever validation stops improving.

What counts is ``--best-checkpoint-metric`` (``wer``) of the first validation subset, at every validation, also those of
``--validate-interval-updates``. fairseq's ``reduce_lr_on_plateau`` looks at the ends of epochs only, and forgets its
patience when a training is resumed.
"""

# fairseq reads the types of options when it runs: no "from __future__ import annotations" here.

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, List  # noqa: UP035 (what fairseq can read)

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from speech_mt.compat.programs import train_module
from speech_mt.errors import InputError
from speech_mt.ranges import NOT_NEGATIVE, Range, check_ranges

RANGES = {
    "lr_shrink": Range(0, 1, open=(True, False)),
    **dict.fromkeys(("warmup_updates", "warmup_init_lr", "lr_patience", "lr_threshold"), NOT_NEGATIVE),
}
logger = logging.getLogger(__name__)


@dataclass
class PlateauConfig(FairseqDataclass):
    """Options of the schedule."""

    warmup_updates: int = field(default=0, metadata={"help": "updates of linear warm-up; no plateau is seen before"})
    warmup_init_lr: float = field(default=0.0, metadata={"help": "learning rate at update 0, if there is a warm-up"})
    lr_shrink: float = field(default=0.5, metadata={"help": "factor of the learning rate at a plateau"})
    lr_patience: int = field(default=2, metadata={"help": "validations in a row without improvement that are endured"})
    lr_threshold: float = field(
        default=0.0, metadata={"help": "an improvement is one by more than this, in units of the metric"}
    )
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_lr_scheduler("plateau", dataclass=PlateauConfig)
class PlateauSchedule(FairseqLRScheduler):
    """lr(n) = warm-up(n) * lr * shrink^(plateaus so far).

    Raises:
        InputError: a shrink factor outside (0, 1], a negative patience, threshold or warm-up, or several --lr.
    """

    def __init__(self, cfg: PlateauConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if len(cfg.lr) > 1:
            raise InputError(f"--lr-scheduler plateau takes one --lr, not {len(cfg.lr)}")
        check_ranges(cfg, RANGES)
        self.plateaus = 0
        self.bad_validations = 0  # in a row
        self.num_updates = 0
        self.seen_at = -1  # update of the last validation that was seen
        tell_schedule_of_validations()
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        """Set and return the learning rate after so many updates."""
        self.num_updates = num_updates
        lr, warmup = self.cfg.lr[0], self.cfg.warmup_updates
        if num_updates < warmup:
            lr = self.cfg.warmup_init_lr + (lr - self.cfg.warmup_init_lr) * num_updates / warmup
        self.optimizer.set_lr(lr * self.cfg.lr_shrink**self.plateaus)
        return self.optimizer.get_lr()

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """At the end of an epoch; the validation there has been seen already if fairseq-train is what runs."""
        if val_loss is not None:
            self.validated(val_loss)
        return self.optimizer.get_lr()

    def validated(self, metric: float) -> None:
        """Take note of a validation, once an update and after the warm-up."""
        if self.num_updates < self.cfg.warmup_updates or self.num_updates == self.seen_at:
            return
        self.seen_at = self.num_updates
        if self._improves(metric):
            self.best, self.bad_validations = metric, 0
            return
        self.bad_validations += 1
        if self.bad_validations > self.cfg.lr_patience:
            self.plateaus, self.bad_validations = self.plateaus + 1, 0
            before, after = self.optimizer.get_lr(), self.step_update(self.num_updates)
            logger.info(f"plateau {self.plateaus}: best {self.best}, now {metric}; lr {before:g} -> {after:g}")

    def _improves(self, metric: float) -> bool:
        if math.isnan(metric) or self.best is None:
            return not math.isnan(metric)
        gain = metric - self.best if self.cfg.maximize_best_checkpoint_metric else self.best - metric
        return gain > self.cfg.lr_threshold

    def state_dict(self) -> dict:
        """All that later learning rates depend on."""
        return {name: getattr(self, name) for name in ("best", "plateaus", "bad_validations", "seen_at")}

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on where a checkpoint was; what another schedule saved is only its best."""
        for name, value in state_dict.items():
            if name in self.state_dict():
                setattr(self, name, value)


def tell_schedule_of_validations() -> None:
    """Let fairseq-train tell the schedule of every validation, before the checkpoint is written."""
    train = train_module()
    if train is not None and not hasattr(train.validate, "tells_schedule"):
        train.validate = telling(train.validate)


def telling(validate: Callable[..., list[float | None]]) -> Callable[..., list[float | None]]:
    """fairseq's ``validate``, which then tells the learning-rate schedule."""

    @wraps(validate)
    def validate_and_tell(cfg: Any, trainer: Any, *rest: Any) -> list[float | None]:  # noqa: ANN401
        metrics = validate(cfg, trainer, *rest)
        if isinstance(trainer.lr_scheduler, PlateauSchedule) and metrics and metrics[0] is not None:
            trainer.lr_scheduler.validated(float(metrics[0]))
        return metrics

    validate_and_tell.tells_schedule = True
    return validate_and_tell
