"""Raw text through --bpe sentencepiece, and back."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from speech_mt.compat import raw_text
from speech_mt.data.vocabulary import detokenize, train_sentencepiece
from speech_mt.errors import InputError


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ("▁the ▁ca t", "the cat"),
        ("▁ <0xE2> <0x82> <0xAC> ▁5", "€ 5"),
        ("▁a <0xC3> <0xA9> <0xC3> <0xA8> b", "aéèb"),
        ("▁ <0xE2> <0x82> x", "\ufffdx"),  # a character cut short
        ("▁the <unk> s", "the<unk>s"),
        ("▁<0 xE2>", "<0xE2>"),  # written like a byte, in pieces that are not
        ("", ""),
    ],
)
def test_pieces_spell_text(pieces, text):
    assert detokenize(pieces.split(" ")) == text


METHODS = ("__init__", "encode", "decode")


@pytest.fixture
def bpe(tmp_path, monkeypatch):
    from fairseq.data import data_utils
    from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

    for owner, name in ((data_utils, "post_process"), *((SentencepieceBPE, name) for name in METHODS)):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # what is patched is put back
    raw_text.spell_bytes()

    def build(byte_fallback):
        lines = ["der hund läuft heute", "eine katze schläft", "das haus"] * 20
        size = 40 + 256 * byte_fallback
        train_sentencepiece(lines, tmp_path / "spm.model", vocab_size=size, byte_fallback=byte_fallback)
        options = {"sentencepiece_enable_sampling": False, "sentencepiece_alpha": None}
        return SentencepieceBPE(SimpleNamespace(sentencepiece_model=str(tmp_path / "spm.model"), **options))

    return build


@pytest.mark.parametrize("text", ["der hund läuft", "", "eine katze € 漢字", "a </s> das haus <0x41>"])
def test_text_comes_back_from_a_model_with_bytes(bpe, text):
    codec = bpe(byte_fallback=True)
    pieces = codec.encode(text)
    assert "</s>" not in pieces.split()
    assert codec.decode(pieces) == text


def test_what_a_model_without_bytes_lacks_is_unknown(bpe):
    codec = bpe(byte_fallback=False)
    assert codec.encode("das </s> 漢 haus").split().count("<unk>") >= 2
    assert "</s>" not in codec.encode("das </s> haus").split()


def test_words_that_were_joined_already_stay_apart(bpe):
    from fairseq.data import data_utils

    codec = bpe(byte_fallback=False)
    words = data_utils.post_process(codec.encode("der hund"), "sentencepiece")
    assert codec.decode(words) == words == "der hund"
    assert data_utils.post_process("t w o | s i x", "letter") == "two six"


def test_the_model_is_asked_for_by_name(bpe, tmp_path):
    from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

    with pytest.raises(InputError, match="--bpe sentencepiece needs the model: add --sentencepiece-model"):
        SentencepieceBPE(OmegaConf.structured(SentencepieceConfig))
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(InputError, match=r"text\.model is not a sentencepiece model"):
        SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(tmp_path / "text.model")))


def test_a_line_ends_at_line_feeds_only(tmp_path):
    path = tmp_path / "in.de"
    path.write_bytes("\ufeffein\u2028haus\r\n\n  zwei \nletzte".encode())
    assert list(raw_text.buffered_read(str(path), 3)) == [["ein haus", "", "zwei"], ["letzte"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"ja\ncaf\xe9\n", r"in\.de line 2 is not UTF-8 \(byte 0xE9"), (b"ein\rhaus\n", "line 1 holds a carriage return")],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, content, message):
    (tmp_path / "in.de").write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(raw_text.buffered_read(str(tmp_path / "in.de"), 10))
