"""fairseq's word error rate (``--scoring wer``)."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def editdistance_is_missing() -> bool:
    return "editdistance" not in sys.modules and importlib.util.find_spec("editdistance") is None


def provide_editdistance() -> None:
    """rapidfuzz, which is installed, under the name that fairseq imports."""
    from rapidfuzz.distance import Levenshtein

    module = ModuleType("editdistance", "Levenshtein distance of two sequences, by rapidfuzz.")
    module.eval = lambda a, b: Levenshtein.distance(list(a), list(b))
    module.distance = module.eval
    sys.modules["editdistance"] = module
