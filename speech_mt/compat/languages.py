"""The pair of languages that a translation model is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speech_mt.errors import InputError


def one_language_is_ignored() -> bool:
    from fairseq.tasks.translation import TranslationTask

    return TranslationTask.setup_task.__module__ == TranslationTask.__module__


def complete_languages_first() -> None:
    from fairseq import utils
    from fairseq.data import data_utils
    from fairseq.tasks.translation import TranslationTask

    stock = TranslationTask.setup_task.__func__

    def setup_task(cls: type[TranslationTask], cfg: Any, **kwargs: Any) -> TranslationTask:
        if (cfg.source_lang is None) != (cfg.target_lang is None):
            folder = utils.split_paths(cfg.data)[0]
            pair = data_utils.infer_language_pair(folder)
            cfg.source_lang, cfg.target_lang = complete(cfg.source_lang, cfg.target_lang, pair, folder)
        return stock(cls, cfg, **kwargs)

    TranslationTask.setup_task = classmethod(setup_task)


def complete(source: str | None, target: str | None, pair: Sequence[str | None], folder: str) -> tuple[str, str]:
    """Both languages, where at most one is given, from the pair of the data in ``folder``.

    Raises:
        InputError: the one that is given is not of the pair.
    """
    if source is None and target is None:
        source, target = pair
    given, option = (target, "--target-lang") if source is None else (source, "--source-lang")
    if given not in pair:
        found = "no pair of languages was found" if None in pair else f"the data are {'-'.join(pair)}"
        raise InputError(f"{option} {given}: {found} in {folder}; give --source-lang and --target-lang that are there")
    other = pair[1] if given == pair[0] else pair[0]
    return (other, given) if source is None else (given, target or other)
