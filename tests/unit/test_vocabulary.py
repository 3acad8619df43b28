"""Dictionaries are deterministic and readable by fairseq; sentencepiece gets exactly the pieces asked for."""

import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

from speech_mt.data.vocabulary import (
    FAIRSEQ_SYMBOLS,
    UNKNOWN,
    build_vocabulary,
    character_counts,
    characters,
    encode,
    load_sentencepiece,
    pieces,
    read_dictionary,
    sentencepiece_counts,
    train_sentencepiece,
    write_dictionary,
)
from speech_mt.errors import InputError

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LINES = [f"{a} and {b}" for a in WORDS for b in WORDS]


def test_characters_join_back_to_words():
    assert characters(" two \u00a0 six ") == ["t", "w", "o", "|", "s", "i", "x"]
    # fairseq's --post-process letter
    assert " ".join(characters("two six")).replace(" ", "").replace("|", " ") == "two six"
    with pytest.raises(InputError, match=r"'a\|b' holds '\|'"):
        characters("a|b")


def test_dictionary_is_ordered_by_count_then_code_point(tmp_path):
    path = tmp_path / "dict.txt"
    write_dictionary(path, character_counts(["ba b", "ä"]))
    assert path.read_text(encoding="utf-8") == "b 2\na 1\n| 1\nä 1\n"


@pytest.mark.parametrize("symbol", ["", "a b", "\u2028", *FAIRSEQ_SYMBOLS])
def test_symbols_that_fairseq_could_not_read_back_are_refused(tmp_path, symbol):
    with pytest.raises(InputError, match="cannot be a dictionary symbol"):
        write_dictionary(tmp_path / "dict.txt", {"a": 1, symbol: 1})
    with pytest.raises(InputError, match="training text is empty"):
        write_dictionary(tmp_path / "dict.txt", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("model_type", "size"), [("bpe", 40), ("unigram", 28)])
def test_vocabulary_has_exactly_the_size_asked_for(tmp_path, model_type, size):
    path = tmp_path / "spm.model"
    train_sentencepiece(LINES, path, vocab_size=size, model_type=model_type)
    first = path.read_bytes()
    model = load_sentencepiece(path)
    assert len(model) == size
    assert len(pieces(model)) == size - 3  # without <unk>, <s>, </s>
    assert all(
        model.decode(encoded) == line for encoded, line in zip(encode(LINES, model), LINES, strict=True)
    )
    train_sentencepiece(LINES, path, vocab_size=size, model_type=model_type)
    assert path.read_bytes() == first


PIECES = {"vocab_type": "sentencepiece", "size": 28}


@pytest.mark.parametrize(
    ("there", "asked"),
    [({}, PIECES), (PIECES, {}), (PIECES, PIECES | {"size": 30}), (PIECES, PIECES | {"model_type": "bpe"})],
)
def test_another_vocabulary_is_replaced_by_force_alone_and_the_same_one_made_again(tmp_path, there, asked):
    folders = old, new = tmp_path / "old", tmp_path / "new"
    for folder, options in zip(folders, (there, asked), strict=True):
        build_vocabulary(lambda: LINES, folder, **options)
    before, after = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    build_vocabulary(lambda: LINES, old, **there)
    with pytest.raises(InputError, match=r"(dict\.txt|spm\.model) is of another vocabulary.* --force"):
        build_vocabulary(lambda: LINES, old, **asked)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    build_vocabulary(lambda: LINES, old, **asked, force=True)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == after


def test_characters_take_no_size(tmp_path, monkeypatch):
    script = str(Path(__file__).parents[2] / "scripts" / "build_vocabulary.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path / "train.tsv"), "--size", "500"])
    with pytest.raises(SystemExit, match="error: --size 500: characters are as many as there are"):
        runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize(
    ("lines", "size", "reason"),
    [
        (LINES, 5000, "Vocabulary size too high"),
        (LINES, 8, "smaller than required_chars"),
        ([], 40, "text is empty"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(tmp_path, lines, size, reason):
    with pytest.raises(InputError, match=rf"cannot learn {size} bpe pieces: .*{reason}"):
        train_sentencepiece(lines, tmp_path / "spm.model", vocab_size=size)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"character_coverage": 0.5}, "character coverage 0.5: sentencepiece takes 0.98 to 1"),
        ({"max_lines": 50}, "a sample of 50 lines: sentencepiece takes at least 101; 0 means all"),
        ({"vocab_size": 10**10}, "cannot learn 10000000000 bpe pieces: cannot parse"),
    ],
)
def test_numbers_that_sentencepiece_does_not_take(tmp_path, options, reason):
    with pytest.raises(InputError, match=reason):
        train_sentencepiece(LINES, tmp_path / "spm.model", **({"vocab_size": 40} | options))


def test_the_ids_of_a_dictionary_are_fairseqs(tmp_path):
    from fairseq.data import Dictionary

    path = tmp_path / "dict.txt"
    write_dictionary(path, {"a": 3, "|": 2, "\u00e9": 1})
    assert read_dictionary(path) == Dictionary.load(str(path)).indices
    path.write_text("a 3\nb\n")
    with pytest.raises(InputError, match=r"dict\.txt line 2: expected a symbol and a count, found b'b'"):
        read_dictionary(path)
    with pytest.raises(InputError, match=r"none\.txt: no such dictionary"):
        read_dictionary(tmp_path / "none.txt")


def test_what_is_not_covered_becomes_one_unknown_symbol(tmp_path):
    train_sentencepiece(LINES, tmp_path / "spm.model", vocab_size=40)
    model = load_sentencepiece(tmp_path / "spm.model")
    # a literal </s> must not end the sentence for fairseq: only its s is covered
    encoded = list(encode(["one </s> ten", ""], model))
    assert encoded[1] == []
    assert "</s>" not in encoded[0]
    assert Counter(encoded[0])[UNKNOWN] == 2


def test_byte_fallback_leaves_nothing_unknown_and_its_bytes_are_in_the_dictionary(tmp_path):
    train_sentencepiece(LINES, tmp_path / "spm.model", vocab_size=300, byte_fallback=True)
    model = load_sentencepiece(tmp_path / "spm.model")
    counts = sentencepiece_counts(LINES, model)
    assert len(counts) == 297
    assert counts["<0xC3>"] == 0
    assert counts["▁and"] == len(LINES)
    (encoded,) = encode(["ü"], model)
    assert encoded == ["▁", "<0xC3>", "<0xBC>"]
    assert set(encoded) <= counts.keys()


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "spm.model").write_text("hello")
    with pytest.raises(InputError, match=r"spm\.model is not a sentencepiece model"):
        load_sentencepiece(tmp_path / "spm.model")
