"""A parallel text is checked, encoded and given one joint dictionary learned from the training data alone."""

import json
import sys

import pytest

from speech_mt.data import parallel_corpus
from speech_mt.data.parallel_corpus import (
    LengthLimits,
    ParallelCorpus,
    Vocabulary,
    prepare_parallel_corpus,
)
from speech_mt.data.vocabulary import UNKNOWN
from speech_mt.errors import InputError

VOCABULARY = Vocabulary(40)


@pytest.fixture
def corpus(tmp_path):
    """Twenty training pairs, one of them without a target; ``q`` is in valid and test only."""
    texts = {
        "train.de": "".join(f"haus {k} am see\n" for k in range(20)),
        "train.en": "".join(f"house {k} by the lake\n" for k in range(19)) + "\n",
        "valid.de": "haus 3 am see\nq\n",
        "valid.en": "house 3 by the lake\nq\n",
        "test.de": "\nhaus q\n",
        "test.en": "nothing\nhouse q\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return ParallelCorpus("de", "en", {split: str(tmp_path / split) for split in ("train", "valid", "test")})


@pytest.fixture
def binarised(monkeypatch):
    """The calls of fairseq-preprocess, which is not run: importing fairseq takes seconds."""
    calls = []

    def preprocess(encoded, dictionary, bin_dir, *rest):
        calls.append((encoded, dictionary, bin_dir, *rest))
        bin_dir.mkdir(exist_ok=True)
        for path in encoded.files():
            parallel_corpus.binarised_index(encoded, bin_dir, path).touch()

    monkeypatch.setattr(parallel_corpus, "fairseq_preprocess", preprocess)
    return calls


def test_every_stage(tmp_path, corpus, binarised):
    out = tmp_path / "out"
    prepare_parallel_corpus(corpus, out, VOCABULARY)
    assert (out / "raw/train.de").read_text().count("\n") == 19  # the pair with an empty side is gone
    assert (out / "raw/test.de").read_text().count("\n") == 2  # but held-out lines stay in place
    encoded = (out / "encoded/test.de").read_text(encoding="utf-8").split("\n")
    assert encoded[0] == ""
    assert encoded[1].replace(" ", "") == f"▁haus▁{UNKNOWN}"
    symbols = [line.split(" ")[0] for line in (out / "dict.txt").read_text(encoding="utf-8").splitlines()]
    assert len(symbols) == len(set(symbols)) == 37  # all pieces but <unk>, <s>, </s>
    assert "q" not in symbols  # nothing is learned from held-out text
    raw = json.loads((out / "report.raw.json").read_text())
    assert raw["splits"]["train"]["empty"] == raw["splits"]["test"]["empty"] == 1
    assert raw["also_in_train"] == {
        "valid": {"pairs": 1, "sources": 1},
        "test": {"pairs": 0, "sources": 0},
    }
    report = json.loads((out / "report.encoded.json").read_text())
    assert report["test.de"]["unknown"] == 1
    assert report["test.de"]["lines"] == 2
    assert report["test.de"]["longest_line"] == 2
    assert [args[1:3] for args in binarised] == [(out / "dict.txt", out / "bin")]


def test_a_second_run_does_nothing_and_a_changed_text_is_noticed(tmp_path, corpus, binarised, capsys):
    out = tmp_path / "out"
    prepare_parallel_corpus(corpus, out, VOCABULARY)
    capsys.readouterr()
    prepare_parallel_corpus(corpus, out, VOCABULARY)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["raw", "spm", "encoded", "bin"]
    assert all("done already" in line for line in lines)
    assert len(binarised) == 1
    with pytest.raises(InputError, match="model_type was bpe, is now unigram"):
        prepare_parallel_corpus(corpus, out, Vocabulary(40, "unigram"))
    with pytest.raises(InputError, match="max_length was None, is now 9"):
        prepare_parallel_corpus(corpus, out, VOCABULARY, LengthLimits(9))
    (tmp_path / "test.de").write_text("etwas\nhaus q\n")
    with pytest.raises(InputError, match="test source was"):
        prepare_parallel_corpus(corpus, out, VOCABULARY)


@pytest.mark.parametrize(
    ("deleted", "again"),
    [
        ("raw/test.en", ["raw"]),
        ("spm.model", ["spm"]),
        ("encoded/train.de", ["encoded"]),
        ("dict.txt", ["encoded"]),
        ("bin/train.de-en.en.idx", ["bin"]),
    ],
)
def test_what_was_deleted_is_made_again_as_it_was(tmp_path, corpus, binarised, capsys, deleted, again):
    out = tmp_path / "out"
    prepare_parallel_corpus(corpus, out, VOCABULARY)
    before = (out / deleted).read_bytes()
    (out / deleted).unlink()
    capsys.readouterr()
    prepare_parallel_corpus(corpus, out, VOCABULARY)
    assert (out / deleted).read_bytes() == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "is missing, so it is made again" in line] == again


