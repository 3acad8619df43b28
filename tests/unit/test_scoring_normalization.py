"""Subword marks are removed from text that has them, only; normalisation does what its name says."""

import pytest

from speech_mt.scoring.normalization import Normalization, is_segmented, remove_marks


@pytest.mark.parametrize(
    ("scheme", "pieces", "words"),
    [
        ("sentencepiece", "▁the ▁ca t ▁s at .", "the cat sat."),
        ("subword_nmt", "the ca@@ t s@@ at", "the cat sat"),
        ("subword_nmt", "cut off at the e@@", "cut off at the e"),
        ("letter", "T H E | C A T |", "THE CAT"),
        ("letter", "S E V E N", "SEVEN"),
        ("sentencepiece", "", ""),
    ],
)
def test_marks_are_removed_and_words_joined(scheme, pieces, words):
    assert remove_marks(pieces, scheme) == words


@pytest.mark.parametrize(
    ("scheme", "texts", "segmented"),
    [
        ("sentencepiece", ["▁a ▁b", "▁c", ""], True),
        ("sentencepiece", ["the ▁ is a block", "plain text", "more of it"], False),
        ("letter", ["H I |", "Y O U"], True),
        ("letter", ["I", "go home", "he said so"], False),
        ("subword_nmt", ["no marks", "one ma@@ rk"], True),
        ("subword_nmt", ["mail to a@@b"], False),
        ("letter", ["", ""], False),
    ],
)
def test_the_whole_corpus_decides_whether_text_is_segmented(scheme, texts, segmented):
    assert is_segmented(texts, scheme) is segmented


def test_only_whitespace_is_folded_unless_asked():
    assert Normalization()("  Hello,\u00a0World \t! ") == "Hello, World !"


def test_lowercase():
    assert Normalization(lowercase=True)("ÄRGER It's") == "ärger it's"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't, he said!", "Don't he said"),
        ("twenty-one", "twenty one"),
        ("don’t ‘quote’", "don't quote"),
        ("yes—no …", "yes no"),
        ("$5 + 3", "$5 + 3"),
    ],
)
def test_punctuation_becomes_space_and_apostrophes_stay(text, expected):
    assert Normalization(remove_punctuation=True)(text) == expected


def test_the_name_lists_every_step():
    assert str(Normalization()) == "none; whitespace folded"
    named = str(Normalization(lowercase=True, remove_punctuation=True))
    assert "lower-cased" in named
    assert "punctuation removed" in named
