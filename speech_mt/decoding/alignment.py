"""When each symbol was said: the most probable CTC alignment of a given transcript (torchaudio's forced_align)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speech_mt.data.vocabulary import detokenize
from speech_mt.errors import InputError


@dataclass(frozen=True)
class Span:
    """Frames from ``start`` up to, not including, ``end``, and the mean log-probability of the symbol over them."""

    start: int
    end: int
    score: float


def forced_alignment(log_probs: Tensor, tokens: Tensor, blank: int) -> list[Span]:
    """The span of each token in the most probable alignment.

    Args:
        log_probs: (frames, symbols).
        tokens: int64 (units,), without blanks.
        blank: id of the blank.

    Raises:
        InputError: fewer frames than CTC needs for these tokens.
    """
    from torchaudio.functional import forced_align, merge_tokens

    if len(tokens) == 0:
        return []
    needed = len(tokens) + int((tokens[1:] == tokens[:-1]).sum())
    if len(log_probs) < needed:
        raise InputError(f"{len(log_probs)} frames are too few for {len(tokens)} symbols: CTC needs {needed}")
    frames = log_probs[None].float().cpu().contiguous()
    path, scores = forced_align(frames, tokens[None].to("cpu", torch.int64), blank=blank)
    return [Span(span.start, span.end, span.score) for span in merge_tokens(path[0], scores[0], blank=blank)]


@dataclass(frozen=True)
class Word:
    """A word and the frames it was said in, ``end`` not counted."""

    text: str
    start: int
    end: int


def word_spans(spans: list[Span], symbols: list[str], boundary: str) -> list[Word]:
    """Join symbols to words.

    Args:
        spans: of the symbols.
        symbols: as many; ``boundary`` in them stands for the space between words: ``|`` or ``▁``.
    """
    words: list[tuple[list[str], int, int]] = []
    inside = False
    for span, symbol in zip(spans, symbols, strict=True):
        for i, part in enumerate(symbol.split(boundary)):
            inside = inside and i == 0
            if part and inside:
                parts, start, _ = words[-1]
                words[-1] = ([*parts, part], start, span.end)
            elif part:
                words.append(([part], span.start, span.end))
                inside = True
    return [Word(detokenize(parts), start, end) for parts, start, end in words]
