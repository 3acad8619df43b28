"""Batches whose features, loss or gradient are NaN or Inf: named by their samples, written aside, skipped.

They are found after the ranks have summed their gradients and before the optimizer is asked to do anything, so that
all ranks leave the update out together and nothing is poisoned: weights, gamma, u, v and the optimizer's state are
those of a run that never saw the batch. sigmaReparam's power step counts updates, and this one did not happen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from speech_mt.data.stage import atomic_path

logger = logging.getLogger(__name__)
FOLDER = "nonfinite"  # in --save-dir
MOST_ALONE = 64  # samples of a batch that are tried one by one


class NonFiniteUpdate(Exception):
    """The gradient of an update is not finite on any rank; nothing has been done with it."""


@dataclass
class NonFiniteBudget:
    """How many updates may be skipped in a training, and how many were; resuming goes on counting.

    Attributes:
        stop: why the training has to end; empty as long as it need not.
    """

    allowed: int = 0
    skipped: int = 0
    stop: str = field(default="")

    def spend(self, update: int, found: str) -> None:
        """Count an update that is left out, and say so once."""
        self.skipped += 1
        left = f"--skip-nonfinite {self.allowed}"
        if self.skipped > self.allowed:
            before = f", {self.allowed} were skipped before" if self.allowed else ""
            self.stop = f"update {update + 1}: {found} ({left}{before})"
        elif _rank() == 0:
            logger.warning(f"update {update + 1}: {found}; skipped, {self.skipped} of {left}")


def mark_nonfinite(loss: Tensor) -> Tensor:
    """The same loss; one that is not finite gets a gradient that is not, for an infinite loss may have a finite one."""
    return loss * torch.ones_like(loss).masked_fill(~loss.detach().isfinite(), math.nan)


def install() -> None:
    """Let fairseq's trainer leave out such updates when its criterion has a :class:`NonFiniteBudget`."""
    from fairseq.trainer import Trainer

    if Trainer.clip_grad_norm.__module__ == __name__:
        return
    stock_clip, stock_step = Trainer.clip_grad_norm, Trainer.train_step

    def clip_grad_norm(self: Trainer, clip_norm: float) -> Tensor:
        try:
            norm = stock_clip(self, clip_norm)
        except OverflowError:  # fp16: the update is left out, the loss scale halved
            _report_overflow(self)
            raise
        if not self.cfg.common.amp and not torch.isfinite(norm).all():
            raise NonFiniteUpdate
        return norm

    def train_step(self: Trainer, samples: list[dict], *args: Any, **kwargs: Any) -> dict | None:
        try:
            return stock_step(self, samples, *args, **kwargs)
        except NonFiniteUpdate:
            _leave_out(self, samples)
            return None

    Trainer.clip_grad_norm, Trainer.train_step = clip_grad_norm, train_step


def _leave_out(trainer: Any, samples: list[dict]) -> None:
    trainer.zero_grad()
    if getattr(trainer.optimizer, "scaler", None) is None and hasattr(trainer.optimizer, "_multiply_factor"):
        trainer.optimizer._multiply_factor = 1.0  # bf16: clipping has multiplied it by a NaN
    criterion = trainer.get_criterion()
    found = [line for sample in samples for line in _find(trainer, sample)]
    everywhere = _gather(found)
    criterion.watcher.forget()
    criterion.nonfinite.spend(trainer.get_num_updates(), "; ".join(everywhere) or "the gradient is not finite")


def _gather(found: list[str]) -> list[str]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return found
    ranks: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(ranks, found)
    return [f"rank {rank}: {line}" for rank, lines in enumerate(ranks) for line in lines]


def _rank() -> int:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if initialized else 0


# -- whose fault ------------------------------------------------------------------------------------------------------


