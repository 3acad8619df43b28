"""Models, criterions and ways to train that do not go together are refused at the start."""

from __future__ import annotations

from typing import Any, NoReturn

from speech_mt.compat.programs import train_module
from speech_mt.errors import InputError


def criterion_is_unchecked() -> bool:
    from fairseq.trainer import Trainer

    return Trainer.__init__.__module__ == Trainer.__module__


def check_criterion_first() -> None:
    from fairseq.trainer import Trainer

    stock = Trainer.__init__

    def __init__(self: Trainer, cfg: Any, task: Any, model: Any, criterion: Any, *args: Any, **kwargs: Any) -> None:
        from speech_mt.models.combination import check_criterion  # our models, which import fairseq

        check_criterion(model, criterion)
        stock(self, cfg, task, model, criterion, *args, **kwargs)

    Trainer.__init__ = __init__


def ensemble_is_unchecked() -> bool:
    from fairseq import checkpoint_utils

    return not hasattr(checkpoint_utils.load_model_ensemble_and_task, "checks_ensemble")


def check_ensemble_first() -> None:
    from fairseq import checkpoint_utils

    stock = checkpoint_utils.load_model_ensemble_and_task

    def load_model_ensemble_and_task(filenames: list[str], *args: Any, **kwargs: Any) -> Any:
        from speech_mt.models.combination import check_ensemble

        models, *rest = stock(filenames, *args, **kwargs)
        check_ensemble(models, filenames)
        return models, *rest

    load_model_ensemble_and_task.checks_ensemble = True
    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task


def sharding_asks_for_fairscale() -> bool:
    train = train_module()
    return train is not None and train.fsdp_enable_wrap.__module__ != __name__


def refuse_sharding() -> None:
    def fsdp_enable_wrap(cfg: Any) -> NoReturn:
        raise InputError(
            "--ddp-backend fully_sharded is not supported: fairseq's needs fairscale, whose last release is of 2022, "
            "and sigma(W) needs whole matrices; the default backend keeps a copy of the model on each process"
        )

    train_module().fsdp_enable_wrap = fsdp_enable_wrap
