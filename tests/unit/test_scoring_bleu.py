"""BLEU and chrF equal sacrebleu's, by their stated conventions, and every score carries its signature."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from speech_mt.errors import InputError
from speech_mt.scoring.bleu import score_bleu, split_compounds
from speech_mt.scoring.hypotheses import ParallelText, read_parallel

SCRIPT = Path(__file__).parents[2] / "scripts" / "score_bleu.py"
HYPOTHESES = ["The cat sat on the mat.", "A well-known state-of-the-art system works.", "It is so."]
REFERENCES = ["The cat sat on a mat.", "A well-known state-of-the-art method works.", "That is so, indeed."]


def parallel(hypotheses, *references):
    ids = [str(i) for i in range(len(hypotheses))]
    return ParallelText(hypotheses, list(references), ids, {"hypotheses": "hyp", "reference": "ref"}, [])


def score(report, name):
    return next(score for score in report.scores if score.name == name)


def test_bleu_of_one_sentence_by_hand():
    # 5 tokens against 5: matches 4/5, 3/4, 2/3, 1/2, no brevity penalty
    report = score_bleu(parallel(["a b c d x"], ["a b c d e"]))
    assert score(report, "BLEU").score == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_brevity_penalty_by_hand():
    report = score_bleu(parallel(["a b c d"], ["a b c d e"]))
    assert score(report, "BLEU").score == pytest.approx(100 * math.exp(1 - 5 / 4))


def test_scores_and_signatures_are_those_of_sacrebleu_with_several_references():
    references = [REFERENCES, ["The cat was on the mat.", "It works.", "It is so."]]
    report = score_bleu(parallel(HYPOTHESES, *references))
    assert score(report, "BLEU").score == sacrebleu.corpus_bleu(HYPOTHESES, references).score
    assert score(report, "chrF").score == sacrebleu.corpus_chrf(HYPOTHESES, references).score
    assert score(report, "BLEU").signature.startswith("nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "nc:6|nw:0" in score(report, "chrF").signature


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ("well-known", "well ##AT##-##AT## known"),
        ("state-of-the-art", "state ##AT##-##AT## of ##AT##-##AT## the ##AT##-##AT## art"),
        ("a-b-c", "a ##AT##-##AT## b-c"),
        ("a - b -c d-", "a - b -c d-"),
    ],
)
def test_compounds_are_split_as_by_get_ende_bleu(tokens, split):
    assert split_compounds(tokens) == split


def test_compound_split_bleu_by_hand():
    # hypothesis a ##AT##-##AT## b c d, reference a ##AT##-##AT## b c e: 4/5, 3/4, 2/3, 1/2
    report = score_bleu(parallel(["a-b c d"], ["a-b c e"]), compound_split=True)
    split = score(report, "compound-split BLEU")
    assert split.score == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert "|tok:13a+compound_split|smooth:none|" in split.signature
    assert "|tok:13a|smooth:exp|" in score(report, "BLEU").signature


def test_compound_split_bleu_is_not_smoothed():
    report = score_bleu(parallel(["a b x c d"], ["a b y c d"]), compound_split=True)
    assert score(report, "compound-split BLEU").score == 0
    assert score(report, "BLEU").score > 0


def test_tokenized_text_is_split_on_spaces_only_and_says_so():
    text = parallel(["it 's don't ( x )"], ["it 's don't ( x )"])
    report = score_bleu(text, tokenized=True, compound_split=True)
    assert "tok:none|" in score(report, "BLEU").signature
    assert "tok:none+compound_split|" in score(report, "compound-split BLEU").signature
    assert "6 hypothesis and 6 reference tokens" in score(report, "BLEU").details


def test_text_that_looks_tokenized_is_warned_about_unless_declared():
    text = parallel(["so it is ."], ["so it was ."])
    assert any("--tokenized" in warning for warning in score_bleu(text).warnings)
    assert score_bleu(text, tokenized=True).warnings == []


def test_each_sentence_is_in_one_length_bucket_scored_alone():
    references = ["w " * n + "end" for n in (0, 9, 10, 60)]  # 1, 10, 11 and 61 words
    hypotheses = [references[0], references[1], "nothing alike", references[3]]
    buckets = score_bleu(parallel(hypotheses, references), by_length=True).by_length
    assert [(b.shortest, b.longest, b.sentences) for b in buckets] == [(0, 10, 2), (11, 20, 1), (51, None, 1)]
    assert [round(b.bleu, 6) for b in buckets] == [100, 0, 100]
    assert buckets[1].length_ratio == pytest.approx(2 / 11)


@pytest.mark.parametrize("references", [[["", " "]], [["a", "b"], ["", ""]], [[], []]])
def test_a_reference_without_words_is_refused(references):
    with pytest.raises(InputError, match="ref has no words: BLEU needs some"):
        score_bleu(parallel(["", "a"][: len(references[0])], *references))


def test_empty_sentences_are_scored():
    report = score_bleu(parallel(["", "a"], ["", "b"]), by_length=True, compound_split=True)
    assert [score.score for score in report.scores] == [0, 0, 0]
    assert report.by_length[0].length_ratio == 1


def test_a_clearly_better_system_is_significant_and_an_equal_one_is_not():
    references = [f"sentence number {i} says that {i * 7} things are good" for i in range(40)]
    worse = [f"sentence {i} says bad things" for i in range(40)]
    better = score_bleu(parallel(references, references), baseline=parallel(worse, references), n_samples=200)
    assert all(pair.p_value < 0.01 and pair.system > pair.baseline for pair in better.paired)
    assert [pair.metric for pair in better.paired] == ["BLEU", "chrF"]
    assert "bs:200|seed:" in better.paired[0].signature
    equal = score_bleu(parallel(worse, references), baseline=parallel(worse, references), n_samples=200)
    assert [pair.p_value for pair in equal.paired] == [1.0, 1.0]


def test_a_paired_test_on_two_test_sets_is_refused():
    with pytest.raises(InputError, match="different references"):
        score_bleu(parallel(["a"], ["a"]), baseline=parallel(["a"], ["b"]))


@pytest.fixture
def files(tmp_path):
    hypotheses, references = tmp_path / "hyp.txt", tmp_path / "ref.txt"
    hypotheses.write_text("\n".join(HYPOTHESES) + "\n")
    references.write_text("\n".join(REFERENCES) + "\n")
    return str(hypotheses), str(references)


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_script_prints_the_same_numbers_as_table_and_as_json(files):
    hypotheses, references = files
    options = [hypotheses, "--ref", references, "--compound-split", "--by-length", "--paired", references]
    report = json.loads(run_script(*options, "--json").stdout)
    table = run_script(*options).stdout
    assert [score["name"] for score in report["scores"]] == ["BLEU", "chrF", "compound-split BLEU"]
    for entry in report["scores"]:
        assert f"{entry['score']:.2f}  {entry['signature']}" in table
    assert report["by_length"][0]["sentences"] == 3
    assert report["paired"][0]["baseline"] == pytest.approx(100)


def test_script_refuses_in_one_line(files):
    result = run_script(files[0])
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    missing = run_script("no-such-file", "--ref", files[1])
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "no-such-file" in missing.stderr


@pytest.mark.skipif(not os.environ.get("SPEECH_MT_DATA"), reason="SPEECH_MT_DATA is not set")
def test_a_submitted_system_of_wmt21_gives_the_known_scores():
    stem = Path(os.environ.get("SPEECH_MT_DATA", "")) / "wmt" / "newstest2021.en-de"
    report = score_bleu(read_parallel(f"{stem}.hyp.Facebook-AI.de", [f"{stem}.ref.A.de"]))
    assert report.sentences == 1002
    assert round(score(report, "BLEU").score, 2) == 31.26
    assert round(score(report, "chrF").score, 2) == 60.65
