"""fairseq's own loading and saving of checkpoints, by the rules of :mod:`speech_mt.checkpoint`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from speech_mt import checkpoint
from speech_mt.checkpoint import MismatchError, check_checkpoint
from speech_mt.checkpoint.loading import ALLOWED_GLOBALS, resolve_global, trusted
from speech_mt.errors import InputError


def namespaces_are_refused() -> bool:
    registered = torch.serialization.get_safe_globals()
    return any(resolve_global(name) not in registered for name in ALLOWED_GLOBALS)


def allow_what_fairseq_saves() -> None:
    from fairseq import checkpoint_utils

    torch.serialization.add_safe_globals([resolve_global(name) for name in ALLOWED_GLOBALS])
    if trusted():
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

    stock = checkpoint_utils.load_checkpoint_to_cpu

    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_checkpoint(path)
        return stock(path, *args, **kwargs)

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


def copies_in_place() -> bool:
    from fairseq import checkpoint_utils

    return checkpoint_utils.torch_persistent_save.__module__ == checkpoint_utils.__name__


def write_whole_or_not_at_all() -> None:
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    stock_save, stock_copy = checkpoint_utils.torch_persistent_save, PathManager.copy

    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            stock_save(obj, filename, async_write)
        else:
            checkpoint.save_checkpoint(obj, filename)

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if not PathManager.supports_rename(dst_path):
            return stock_copy(src_path, dst_path, overwrite)
        checkpoint.copy_checkpoint(src_path, dst_path)
        return True

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    PathManager.copy = staticmethod(copy)


def mismatch_is_not_explained() -> bool:
    from fairseq.models import BaseFairseqModel

    return BaseFairseqModel.load_state_dict.__module__ == BaseFairseqModel.__module__


def explain_mismatch() -> None:
    from fairseq import checkpoint_utils
    from fairseq.models import BaseFairseqModel
    from fairseq.trainer import Trainer

    stock_state_dict = BaseFairseqModel.load_state_dict
    stock_ensemble = checkpoint_utils.load_model_ensemble_and_task
    stock_trainer = Trainer.load_checkpoint

    def load_state_dict(
        self: BaseFairseqModel, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return stock_state_dict(self, state_dict, *args, **kwargs)
        except RuntimeError as error:
            raise MismatchError(checkpoint.explain_mismatch(self.state_dict(), state_dict)) from error

    def load_model_ensemble_and_task(filenames: list[str], *args: Any, **kwargs: Any) -> Any:
        try:
            return stock_ensemble(filenames, *args, **kwargs)
        except MismatchError as error:
            raise InputError(f"{':'.join(filenames)}: {error}") from error

    def load_checkpoint(self: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock_trainer(self, filename, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, MismatchError):
                raise InputError(f"{filename}: {error.__context__}") from error
            raise

    BaseFairseqModel.load_state_dict = load_state_dict
    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task
    Trainer.load_checkpoint = load_checkpoint
