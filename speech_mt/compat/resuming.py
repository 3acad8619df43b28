"""A resumed training is the uninterrupted one, or says why it cannot be."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from speech_mt import checkpoint
from speech_mt.checkpoint.function_options import different_options, function_options
from speech_mt.compat.programs import program
from speech_mt.errors import InputError

logger = logging.getLogger(__name__)
KEY = "speech_mt"  # in a checkpoint's extra_state: what fairseq does not keep


def resuming_forgets() -> bool:
    from fairseq.trainer import Trainer

    return Trainer.state_dict.__module__ == Trainer.__module__


def resume_whole_or_not_at_all() -> None:
    """Keep what fairseq forgets, finish what a checkpoint at the end of an epoch left to do, refuse another model."""
    from fairseq.trainer import Trainer

    stock_state, stock_load = Trainer.state_dict, Trainer.load_checkpoint

    def state_dict(self: Trainer) -> dict[str, Any]:
        with _named_as_its_loss(self.get_criterion()):
            state = stock_state(self)
        state["extra_state"][KEY] = _kept(self)
        return state

    def load_checkpoint(
        self: Trainer,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any] | None:
        if Path(filename).is_file():
            state = checkpoint.load_checkpoint(filename)
            check_same_function(self.cfg.model, state, filename, refuse=not reset_optimizer)
            if not reset_optimizer:
                check_can_go_on(state, filename, self.cfg.ema.store_ema)
            del state
        elif filename == self.cfg.checkpoint.restore_file:
            raise InputError(f"--restore-file {filename}: no such checkpoint")
        with _named_as_its_loss(self.get_criterion()):
            extra = stock_load(self, filename, reset_optimizer, reset_lr_scheduler, *args, **kwargs)
        if extra is None:
            getattr(self.get_model(), "check_start", lambda: None)()
            return None
        place = extra["train_iterator"]
        ended_an_epoch = place["epoch"] > 1 and place.get("iterations_in_epoch") == 0
        if ended_an_epoch and extra.get("val_loss") is not None and not (reset_optimizer or reset_lr_scheduler):
            self.lr_step(place["epoch"] - 1, extra["val_loss"])  # fairseq saves before it takes this step
        if not reset_optimizer:
            _restore(self, extra.get(KEY) or {})
        return extra

    Trainer.state_dict, Trainer.load_checkpoint = state_dict, load_checkpoint


def check_can_go_on(state: Mapping[str, Any], filename: str, store_ema: bool) -> None:
    """Whether a checkpoint holds what a resumed training goes on with.

    Raises:
        InputError: no state of the optimizer, or no moving average though ``--store-ema`` asks for one.
    """
    if state.get("last_optimizer_state") is None:
        raise InputError(
            f"{filename}: no state of an optimizer to go on with, as in what was averaged, folded or saved by "
            "--no-save-optimizer-state; begin a new training from these weights with --finetune-from-model"
        )
    if store_ema and "ema" not in state["extra_state"]:
        raise InputError(f"{filename}: of a training without --store-ema; leave it out, or use --finetune-from-model")


def check_same_function(model_cfg: Any, state: Mapping[str, Any], filename: str, refuse: bool) -> None:
    """Compare the options of a run's model with those of the checkpoint that it starts from.

    Args:
        model_cfg: of the run.
        state: the checkpoint ``filename``.
        refuse: for one that is resumed; a new training that starts from these weights gets a warning.

    Raises:
        InputError: options that define the function of the model differ; old and new values are named.
    """
    stored = _model_cfg(state)
    if not stored:
        return
    difference = different_options(_plain(stored), _plain(model_cfg), _defaults(model_cfg))
    if not difference:
        return
    message = f"{filename}: the model of this run computes another function than the checkpoint's: {difference}"
    if refuse:
        raise InputError(
            f"{message}; use the checkpoint's options, start anew in another --save-dir, or begin a new training "
            "from these weights with --finetune-from-model"
        )
    logger.warning(message)


def _model_cfg(state: Mapping[str, Any]) -> Any:
    cfg = state.get("cfg")
    return state.get("args") if not cfg else cfg["model"]


def _plain(cfg: Any) -> Mapping[str, Any] | Namespace:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(cfg, resolve=False) if OmegaConf.is_config(cfg) else cfg


def _defaults(model_cfg: Any) -> dict[str, Any]:
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY

    name = getattr(model_cfg, "_name", None)
    dataclass = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    return {} if dataclass is None else function_options(vars(dataclass()))


# -- what fairseq does not keep ---------------------------------------------------------------------------------------


def _kept(trainer: Any) -> dict[str, Any]:
    """Plain numbers and tensors: a checkpoint loads without running code."""
    from speech_mt.modules.qk_clip import QKClip

    state: dict[str, Any] = {"early_stopping": vars(_should_stop_early()).copy()}
    criterion_state = getattr(trainer.get_criterion(), "training_state", None)
    if criterion_state is not None:
        state["criterion"] = criterion_state()
    clips = {name: clip.largest for name, clip in _named(trainer, QKClip)}
    return state | ({"qk_clip": clips} if clips else {})


def _restore(trainer: Any, state: Mapping[str, Any]) -> None:
    from speech_mt.modules.qk_clip import QKClip

    vars(_should_stop_early()).update(state.get("early_stopping", {}))
    if "criterion" in state and hasattr(trainer.get_criterion(), "load_training_state"):
        trainer.get_criterion().load_training_state(state["criterion"])
    for name, clip in _named(trainer, QKClip):
        if name in state.get("qk_clip", {}):
            clip.largest.copy_(state["qk_clip"][name])


def _should_stop_early() -> Any:
    """fairseq's function, which counts for ``--patience`` in attributes of itself."""
    return getattr(program("train", "should_stop_early"), "should_stop_early", Namespace())


