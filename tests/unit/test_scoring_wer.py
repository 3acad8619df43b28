"""The error rate is edits over reference words of the whole corpus, under a normalisation that is named."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from speech_mt.errors import InputError
from speech_mt.scoring.hypotheses import ParallelText, read_parallel
from speech_mt.scoring.normalization import Normalization
from speech_mt.scoring.wer import score_wer

SCRIPT = Path(__file__).parents[2] / "scripts" / "score_wer.py"


def parallel(hypotheses, references):
    ids = [f"u{i}" for i in range(len(hypotheses))]
    return ParallelText(hypotheses, [references], ids, {"hypotheses": "hyp", "reference": "ref"}, [])


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def test_counts_by_hand():
    report = score_wer(parallel(["the bat sat down", "a b", "x"], ["the cat sat", "a b c", "x"]))
    words = report.words
    assert (words.substitutions, words.deletions, words.insertions, words.reference) == (1, 1, 1, 7)
    assert words.rate == pytest.approx(100 * 3 / 7)
    # characters, spaces included: c -> b, " down" inserted; " c" deleted
    characters = report.characters
    assert (characters.substitutions, characters.deletions, characters.insertions) == (1, 2, 5)
    assert characters.reference == 11 + 5 + 1
    assert report.utterances == 3


def test_the_corpus_rate_is_not_the_mean_of_utterance_rates():
    assert score_wer(parallel(["x", "a b c d e f g h i"], ["y", "a b c d e f g h i"])).words.rate == 10


def test_an_empty_reference_counts_its_insertions():
    report = score_wer(parallel(["one two three", "a"], ["", "a"]))
    assert (report.words.insertions, report.words.reference, report.words.rate) == (3, 1, 300)


def test_an_empty_hypothesis_counts_deletions():
    assert score_wer(parallel([""], ["a b"])).words.deletions == 2


def test_references_without_words_have_no_error_rate():
    with pytest.raises(InputError, match="ref has no words"):
        score_wer(parallel(["a"], ["..."]), Normalization(remove_punctuation=True))


def test_totals_equal_an_independent_edit_distance():
    rng = random.Random(0)
    sentences = [[" ".join(rng.choices("abc", k=rng.randrange(9))) for _ in range(60)] for _ in range(2)]
    report = score_wer(parallel(*sentences))
    pairs = list(zip(*sentences, strict=True))
    assert report.words.errors == sum(edit_distance(r.split(), h.split()) for h, r in pairs)
    assert report.characters.errors == sum(edit_distance(r, h) for h, r in pairs)
    assert report.words.reference == sum(len(r.split()) for _, r in pairs)


def test_case_counts_unless_folding_is_asked_for_and_the_report_says_which():
    text = parallel(["hello"], ["HELLO"])
    as_is, lowercased = score_wer(text), score_wer(text, Normalization(lowercase=True))
    assert (as_is.words.rate, lowercased.words.rate) == (100, 0)
    assert "normalisation  none" in str(as_is)
    assert "normalisation  lower-cased" in str(lowercased)
    assert "--lowercase" in as_is.warnings[0]
    assert lowercased.warnings == []


def test_whitespace_never_counts():
    assert score_wer(parallel([" a\u00a0 b\t"], ["a b"])).characters.errors == 0


def test_worst_are_the_utterances_with_most_errors_and_never_the_correct_ones():
    text = parallel(["a", "x y z", "a q", "c"], ["b", "a b c", "a b", "c"])
    assert [(u.id, u.errors) for u in score_wer(text, worst=2).worst] == [("u1", 3), ("u0", 1)]
    assert len(score_wer(text, worst=9).worst) == 3
    assert score_wer(text).worst == []


def test_alignment_shows_each_edit_under_its_word():
    (worst,) = score_wer(parallel(["the bat sat now"], ["the cat sat"]), worst=1).worst
    assert worst.alignment.splitlines() == [
        "REF: the cat sat ***",
        "HYP: the bat sat now",
        "           S       I",
    ]


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_script_scores_generate_output_against_transcripts_by_row(tmp_path):
    hypotheses, transcripts = tmp_path / "generate-test.txt", tmp_path / "1-2.trans.txt"
    hypotheses.write_text("D-1\t-0.1\tgo, now\nD-0\t-0.1\thello world\n")
    transcripts.write_text("1-2-0000 HELLO WORLD\n1-2-0001 GO HOME\n")
    options = [hypotheses, "--ref", transcripts, "--lowercase", "--remove-punctuation", "--worst", "1"]
    report = json.loads(run_script(*options, "--json").stdout)
    assert report["wer"] == 25
    assert report["words"] == {"substitutions": 1, "deletions": 0, "insertions": 0, "reference": 4}
    assert report["worst"][0]["id"] == "1-2-0001"
    table = run_script(*options).stdout
    assert "WER   25.00%        1        1        0        0   4 words" in table
    assert "1-2-0001: 1 errors in 2 words" in table


def test_script_scores_sets_into_one_table(tmp_path):
    (tmp_path / "dev.txt").write_text("T-0\ta b c d\nD-0\t-0.1\ta x c\n")
    (tmp_path / "test.tsv").write_text("id\ttext\nu2\tfive six\nu1\ttwo\n")
    (tmp_path / "references.tsv").write_text("id\ttext\nu1\ttwo\nu2\tfive\n")
    sets = ["--set", f"dev={tmp_path}/dev.txt", "--set", f"test={tmp_path}/test.tsv:{tmp_path}/references.tsv"]
    header, dev, test = [line.split() for line in run_script(*sets).stdout.splitlines()[:3]]
    assert header == ["set", "utterances", "words", "WER", "subst.", "deleted", "inserted", "CER"]
    # "a b c d" against "a x c": one substitution, one deletion; 3 of 7 characters
    assert dev == ["dev", "1", "4", "50.00%", "1", "1", "0", "42.86%"]
    assert test == ["test", "2", "2", "50.00%", "0", "0", "1", f"{100 * 4 / 7:.2f}%"]
    both = json.loads(run_script(*sets, "--json").stdout)
    assert {name: report["wer"] for name, report in both.items()} == {"dev": 50, "test": 50}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "dev"], "error: --set dev: write NAME=HYP or NAME=HYP:REF\n"),
        (["--set", "dev=a", "--set", "dev=b"], "error: --set dev=b: there is a set dev already"),
        (["--set", "dev=a", "--worst", "3"], "write NAME=HYP:REF"),
        (["a", "--set", "dev=b"], "give one file HYP, or sets"),
        ([], "give one file HYP, or sets"),
    ],
)
def test_script_explains_sets(options, message):
    result = run_script(*options)
    assert result.returncode != 0
    assert message in result.stderr


def test_script_refuses_in_one_line(tmp_path):
    hypotheses, references = tmp_path / "hyp.txt", tmp_path / "ref.txt"
    hypotheses.write_text("a\nb\n")
    references.write_text("a\n")
    result = run_script(hypotheses, "--ref", references)
    assert result.returncode == 1
    assert result.stderr.startswith("error: 2 hypotheses")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not os.environ.get("SPEECH_MT_DATA"), reason="SPEECH_MT_DATA is not set")
def test_librispeech_transcripts_agree_with_themselves_lower_cased():
    paths = sorted(
        (Path(os.environ.get("SPEECH_MT_DATA", "")) / "LibriSpeech" / "test-other").rglob("*.trans.txt")
    )
    reports = [score_wer(read_parallel(path, [path])) for path in paths]
    assert sum(report.utterances for report in reports) == 100
    assert sum(report.words.reference for report in reports) == 1892
    assert sum(report.words.errors for report in reports) == 0
