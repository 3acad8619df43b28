"""fairseq-generate's results replace earlier ones when they are whole."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from speech_mt.compat.programs import program


def results_are_overwritten() -> bool:
    module = program("generate", "get_symbols_to_strip_from_output")
    return module is not None and not hasattr(module.main, "keeps_results")


def keep_results_until_replaced() -> None:
    module = program("generate", "get_symbols_to_strip_from_output")
    module.main = keeping_results(module.main)


def end_with_the_reader(handler: logging.Handler, record: logging.LogRecord) -> None:
    """``logging``'s way with errors, but for a reader of stdout, such as head, that has seen enough."""
    if isinstance(sys.exc_info()[1], BrokenPipeError):
        raise  # noqa: PLE0704 (called while the error is handled)
    logging.Handler.handleError(handler, record)


def keeping_results(main: Callable[..., Any]) -> Callable[..., Any]:
    """fairseq-generate's ``main``, which empties ``generate-SUBSET.txt`` before it looks at anything else.

    What an interrupted run has decoded stays in the folder ``partial`` of ``--results-path``.
    """

    @wraps(main)
    def main_then_move(cfg: Any) -> Any:
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        cfg = convert_namespace_to_omegaconf(cfg) if isinstance(cfg, Namespace) else cfg
        results = cfg.common_eval.results_path
        if results is None:
            logging.StreamHandler.handleError = end_with_the_reader
            return main(cfg)
        partial, name = Path(results, "partial"), f"generate-{cfg.dataset.gen_subset}.txt"
        cfg.common_eval.results_path = str(partial)
        result = main(cfg)
        (partial / name).replace(Path(results, name))
        if not any(partial.iterdir()):
            partial.rmdir()
        return result

    main_then_move.keeps_results = True
    return main_then_move
