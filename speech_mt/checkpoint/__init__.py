"""fairseq checkpoints: loaded without running their code, written whole, averaged, explained."""

from speech_mt.checkpoint.averaging import average_checkpoints
from speech_mt.checkpoint.loading import check_checkpoint, load_checkpoint
from speech_mt.checkpoint.mismatch import MismatchError, explain_mismatch
from speech_mt.checkpoint.writing import copy_checkpoint, save_checkpoint

__all__ = [
    "MismatchError",
    "average_checkpoints",
    "check_checkpoint",
    "copy_checkpoint",
    "explain_mismatch",
    "load_checkpoint",
    "save_checkpoint",
]
