"""A word n-gram, by hand from the ARPA file."""

import builtins
import math

import pytest

from speech_mt.decoding.word_language_model import WordLanguageModel
from speech_mt.errors import InputError

ARPA = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-99\t<s>\t-0.3
-1.0\t</s>
-1.5\t<unk>
-0.5\ttwo\t-0.25
-0.7\tten\t-0.2

\\2-grams:
-0.2\t<s> two
-0.4\ttwo ten
-0.3\tten </s>

\\end\\
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "words.arpa"
    path.write_text(ARPA)
    return path


def test_a_missing_library_is_named_with_the_way_to_install_it(path, monkeypatch):
    stock = builtins.__import__

    def without_kenlm(name, *args, **kwargs):
        if name == "kenlm":
            raise ImportError(name)
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_kenlm)
    with pytest.raises(InputError, match="needs KenLM: pip install 'kenlm"):
        WordLanguageModel(path, 1.0)


class TestWithKenLM:
    @pytest.fixture(autouse=True)
    def kenlm(self):
        pytest.importorskip("kenlm", reason="KenLM is optional: pip install 'kenlm>=0.3,<0.4'")

    @pytest.mark.parametrize(
        ("texts", "log10", "words"),
        [
            (["two ", "ten"], -0.2 - 0.4 - 0.3, 2),  # three bigrams
            (["t", "w", "o", " ", " ", "te", "n "], -0.2 - 0.4 - 0.3, 2),  # however it is cut
            (["ten"], -0.3 - 0.7 - 0.3, 1),  # back off from <s>
            (["six"], -0.3 - 1.5 - 1.0, 1),  # <unk> after back-off; nothing follows it
            ([], -0.3 - 1.0, 0),  # <s> </s>
        ],
    )
    def test_scores_by_hand(self, path, texts, log10, words):
        model = WordLanguageModel(path, weight=0.5, word_bonus=2.0)
        judged = model.start()
        for text in texts:
            judged = model.extend(judged, text)
        assert model.finish(judged) == pytest.approx(0.5 * math.log(10) * log10 + 2.0 * words, abs=1e-6)

    def test_a_file_that_is_no_model_is_named(self, tmp_path):
        with pytest.raises(InputError, match=r"none\.arpa: no such n-gram"):
            WordLanguageModel(tmp_path / "none.arpa", 1.0)
        (tmp_path / "bad.arpa").write_text("two ten\n")
        with pytest.raises(InputError, match=r"bad\.arpa: not an n-gram .* format \(first non-empty line"):
            WordLanguageModel(tmp_path / "bad.arpa", 1.0)
