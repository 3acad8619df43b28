"""From transcripts to the ids of a fairseq dictionary: characters with ``|`` between words, or sentencepiece
pieces.

The tokenizers work on many texts at a time, so that the targets of a whole corpus are measured in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from speech_mt.data.vocabulary import PIECE_BOUNDARY, UNKNOWN, WORD_BOUNDARY, load_sentencepiece
from speech_mt.errors import InputError

_TEXTS_AT_ONCE = 10_000


class CharacterTokenizer:
    """``"two six"`` as the ids of ``t w o | s i x``; any run of white space is one word boundary.

    Attributes:
        post_process: the name under which fairseq joins such symbols to words.
        word_boundary: what stands for the space between words in a symbol.
    """

    post_process = "letter"
    word_boundary = WORD_BOUNDARY

    def __init__(self, indices: Mapping[str, int], lowercase: bool = False) -> None:
        """``indices`` maps each dictionary symbol to its id; ``lowercase`` folds the texts first."""
        if WORD_BOUNDARY not in indices:
            raise InputError(
                f"the dictionary has no word boundary {WORD_BOUNDARY!r}, so it is not one of characters; "
                "use --vocab-type sentencepiece or build a dictionary of characters"
            )
        self.unk = indices[UNKNOWN]
        self._lowercase = lowercase
        self._id_of_code_point = np.full(0x110000, self.unk, dtype=np.int32)
        for symbol, index in indices.items():
            if len(symbol) == 1:
                self._id_of_code_point[ord(symbol)] = index
        self._id_of_code_point[ord(" ")] = indices[WORD_BOUNDARY]
        self._id_of_code_point[ord(WORD_BOUNDARY)] = self.unk  # in a text it would read back as a space

    def encode(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts one after the other, int32, and the number of ids of each, int64."""
        folded = [self._fold(text) for text in texts]
        code_points = np.frombuffer("".join(folded).encode("utf-32-le"), dtype="<u4")
        return self._id_of_code_point[code_points], np.array([len(text) for text in folded], dtype=np.int64)

    def unknown(self, text: str) -> set[str]:
        """The characters of ``text`` that the dictionary lacks."""
        return {c for c in self._fold(text) if self._id_of_code_point[ord(c)] == self.unk}

    def _fold(self, text: str) -> str:
        return " ".join((text.lower() if self._lowercase else text).split())


class SentencePieceTokenizer:
    """Texts as the ids of sentencepiece pieces; attributes and methods as in :class:`CharacterTokenizer`."""

    post_process = "sentencepiece"
    word_boundary = PIECE_BOUNDARY

    def __init__(self, model_path: Path, indices: Mapping[str, int], lowercase: bool = False) -> None:
        """``indices`` must hold the pieces of the model; fairseq numbers them otherwise than sentencepiece
        does."""
        self._model = load_sentencepiece(model_path)
        self.unk = indices[UNKNOWN]
        self._lowercase = lowercase
        ids = range(len(self._model))
        special = [self._model.is_control(i) or self._model.is_unknown(i) for i in ids]
        symbols = [UNKNOWN if special[i] else self._model.id_to_piece(i) for i in ids]
        self._id_of_piece = np.array([indices.get(symbol, self.unk) for symbol in symbols], dtype=np.int32)
        if (self._id_of_piece == self.unk).sum() > sum(special):
            missing = next(symbol for symbol in symbols if symbol not in indices)
            raise InputError(
                f"{model_path}: its piece {missing!r} is not in the dictionary; build both from the same text"
            )

    def encode(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts one after the other, int32, and the number of ids of each, int64."""
        encoded = self._model.encode([self._fold(text) for text in texts], out_type=int)
        pieces = np.fromiter(chain.from_iterable(encoded), dtype=np.int64)
        return self._id_of_piece[pieces], np.array([len(ids) for ids in encoded], dtype=np.int64)

    def unknown(self, text: str) -> set[str]:
        """The stretches of ``text`` that no piece covers."""
        encoded = self._model.encode(self._fold(text), out_type=str)
        return {piece for piece in encoded if self._id_of_piece[self._model.piece_to_id(piece)] == self.unk}

    def _fold(self, text: str) -> str:
        return text.lower() if self._lowercase else text


Tokenizer = CharacterTokenizer | SentencePieceTokenizer


@dataclass(frozen=True)
class TargetSizes:
    """What the targets of a split ask for, an entry an utterance.

    Attributes:
        units: ids in the target, end of sentence not counted, int32.
        ctc_frames: fewest encoder frames that CTC can align it to: the ids, and one blank between any two
            equal neighbours (Graves et al., 2006, section 3.1), int32.
        unknown: whether the dictionary lacks something of it, bool.
    """

    units: np.ndarray
    ctc_frames: np.ndarray
    unknown: np.ndarray


def target_sizes(texts: Iterable[str], tokenizer: Tokenizer) -> TargetSizes:
    """Measure all ``texts``, in batches: no ids are kept."""
    measured = [_measure(*tokenizer.encode(batch), tokenizer.unk) for batch in _batches(texts)]
    units, ctc_frames, unknown = (np.concatenate(column) for column in zip(*measured, strict=True))
    return TargetSizes(units.astype(np.int32), ctc_frames.astype(np.int32), unknown)


def too_short_for_ctc(frames: np.ndarray, targets: TargetSizes, subsampling: int) -> np.ndarray:
    """Which utterances, bool of shape (utterances,), leave CTC fewer encoder frames than it needs.

    Args:
        frames: of features, int64 of shape (utterances,).
        targets: of the same utterances.
        subsampling: the factor by which the model shortens its input; 0: none is too short.
    """
    if not subsampling:
        return np.zeros(len(frames), dtype=bool)
    return frames // subsampling < targets.ctc_frames


def _measure(ids: np.ndarray, units: np.ndarray, unk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    text_of_id = np.repeat(np.arange(len(units)), units)
    repeats = (ids[1:] == ids[:-1]) & (text_of_id[1:] == text_of_id[:-1])
    count = len(units)
    return (
        units,
        units + np.bincount(text_of_id[1:][repeats], minlength=count),
        np.bincount(text_of_id[ids == unk], minlength=count) > 0,
    )


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while batch := list(islice(remaining, _TEXTS_AT_ONCE)):
        yield batch
