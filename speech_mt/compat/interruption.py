"""SIGTERM and Ctrl-C: fairseq-train finishes the update, saves, and ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
import torch.distributed

from speech_mt.compat.programs import train_module

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """The signal that came while training, if one did."""

    def __init__(self) -> None:
        self.received: int = 0
        self.process = os.getpid()  # the one that trains

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember it; a second Ctrl-C ends at once."""
        if os.getpid() != self.process:  # a data-loader worker: its parent decides when it ends
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
        name = signal.Signals(number).name
        print(f"{name}: finishing this update, then saving", file=sys.stderr, flush=True)

    def of_any_rank(self) -> int:
        """The signal, if it came to any rank: all have to end after the same update."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self.received
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        largest = torch.tensor(self.received, device=device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)


@contextmanager
def catching(interruption: Interruption) -> Iterator[None]:
    """Let ``interruption`` handle signals; outside a training they end the process as ever."""
    interruption.process = os.getpid()
    before = {number: signal.signal(number, interruption.handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ends_without_saving() -> bool:
    train = train_module()
    return train is not None and not hasattr(train.train, "saves_when_interrupted")


def save_before_ending() -> None:
    module = train_module()
    module.train, module.validate_and_save = saving(module.train, module.validate_and_save)


def saving(train: Callable[..., Any], validate_and_save: Callable[..., Any]) -> tuple[Callable, Callable]:
    """fairseq's two functions: one epoch, and what follows each update; both look out for signals."""
    interruption = Interruption()

    @wraps(train)
    def interruptible(*args: Any, **kwargs: Any) -> Any:
        with catching(interruption):
            return train(*args, **kwargs)

    @wraps(validate_and_save)
    def then_end(cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *rest: Any) -> Any:
        from fairseq import checkpoint_utils

        valid_losses, should_stop = validate_and_save(cfg, trainer, task, epoch_itr, *rest)
        if should_stop or not (number := interruption.of_any_rank()):
            return valid_losses, should_stop
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, valid_losses[0])
        saved = "not saved (--no-save)" if cfg.checkpoint.no_save else f"saved in {cfg.checkpoint.save_dir}"
        logger.warning(
            f"{signal.Signals(number).name} after update {trainer.get_num_updates()}: {saved}; the same command goes on"
        )
        raise SystemExit(128 + number)

    interruptible.saves_when_interrupted = True
    return interruptible, then_end
