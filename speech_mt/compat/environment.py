"""One line that says what to install, when something is missing or does not fit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from speech_mt.errors import InputError

PYTHON = ((3, 11), (3, 12))
FAIRSEQ = "ve-fairseq==0.12.3"


def check_environment() -> None:
    """Look at Python, fairseq, torch and torchaudio without importing fairseq.

    Raises:
        InputError: no fairseq for this Python, a package is missing, or torchaudio does not fit torch.
    """
    if sys.version_info[:2] not in PYTHON:
        supported = " or ".join(".".join(map(str, version)) for version in PYTHON)
        found = ".".join(map(str, sys.version_info[:2]))
        raise InputError(
            f"Python {found}: fairseq runs on {supported} only; make the environment with one of them"
        )
    for module, package in (("torch", "torch"), ("torchaudio", "torchaudio"), ("fairseq", FAIRSEQ)):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{module} is not installed: pip install {package}")
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError) as error:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "torchaudio")}
        raise InputError(
            f"torchaudio {versions['torchaudio']} does not fit torch {versions['torch']}: pip install "
            f"'torch>=2.11,<2.15' 'torchaudio>=2.11,<2.12' ({str(error).splitlines()[0]})"
        ) from error
