"""A number out of range gives one line that names the option, and code 2; nothing is begun."""

import runpy
import sys
from pathlib import Path

import pytest

from speech_mt.arguments import integer, non_negative_int, number, positive_int

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (positive_int, ["1", "20"], ["0", "-1", "1.5", "one", "", "inf"]),
        (non_negative_int, ["0"], ["-1"]),
        (integer(4, 6), ["4", "6"], ["3", "7"]),
        (number(0.98, 1), ["0.98", "1"], ["0.97", "1.01", "nan", "x"]),
        (number(1), ["1", "2.5"], ["0.9", "inf", "-1"]),
    ],
)
def test_ranges(parse, good, bad):
    assert [parse(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(Exception, match=f"{text!r} is not a .*number") as caught:
            parse(text)
        assert type(caught.value).__name__ == "ArgumentTypeError"


TEXT = ["--source-lang", "de", "--target-lang", "en", "--trainpref", "t", "--validpref", "v", "--destdir", "d"]
CORPUS = ["--root", "r", "--subsets", "s", "--out", "o"]


@pytest.mark.parametrize(
    ("script", "arguments", "option", "value"),
    [
        ("scripts/extract_features.py", ["m.tsv"], "--workers", "0"),
        ("scripts/extract_features.py", ["m.tsv"], "--workers", "-1"),
        ("scripts/extract_features.py", ["m.tsv"], "--num-mel-bins", "0"),
        ("scripts/extract_features.py", ["m.tsv"], "--sample-rate", "0"),
        ("scripts/build_vocabulary.py", ["m.tsv", "--vocab-type", "sentencepiece"], "--size", "0"),
        ("scripts/export_ctranslate2.py", ["c.pt", "o"], "--beam", "0"),
        ("scripts/export_ctranslate2.py", ["c.pt", "o"], "--sentences", "-5"),
        ("scripts/prepare_text.py", TEXT, "--vocab-size", "-5"),
        ("scripts/prepare_text.py", [*TEXT, "--vocab-size", "50"], "--character-coverage", "5"),
        ("scripts/prepare_text.py", [*TEXT, "--vocab-size", "50"], "--max-lines", "-1"),
        ("scripts/prepare_text.py", [*TEXT, "--vocab-size", "50"], "--max-length", "0"),
        ("scripts/prepare_text.py", [*TEXT, "--vocab-size", "50"], "--max-length-ratio", "0.5"),
        ("scripts/prepare_text.py", [*TEXT, "--vocab-size", "50"], "--workers", "0"),
        ("examples/librispeech/prepare.py", CORPUS, "--workers", "0"),
        ("examples/wmt_en_de/prepare.py", ["--out", "o"], "--workers", "0"),
        ("examples/librispeech/validate.py", ["d"], "--max-bad", "-1"),
    ],
)
def test_scripts_refuse_numbers_out_of_range(monkeypatch, capsys, script, arguments, option, value):
    monkeypatch.setattr(sys, "argv", [script, *arguments, option, value])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: {value!r} is not a " in last


def test_too_many_mel_bins_are_refused_by_the_rate(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["extract_features.py", "m.tsv", "--num-mel-bins", "100000"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "scripts" / "extract_features.py"), run_name="__main__")
    assert caught.value.code.startswith("error: --num-mel-bins 100000: has to be 4 to 256 at 16000 Hz")
