"""Tokenizers give the ids of the dictionary, and CTC's need of frames is counted right."""

import pytest

from speech_mt.data.transcripts import CharacterTokenizer, SentencePieceTokenizer, target_sizes
from speech_mt.data.vocabulary import load_sentencepiece, pieces, train_sentencepiece
from speech_mt.errors import InputError

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>"]
INDICES = {symbol: k for k, symbol in enumerate([*SYMBOLS, "|", "a", "b", "c", "🎧"])}


def encode_one_by_one(tokenizer, texts):
    return [tokenizer.encode([text])[0].tolist() for text in texts]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab c", [5, 6, 4, 7]),
        ("  a \u00a0 b ", [5, 4, 6]),
        ("a🎧", [5, 8]),
        ("", []),
        (" ", []),
        ("axb", [5, 3, 6]),
        ("a|b", [5, 3, 6]),  # not a space
        ("aB", [5, 3]),
    ],
)
def test_characters(text, ids):
    assert encode_one_by_one(CharacterTokenizer(INDICES), [text]) == [ids]


def test_lowercase_may_lengthen_a_text():
    indices = {**INDICES, "i": 9, "\u0307": 10}
    tokenizer = CharacterTokenizer(indices, lowercase=True)
    assert encode_one_by_one(tokenizer, ["AB", "İ"]) == [[5, 6], [9, 10]]


def test_unknown_characters_are_named():
    assert CharacterTokenizer(INDICES).unknown("a|é B") == {"|", "é", "B"}


def test_a_dictionary_without_word_boundary_is_refused():
    with pytest.raises(InputError, match="no word boundary"):
        CharacterTokenizer({symbol: k for k, symbol in enumerate([*SYMBOLS, "\u2581a"])})


def test_sizes_by_hand():
    texts = ["abc", "aab", "aaa a", "", "b", "bé", "ba"]
    sizes = target_sizes(texts, CharacterTokenizer(INDICES))
    assert sizes.units.tolist() == [3, 3, 5, 0, 1, 2, 2]
    # a blank between equal neighbours, never across texts ("b", "bé")
    assert sizes.ctc_frames.tolist() == [3, 4, 7, 0, 1, 2, 2]
    assert sizes.unknown.tolist() == [False, False, False, False, False, True, False]


def test_sizes_do_not_depend_on_batches(monkeypatch):
    texts = ["a" * k for k in range(20)]
    whole = target_sizes(texts, CharacterTokenizer(INDICES))
    monkeypatch.setattr("speech_mt.data.transcripts._TEXTS_AT_ONCE", 3)
    parts = target_sizes(iter(texts), CharacterTokenizer(INDICES))
    assert whole.units.tolist() == parts.units.tolist() == list(range(20))
    assert whole.ctc_frames.tolist() == parts.ctc_frames.tolist() == [max(0, 2 * k - 1) for k in range(20)]


@pytest.fixture(scope="module")
def spm_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "spm.model"
    train_sentencepiece(["hello world", "hello there", "other words"] * 10, path, vocab_size=30)
    return path


def test_sentencepiece_ids_are_the_dictionarys(spm_model):
    symbols = SYMBOLS + sorted(pieces(load_sentencepiece(spm_model)))  # another order than the model's
    tokenizer = SentencePieceTokenizer(spm_model, {symbol: k for k, symbol in enumerate(symbols)})
    texts = ["hello world", "", "other hello"]
    spelled = ["".join(symbols[k] for k in ids) for ids in encode_one_by_one(tokenizer, texts)]
    assert [text.replace("\u2581", " ").strip() for text in spelled] == texts
    together, lengths = tokenizer.encode(texts)
    assert together.tolist() == sum(encode_one_by_one(tokenizer, texts), [])
    assert lengths.tolist() == [len(ids) for ids in encode_one_by_one(tokenizer, texts)]


def test_what_sentencepiece_does_not_cover(spm_model):
    symbols = SYMBOLS + pieces(load_sentencepiece(spm_model))
    tokenizer = SentencePieceTokenizer(spm_model, {symbol: k for k, symbol in enumerate(symbols)})
    assert tokenizer.unknown("hello Ü") == {"Ü"}
    assert target_sizes(["hello", "Ü", "</s>"], tokenizer).unknown.tolist() == [False, True, True]


def test_dictionary_of_another_model_is_refused(spm_model):
    with pytest.raises(InputError, match="is not in the dictionary"):
        SentencePieceTokenizer(spm_model, INDICES)
