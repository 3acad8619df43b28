"""Which of fairseq's commands is running: their functions are replaced where the running program looks them up."""

from __future__ import annotations

import sys
from types import ModuleType


def program(name: str, function: str) -> ModuleType | None:
    """The module of the command ``fairseq_cli.NAME``, told by one of its functions; None if it is not the program."""
    modules = (sys.modules.get(module) for module in ("__main__", f"fairseq_cli.{name}"))
    return next((module for module in modules if hasattr(module, function)), None)


def train_module() -> ModuleType | None:
    """fairseq-train, if it is the program."""
    return program("train", "validate_and_save")