@pytest.mark.parametrize("folder", ["raw", "encoded"])
def test_a_text_inside_the_result_is_not_overwritten(tmp_path, corpus, binarised, folder):
    inside = tmp_path / "out" / folder
    inside.mkdir(parents=True)
    (inside / "train.en").write_text("mine\n\n")
    corpus.prefixes["train"] = str(tmp_path / "out" / ".." / "out" / folder / "train")
    with pytest.raises(InputError, match=rf"{folder}/train\.de: the train text would be overwritten"):
        prepare_parallel_corpus(corpus, tmp_path / "out", VOCABULARY)
    assert (inside / "train.en").read_text() == "mine\n\n"


def test_an_impossible_vocabulary_can_be_mended_without_starting_over(tmp_path, corpus, binarised, capsys):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="too high"):
        prepare_parallel_corpus(corpus, out, Vocabulary(4000))
    capsys.readouterr()
    prepare_parallel_corpus(corpus, out, VOCABULARY)
    assert capsys.readouterr().out.startswith("raw: done already")


def test_sentences_over_fairseqs_limit_are_counted(tmp_path, corpus, binarised, capsys):
    # "haus" is two pieces and "hausq" three: with the end of the sentence, 1,024 pass and 1,025 do not
    (tmp_path / "test.de").write_text("haus " * 510 + "hausq\n" + "haus " * 512 + "\n")
    prepare_parallel_corpus(corpus, tmp_path / "out", VOCABULARY)
    report = json.loads((tmp_path / "out/report.encoded.json").read_text())["test.de"]
    assert (report["longest"], report["longest_line"], report["over_1024"]) == (1024, 2, 1)
    assert "1 lines of test.de exceed 1024 pieces" in capsys.readouterr().out


def test_further_test_sets_go_to_fairseq_together_and_what_it_made_is_counted(tmp_path, corpus, monkeypatch):
    """fairseq calls them test and test1; a line too many in one file would put source and target out of step."""
    corpus.prefixes["test1"] = corpus.prefixes["valid"]
    fairseq = tmp_path / "fairseq"
    sizes = " ".join(f"{split}:{n}" for split, n in {"train": 19, "valid": 2, "test": 2, "test1": 3}.items())
    fairseq.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, struct, sys\n"
        "print(*sys.argv)\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--destdir') + 1])\n"
        "out.mkdir()\n"
        f"for split, count in (size.split(':') for size in {sizes!r}.split()):\n"
        "    for side in 'de', 'en':\n"
        "        (out / f'{split}.de-en.{side}.idx').write_bytes(bytes(18) + struct.pack('<Q', int(count)))\n"
    )
    fairseq.chmod(0o755)
    monkeypatch.setattr(parallel_corpus.sys, "executable", str(fairseq))
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"made 3 sentences of the 2 lines of .*encoded/test1\.de"):
        prepare_parallel_corpus(corpus, out, VOCABULARY)
    assert f"--testpref {out}/encoded/test,{out}/encoded/test1" in (out / "preprocess.log").read_text()


def test_a_failing_fairseq_preprocess_is_reported_with_its_last_line(tmp_path, corpus, monkeypatch):
    fairseq = tmp_path / "fairseq"
    fairseq.write_text('#!/bin/sh\necho "$@"\necho disk full >&2\nexit 3\n')
    fairseq.chmod(0o755)
    monkeypatch.setattr(parallel_corpus.sys, "executable", str(fairseq))
    with pytest.raises(InputError, match=r"fairseq-preprocess failed, see .*preprocess\.log: disk full$"):
        prepare_parallel_corpus(corpus, tmp_path / "out", VOCABULARY)
    assert f"--testpref {tmp_path / 'out/encoded/test'}" in (tmp_path / "out/preprocess.log").read_text()
    assert not (tmp_path / "out/.bin.completed").exists()
