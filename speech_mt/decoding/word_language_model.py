"""A word n-gram as the judge of a growing transcript: an ARPA file or KenLM's binary form of it, read by KenLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speech_mt.errors import InputError


@dataclass(frozen=True)
class Judged:
    """A transcript so far: its score in nats, KenLM's state after its whole words, and the word not yet ended."""

    score: float
    state: Any
    word: str = ""


class WordLanguageModel:
    """Shallow fusion: ``weight`` ln p(words) + ``word_bonus`` for each word.

    A word counts once it has ended, so that there is no closed list of words: those that the n-gram lacks get its
    probability of ``<unk>``.
    """

    def __init__(self, path: str | Path, weight: float, word_bonus: float = 0.0) -> None:
        """Raises :class:`InputError`: KenLM is not installed, or ``path`` is no n-gram that it can read."""
        try:
            import kenlm
        except ImportError:
            raise InputError(
                f"{path}: reading an n-gram needs KenLM: pip install 'kenlm>=0.3,<0.4' (it is compiled: have a C++ "
                "compiler and cmake)"
            ) from None
        config = kenlm.Config()
        config.show_progress = False
        try:
            self._model = kenlm.Model(str(path), config)
        except OSError as error:
            if not Path(path).is_file():
                raise InputError(f"{path}: no such n-gram file") from None
            reason = str(error).partition("Exception. ")[2].removesuffix(")") or error
            raise InputError(f"{path}: not an n-gram in ARPA or KenLM's format ({reason})") from None
        self._new_state = kenlm.State
        self.weight = weight
        self.word_bonus = word_bonus

    def start(self) -> Judged:
        """Before the first word."""
        state = self._new_state()
        self._model.BeginSentenceWrite(state)
        return Judged(0.0, state)

    def extend(self, judged: Judged, text: str) -> Judged:
        """With some more ``text``, which may hold spaces: they end words."""
        *ended, word = (judged.word + text).split(" ")
        for done in filter(None, ended):
            judged = self._add(judged, done, self.word_bonus)
        return Judged(judged.score, judged.state, word)

    def finish(self, judged: Judged) -> float:
        """The score of the whole, with its last word and the end of the sentence."""
        return self._add(self.extend(judged, " "), "</s>", 0.0).score

    def _add(self, judged: Judged, word: str, bonus: float) -> Judged:
        state = self._new_state()
        log10 = self._model.BaseScore(judged.state, word, state)
        return Judged(judged.score + self.weight * math.log(10) * log10 + bonus, state)
