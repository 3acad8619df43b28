"""Logs as each command means to write them, without warnings that no user can act on."""

from __future__ import annotations

import logging
import os
import sys
import warnings

CONFIGURE_AT_IMPORT = {"eval_lm", "interactive", "preprocess", "train", "validate"}


def _commands() -> set[str]:
    """The modules of ``fairseq_cli`` loaded here, or run by ``python -m``."""
    main = getattr(sys.modules["__main__"].__spec__, "name", "")
    prefix = "fairseq_cli."
    return {name.removeprefix(prefix) for name in (main, *sys.modules) if name.startswith(prefix)}


def root_logs_debug() -> bool:
    """Whether a ``logging.basicConfig(level=DEBUG)`` came before the command's own, and so instead of it."""
    root = logging.getLogger()
    formats = [handler.formatter._fmt for handler in root.handlers if handler.formatter]
    return bool(_commands()) and root.level == logging.DEBUG and formats == [logging.BASIC_FORMAT]


def restore_logs() -> None:
    """Undo it, and do what the command meant; fairseq-generate still will, when it knows its output file."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    if _commands() & CONFIGURE_AT_IMPORT:
        logging.basicConfig(
            format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
            level=os.environ.get("LOGLEVEL", "INFO").upper(),
            stream=sys.stdout,
        )


AT_IMPORT = r"`torch\.jit\.script"  # and a line about tensorboardX: said while fairseq is imported
IDLE_WARNINGS = (  # how messages start that are about fairseq's way to call hydra and torch
    r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental",
    r"\s*The version_base parameter is not specified",
    r"\s*'.*' is validated against ConfigStore schema",
    r"In '.*': Usage of deprecated keyword in package header",
    r"\s*The strict flag in the compose API is deprecated",
    r"`torch\.cuda\.amp\.",
    r"'pin_memory' argument is set as true but no accelerator",
    r"Support for mismatched key_padding_mask and attn_mask",
    r".*broadcast_buffers.* deprecated",
    r"Using a non-full backward hook",
)
# it tells four things about its iterators, for each line that fairseq-interactive reads
IDLE_LOGGER = "fairseq.tasks.fairseq_task"


def warns_in_vain() -> bool:
    return logging.getLogger(IDLE_LOGGER).level == logging.NOTSET


def silence_idle_warnings() -> None:
    for message in IDLE_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger(IDLE_LOGGER).setLevel(logging.WARNING)


def import_in_silence() -> None:
    """For scripts of ours; fairseq's commands import fairseq before they import ``user_dir``."""
    warnings.filterwarnings("ignore", AT_IMPORT, FutureWarning)
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
