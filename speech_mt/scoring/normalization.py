"""What is done to text before it is scored: removal of subword marks, and normalisation for error rates."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from speech_mt.data.vocabulary import detokenize

POST_PROCESS = ("sentencepiece", "subword_nmt", "letter")
"""Schemes of subword marks, by fairseq's names: ``▁the ▁ca t``, ``the ca@@ t`` and ``t h e | c a t``."""


def is_segmented(texts: list[str], scheme: str) -> bool:
    """Whether ``texts`` as a whole are written in the marks of ``scheme``.

    The corpus decides, not the sentence: a stray ``▁`` or a one-letter sentence proves nothing, and joining
    the "pieces" of ordinary text would glue its words together. sentencepiece and letter: at least half of
    the sentences that are not empty are so written. subword_nmt: any, as its removal touches nothing else.
    """
    filled = [text for text in texts if text.strip()]
    if scheme == "subword_nmt":
        return any(_CONTINUATION.search(text) for text in filled)
    if scheme == "sentencepiece":
        marked = sum("▁" in text for text in filled)
    else:
        marked = sum(all(len(token) == 1 for token in text.split()) for text in filled)
    return bool(filled) and 2 * marked >= len(filled)


def remove_marks(text: str, scheme: str) -> str:
    """One sentence with the marks of ``scheme`` (one of :data:`POST_PROCESS`) removed, its words joined."""
    if scheme == "subword_nmt":
        return _CONTINUATION.sub("", text)
    if scheme == "sentencepiece":
        return detokenize(text.split(" "))
    return text.replace(" ", "").replace("|", " ").strip()


_CONTINUATION = re.compile(r"@@(?: |$)")


@dataclass(frozen=True)
class Normalization:
    """Normalisation of transcripts before an error rate. Whitespace is always folded; the rest is optional.

    ``remove_punctuation`` turns every character of Unicode's punctuation categories (P*) into a space, so
    "twenty-one" is two words. Apostrophes stay, as LibriSpeech has them; a typographic one (U+2019) is read
    as an apostrophe between two letters, elsewhere as a quotation mark.
    """

    lowercase: bool = False
    remove_punctuation: bool = False

    def __call__(self, text: str) -> str:
        if self.lowercase:
            text = text.lower()
        if self.remove_punctuation:
            text = _TYPOGRAPHIC_APOSTROPHE.sub("'", text).translate(_PUNCTUATION_TO_SPACE)
        return " ".join(text.split())

    def __str__(self) -> str:
        steps = ["lower-cased"] if self.lowercase else []
        if self.remove_punctuation:
            steps.append("punctuation removed, apostrophes kept")
        return "; ".join(steps or ["none"]) + "; whitespace folded"


_TYPOGRAPHIC_APOSTROPHE = re.compile(r"(?<=\w)\u2019(?=\w)")


class _PunctuationToSpace(dict):
    """A table for ``str.translate`` that looks each character's category up once."""

    def __missing__(self, codepoint: int) -> int:
        is_punctuation = unicodedata.category(chr(codepoint)).startswith("P") and chr(codepoint) != "'"
        self[codepoint] = ord(" ") if is_punctuation else codepoint
        return self[codepoint]


_PUNCTUATION_TO_SPACE = _PunctuationToSpace()
