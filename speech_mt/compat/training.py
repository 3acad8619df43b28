"""Where fairseq-train begins and ends: not beyond its last update, and not by a metric that is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from speech_mt.compat.programs import train_module
from speech_mt.errors import InputError

logger = logging.getLogger(__name__)
NOT_METRICS = {"num_updates", "wps", "wpb", "bsz"}


def trains_beyond_the_end() -> bool:
    module = train_module()
    return module is not None and not hasattr(module.train, "ends_in_time")


def end_in_time() -> None:
    module = train_module()
    module.train = ending_in_time(module.train)


def ending_in_time(train: Callable[..., Any]) -> Callable[..., Any]:
    """fairseq's ``train``, one epoch, which looks at ``--max-update`` after an update, never before the first."""

    @wraps(train)
    def train_unless_done(cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        done, most = trainer.get_num_updates(), cfg.optimization.max_update
        if most and done >= most:
            logger.info(f"nothing to train: {done} updates are done, of --max-update {most}")
            return [None], True
        return train(cfg, trainer, *args, **kwargs)

    train_unless_done.ends_in_time = True
    return train_unless_done


def unknown_metric_is_fatal() -> bool:
    module = train_module()
    return module is not None and not hasattr(module.validate, "saves_first")


def save_before_refusing_a_metric() -> None:
    module = train_module()
    measured: dict[str, Any] = {}
    module.get_valid_stats = remembering(module.get_valid_stats, measured)
    module.validate = saving_first(module.validate, measured)


def remembering(get_valid_stats: Callable[..., Any], measured: dict[str, Any]) -> Callable[..., Any]:
    """fairseq's ``get_valid_stats``, whose statistics ``measured`` holds as well."""

    @wraps(get_valid_stats)
    def valid_stats(cfg: Any, trainer: Any, stats: dict[str, Any], *args: Any) -> Any:
        measured.update(stats)
        return get_valid_stats(cfg, trainer, stats, *args)

    return valid_stats


def saving_first(validate: Callable[..., Any], measured: dict[str, Any]) -> Callable[..., Any]:
    """fairseq's ``validate``, which looks ``--best-checkpoint-metric`` up after all that must not be lost.

    Raises:
        InputError: it is not among what was ``measured``; a checkpoint is written before.
    """

    @wraps(validate)
    def validate_or_save(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *args: Any) -> Any:
        from fairseq import checkpoint_utils

        try:
            return validate(cfg, trainer, task, epoch_itr, *args)
        except KeyError as error:
            metric = cfg.checkpoint.best_checkpoint_metric
            if error.args != (metric,) or metric in measured:
                raise
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
        saved = "" if cfg.checkpoint.no_save else f"; {trainer.get_num_updates()} updates are saved, go on from there"
        found = ", ".join(name for name in measured if "/" not in name and name not in NOT_METRICS)
        raise InputError(f"--best-checkpoint-metric {metric} is not measured in validation, but {found} are{saved}")

    validate_or_save.saves_first = True
    return validate_or_save
