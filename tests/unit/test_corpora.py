"""Several corpora become one, and line k of both sides belongs together all the way to the binarised data."""

import random

import pytest
from sacrebleu.dataset import DATASETS

from speech_mt.data.corpora import concatenate, write_test_set
from speech_mt.data.moses import tokenize_file
from speech_mt.data.text import check_parallel, count_lines
from speech_mt.errors import InputError


@pytest.fixture
def corpus(tmp_path):
    """corpus(name, de, en): the two files."""

    def write(name, *texts):
        paths = [tmp_path / f"{name}.{language}" for language in ("de", "en")]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text)
        return paths

    return write


def test_corpora_follow_one_another_and_a_missing_last_newline_does_not_join_two_lines(corpus, tmp_path):
    parts = {"a": corpus("a", b"eins\nzwei", b"one\ntwo\n"), "b": corpus("b", b"drei\n", b"three")}
    outputs = [tmp_path / "all.de", tmp_path / "all.en"]
    assert concatenate(parts, outputs) == {"a": 2, "b": 1}
    assert [path.read_text() for path in outputs] == ["eins\nzwei\ndrei\n", "one\ntwo\nthree\n"]


def test_a_corpus_that_would_shift_the_next_one_is_refused_though_the_sums_agree(corpus, tmp_path):
    parts = {"a": corpus("a", b"1\n2\n", b"1\n"), "b": corpus("b", b"3\n", b"2\n3\n")}
    with pytest.raises(InputError, match=r"a: unequal numbers of lines, 2 in .*a\.de and 1 in .*a\.en"):
        concatenate(parts, [tmp_path / "all.de", tmp_path / "all.en"])
    assert not (tmp_path / "all.de").exists()


@pytest.mark.parametrize(("content", "lines"), [(b"a\n", 1), (b"a", 1), (b"\n\n", 2), (b"a\r\nb\rc\n", 2)])
def test_only_a_line_feed_ends_a_line(tmp_path, content, lines):
    (tmp_path / "text").write_bytes(content)
    assert count_lines(tmp_path / "text") == lines


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "text").touch()
    with pytest.raises(InputError, match="text is empty"):
        count_lines(tmp_path / "text")


def test_pairs_stay_together_whatever_is_dropped(corpus, tmp_path):
    """Both sides carry their number; empty sides, lengths, ratios, line separators and CRLF come at random."""
    draw = random.Random(1)
    lines = {"de": [], "en": []}
    for number in range(500):
        for side in lines.values():
            words = " ".join(["w"] * draw.choice([0, 1, 2, 3, 40]))
            text = f"{number}{draw.choice([' ', chr(0x2028), chr(0x85), chr(0x0B)])}{words}"
            side.append((text if draw.random() < 0.9 else "") + draw.choice(["\n", "\r\n"]))
    sources = corpus("t", *("".join(side).encode() for side in lines.values()))
    kept = tmp_path / "kept.de", tmp_path / "kept.en"
    report = check_parallel(*sources, drop=True, max_length=60, max_length_ratio=4, write_to=kept)
    numbers = [[line.split()[0] for line in path.read_text().split("\n")[:-1]] for path in kept]
    assert numbers[0] == numbers[1]
    assert numbers[0] == sorted(numbers[0], key=int)
    assert len(numbers[0]) == report.kept == 500 - report.empty - report.too_long - report.bad_ratio
    assert min(report.empty, report.too_long, report.bad_ratio) > 0


def test_moses_tokens_line_by_line(tmp_path):
    pytest.importorskip("sacremoses", reason="sacremoses is not installed: pip install 'speech_mt[moses]'")
    (tmp_path / "a.de").write_text("Ein Test, so-und-so.\n\nWie geht's?\n")
    assert tokenize_file(tmp_path / "a.de", tmp_path / "b.de", "de") == "3 lines of a.de"
    lines = (tmp_path / "b.de").read_text().split("\n")
    assert lines[0] == "Ein Test , so @-@ und @-@ so ."
    assert lines[1] == ""
    assert lines[2].endswith(" ?")


def test_an_unknown_test_set_or_language_pair_is_refused(tmp_path):
    with pytest.raises(InputError, match="knows no test set wmt99"):
        write_test_set("wmt99", ("en", "de"), tmp_path / "test")
    with pytest.raises(InputError, match="wmt13 has no en-xx"):
        write_test_set("wmt13", ("en", "xx"), tmp_path / "test")


def test_a_known_test_set_is_written_and_a_failing_download_is_one_message(tmp_path, monkeypatch, corpus):
    source, reference = corpus("set", b"a\nb\n", b"c\nd\n")
    wmt13 = type(DATASETS["wmt13"])
    monkeypatch.setattr(wmt13, "get_source_file", lambda self, pair: str(source))
    monkeypatch.setattr(wmt13, "get_reference_files", lambda self, pair: [str(reference)])
    assert write_test_set("wmt13", ("en", "de"), tmp_path / "out") == "2 sentences of wmt13 en-de"
    assert (tmp_path / "out.de").read_text() == "c\nd\n"

    def offline(self, pair):
        raise OSError("no network")

    monkeypatch.setattr(wmt13, "get_source_file", offline)
    with pytest.raises(InputError, match="cannot download wmt13 en-de: no network"):
        write_test_set("wmt13", ("en", "de"), tmp_path / "out")
