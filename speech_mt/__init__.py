"""Deep speech and translation Transformers that do not collapse: a fairseq plugin."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speech_mt.inference.transcriber import Transcriber
    from speech_mt.inference.translator import Translator

__version__ = "0.1.0"


def load(
    path: str | os.PathLike[str], device: str | None = None, data: str | os.PathLike[str] | None = None, **task: Any
) -> Translator | Transcriber:
    """A trained model, to ``.translate(texts)`` or ``.transcribe(files)``; see :mod:`speech_mt.inference.loading`."""
    from speech_mt.inference import loading

    return loading.load(path, device, data, **task)