def _find(trainer: Any, sample: dict) -> Iterator[str]:
    """What is not finite in one micro-batch of this rank, by sample; also writes the batch aside."""
    sample, is_dummy = trainer._prepare_sample(sample)
    causes = _causes(trainer, sample)
    if is_dummy or not causes:
        return
    ids = sample["id"].tolist()
    names = [_name(trainer, ids[row]) for row in causes]
    what = " and ".join(sorted(set(causes.values())))
    path = _write_aside(trainer, sample, ids, {ids[row]: cause for row, cause in causes.items()})
    yield f"{what} not finite for {', '.join(names[:10])}{' ...' if len(names) > 10 else ''} (kept in {path})"


def _causes(trainer: Any, sample: dict) -> dict[int, str]:
    """Row of the batch -> what is not finite; no row is guilty alone: all rows."""
    rows = range(len(sample["id"]))
    features = [value for value in sample["net_input"].values() if torch.is_tensor(value) and value.is_floating_point()]
    bad = {row: "features" for row in rows if any(not value[row].isfinite().all() for value in features)}
    if bad:
        return bad
    whole = _cause(trainer, sample)
    if not whole:
        return {}
    alone = {row: _cause(trainer, take_row(sample, row)) for row in rows} if len(rows) <= MOST_ALONE else {}
    return {row: cause for row, cause in alone.items() if cause} or dict.fromkeys(rows, whole)


def _cause(trainer: Any, sample: dict) -> str:
    """``loss``, ``gradient`` or nothing, of a batch alone: it touches no gradient and no other rank."""
    trainer._set_seed()
    model = trainer.get_model()
    loss, _, _ = trainer.get_criterion().plain_loss(model, sample)
    if not loss.isfinite():
        return "loss"
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    except RuntimeError:  # --checkpoint-activations allows .backward() alone
        return "gradient"
    return "" if all(gradient is None or gradient.isfinite().all() for gradient in gradients) else "gradient"


def take_row(sample: dict, row: int) -> dict:
    """A batch of one row of a collated batch."""
    size = len(sample["id"])

    def take(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, dict):
            return {key: take(item) for key, item in value.items()}
        return value[row : row + 1] if torch.is_tensor(value) and value.dim() and len(value) == size else value

    return take(sample) | {"nsentences": 1}


def _name(trainer: Any, index: int) -> str:
    split = trainer.cfg.dataset.train_subset
    manifest = getattr(trainer.task.datasets.get(split), "manifest", None)
    return f"sentence {index + 1} of {split}" if manifest is None else f"utterance {manifest.field(index, 'id')!r}"


def _write_aside(trainer: Any, sample: dict, ids: list[int], causes: dict[int, str]) -> Path:
    """Arrays and text, nothing pickled: ``numpy.load`` reads it."""
    folder = Path(trainer.cfg.checkpoint.save_dir, FOLDER)
    path = folder / f"update{trainer.get_num_updates() + 1}-rank{_rank()}-sample{ids[0]}.npz"
    arrays = dict(_arrays(sample))
    arrays["causes"] = np.array([f"{_name(trainer, index)}: {cause}" for index, cause in causes.items()])
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def _arrays(sample: dict, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for key, value in sample.items():
        if isinstance(value, dict):
            yield from _arrays(value, f"{prefix}{key}.")
        elif torch.is_tensor(value):
            value = value.detach().cpu()
            yield prefix + key, (value.float() if value.is_floating_point() else value).numpy()


# -- fp16 -------------------------------------------------------------------------------------------------------------


def _report_overflow(trainer: Any) -> None:
    """Where an overflow shows, nearest the loss first, and the largest attention logit that was seen."""
    named = [(name, p.grad) for name, p in trainer.get_model().named_parameters() if p.grad is not None]
    bad = [name for name, gradient in named if not gradient.isfinite().all()]
    logit = trainer.get_criterion().watcher.largest_logit()
    where = f"{len(bad)} of {len(named)} gradients, from {bad[-1]} on" if bad else "no gradient of this rank"
    seen = "" if logit is None else f"; largest attention logit {logit}"
    logger.info(f"update {trainer.get_num_updates() + 1}: overflow in {where}{seen}")