def _named(trainer: Any, kind: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in trainer.get_model().named_modules() if isinstance(module, kind))


@contextmanager
def _named_as_its_loss(criterion: Any) -> Iterator[None]:
    """fairseq resumes only under a criterion of the same class name; one with a monitor has the same loss."""
    kind = type(criterion)
    own, loss = kind.__name__, getattr(kind, "loss_name", None)
    kind.__name__ = loss or own
    try:
        yield
    finally:
        kind.__name__ = own


# -- learning rate and data -------------------------------------------------------------------------------------------


def plateau_forgets() -> bool:
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule as Schedule

    return Schedule.state_dict.__module__ == Schedule.__module__


def keep_plateau_counters() -> None:
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule as Schedule

    stock_state, stock_load = Schedule.state_dict, Schedule.load_state_dict
    counters = ("num_bad_epochs", "cooldown_counter")

    def state_dict(self: Schedule) -> dict[str, Any]:
        return stock_state(self) | {name: getattr(self.lr_scheduler, name) for name in counters}

    def load_state_dict(self: Schedule, state: dict[str, Any]) -> None:
        stock_load(self, state)
        for name in counters:
            setattr(self.lr_scheduler, name, state.get(name, getattr(self.lr_scheduler, name)))

    Schedule.state_dict, Schedule.load_state_dict = state_dict, load_state_dict


def batches_depend_on_the_start() -> bool:
    from fairseq.tasks import FairseqTask

    return FairseqTask.get_batch_iterator.__module__ == FairseqTask.__module__


def make_batches_as_at_the_start() -> None:
    """A run makes its batches once, in its first epoch; a run resumed in a later epoch has to make the same ones."""
    from fairseq.tasks import FairseqTask

    stock = FairseqTask.get_batch_iterator

    def get_batch_iterator(
        self: FairseqTask,
        dataset: Any,
        *args: Any,
        seed: int = 1,
        epoch: int = 1,
        disable_iterator_cache: bool = False,
        update_epoch_batch_itr: bool = False,
        **kwargs: Any,
    ) -> Any:
        kwargs |= {
            "disable_iterator_cache": disable_iterator_cache,
            "update_epoch_batch_itr": update_epoch_batch_itr,
        }
        if disable_iterator_cache or update_epoch_batch_itr or not self.can_reuse_epoch_itr(dataset):
            iterator = stock(self, dataset, *args, seed=seed, epoch=epoch, **kwargs)
            # it is for one epoch: workers kept for the next would wait to be collected as garbage, then for time-outs
            iterator.persistent_workers = iterator.reuse_dataloader = False
            return iterator
        if getattr(self.cfg, "rebuild_batches", False):
            return stock(self, dataset, *args, seed=seed, epoch=epoch, **kwargs)
        # stock draws the order before batching from seed + epoch, and the order of batches from the iterator's seed
        iterator = stock(self, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **kwargs)
        iterator.seed = seed
        return iterator

    FairseqTask.get_batch_iterator = get_batch_iterator


def place_counts_own_batches() -> bool:
    from fairseq.data.iterators import EpochBatchIterator

    return EpochBatchIterator.state_dict.__module__ == EpochBatchIterator.__module__


def count_batches_of_all_ranks() -> None:
    """The place within an epoch is kept as each rank's own batches: another number of ranks has to convert it."""
    from fairseq.data.iterators import EpochBatchIterator

    stock_state, stock_load = EpochBatchIterator.state_dict, EpochBatchIterator.load_state_dict

    def state_dict(self: EpochBatchIterator) -> dict[str, Any]:
        return stock_state(self) | {"num_shards": self.num_shards}

    def load_state_dict(self: EpochBatchIterator, state: dict[str, Any]) -> None:
        before, own = state.get("num_shards", self.num_shards), state.get("iterations_in_epoch", 0)
        if before != self.num_shards:
            done = own * before
            state = state | {"iterations_in_epoch": done // self.num_shards}
            processes = "1 process" if before == 1 else f"{before} processes"
            logger.warning(
                f"the checkpoint is of {processes}, this run has {self.num_shards}: it goes on after batch "
                f"{state['iterations_in_epoch'] * self.num_shards} of the epoch ({done} were done); an update is now "
                f"of {self.num_shards} batches times --update-freq, which can keep it what it was"
            )
        stock_load(self, state)

    EpochBatchIterator.state_dict, EpochBatchIterator.load_state_dict = state_dict, load_state_dict
