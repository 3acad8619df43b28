"""CTC prefix beam search (Hannun et al., 2014, arXiv:1408.2873, algorithm 1), with a word n-gram if there is one.

A hypothesis is a sequence of symbols; its probability is summed over the alignments that give it, of which best-path
decoding sees only one. The search is plain Python, and with characters still many times faster than speech.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speech_mt.decoding.alignment import forced_alignment
from speech_mt.decoding.ctc_generator import Hypothesis
from speech_mt.decoding.word_language_model import Judged, WordLanguageModel

NEVER = -math.inf


class _Prefix:
    """A node of the tree of prefixes. Log-probabilities of its alignments that end in blank, and in its symbol."""

    __slots__ = ("blank", "children", "judged", "next_blank", "next_symbol", "parent", "symbol", "symbol_end")

    def __init__(self, parent: _Prefix | None, symbol: int, judged: Judged | None) -> None:
        self.parent, self.symbol, self.judged = parent, symbol, judged
        self.children: dict[int, _Prefix] = {}
        self.blank = self.symbol_end = self.next_blank = self.next_symbol = NEVER

    @property
    def total(self) -> float:
        return _log_add(self.blank, self.symbol_end)

    @property
    def score(self) -> float:
        return self.total + (self.judged.score if self.judged else 0.0)

    def symbols(self) -> list[int]:
        node, reverse = self, []
        while node.parent is not None:
            reverse.append(node.symbol)
            node = node.parent
        return reverse[::-1]


@dataclass(frozen=True)
class PrefixBeamSearch:
    """The search and its limits.

    Attributes:
        blank: id of the blank.
        beam: prefixes kept after each frame.
        nbest: hypotheses returned, at most.
        language_model: scores the words of a prefix as they end.
        texts: for the language model, each symbol as text, its word boundary a space.
        threshold: symbols less probable than the frame's best by more than this, in nats, do not extend a prefix; of
            the others, the ``beam`` most probable ones do.
    """

    blank: int
    beam: int
    nbest: int = 1
    language_model: WordLanguageModel | None = None
    texts: Sequence[str] = ()
    threshold: float = 12.0

    def __call__(self, log_probs: Tensor, lengths: Sequence[int]) -> list[list[Hypothesis]]:
        """The likeliest transcripts of each utterance, best first.

        Args:
            log_probs: (batch, frames, symbols).
            lengths: frames of each utterance; later ones are padding.

        Returns:
            Hypotheses as :func:`~speech_mt.decoding.ctc_greedy.best_path` gives them; ``score`` is the log-probability
            of the transcript plus the language model's score, per frame; ``positional_scores`` and ``alignment`` are
            those of its most probable alignment.
        """
        utterances = (frames[:length] for frames, length in zip(log_probs.float().cpu(), lengths, strict=True))
        return [
            [self._hypothesis(frames, *found) for found in self.search(frames.numpy())[: self.nbest]]
            for frames in utterances
        ]

    def search(self, log_probs: np.ndarray) -> list[tuple[list[int], float]]:
        """All transcripts in the last beam with their scores in nats, best first; (frames, symbols) in."""
        root = _Prefix(None, -1, self.language_model.start() if self.language_model else None)
        root.blank = 0.0
        beam = [root]
        for frame in log_probs.astype(float):
            likely = np.flatnonzero((frame >= frame.max() - self.threshold) & (frame > NEVER))
            likely = likely[likely != self.blank]
            if len(likely) > self.beam:
                likely = likely[np.argpartition(-frame[likely], self.beam)[: self.beam]]
            beam = self._advance(beam, frame.tolist(), likely.tolist())
        found = [(prefix.symbols(), prefix.total + self._finish(prefix)) for prefix in beam]
        return sorted(found, key=lambda item: -item[1])

    def _advance(self, beam: list[_Prefix], frame: list[float], candidates: list[int]) -> list[_Prefix]:
        touched = dict.fromkeys(beam)
        for prefix in beam:
            total = prefix.total
            prefix.next_blank = _log_add(prefix.next_blank, total + frame[self.blank])
            if prefix.parent is not None:
                prefix.next_symbol = _log_add(prefix.next_symbol, prefix.symbol_end + frame[prefix.symbol])
            for symbol in candidates:
                before = prefix.blank if symbol == prefix.symbol else total
                if before > NEVER:
                    child = prefix.children.get(symbol) or self._extend(prefix, symbol)
                    child.next_symbol = _log_add(child.next_symbol, before + frame[symbol])
                    touched[child] = None
        for prefix in touched:
            prefix.blank, prefix.symbol_end = prefix.next_blank, prefix.next_symbol
            prefix.next_blank = prefix.next_symbol = NEVER
        ranked = sorted((prefix for prefix in touched if prefix.total > NEVER), key=lambda prefix: -prefix.score)
        for prefix in ranked[self.beam :]:
            prefix.blank = prefix.symbol_end = NEVER
            if not prefix.children and prefix.parent is not None:
                del prefix.parent.children[prefix.symbol]
        return ranked[: self.beam]

    def _extend(self, prefix: _Prefix, symbol: int) -> _Prefix:
        judged = self.language_model.extend(prefix.judged, self.texts[symbol]) if self.language_model else None
        child = prefix.children[symbol] = _Prefix(prefix, symbol, judged)
        return child

    def _finish(self, prefix: _Prefix) -> float:
        return self.language_model.finish(prefix.judged) if self.language_model else 0.0

    def _hypothesis(self, log_probs: Tensor, symbols: list[int], score: float) -> Hypothesis:
        tokens = torch.tensor(symbols, dtype=torch.int64)
        spans = forced_alignment(log_probs, tokens, self.blank)
        return {
            "tokens": tokens,
            "score": score / max(len(log_probs), 1),
            "positional_scores": torch.tensor([span.score for span in spans], dtype=torch.float32),
            "alignment": [(span.start, unit) for unit, span in enumerate(spans)],
            "attention": None,
        }


def _log_add(a: float, b: float) -> float:
    low, high = (a, b) if a < b else (b, a)
    return high + math.log1p(math.exp(low - high)) if low > NEVER else high
