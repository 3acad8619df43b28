"""A DeepNorm + sigmaReparam model, trained by fairseq-train on number words, runs in CTranslate2 as in fairseq."""

import re

import pytest

from speech_mt.data.numbers import SplitSizes, write_number_pairs

from .conftest import PLUGIN, REPOSITORY, running

pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install 'speech_mt[deploy]'")
pytest.importorskip("num2words", reason="num2words is not installed: pip install 'speech_mt[demo]'")

SCRIPTS = f"python {REPOSITORY}/scripts"
COMMANDS = {
    "prepare": (
        None,
        f"{SCRIPTS}/prepare_text.py --source-lang de --target-lang en --trainpref words/train --validpref words/valid "
        "--testpref words/test --destdir data --vocab-size 150",
    ),
    "train": (
        "prepare",
        f"fairseq-train data/bin {PLUGIN} --cpu --task translation --arch spectral_transformer --share-all-embeddings "
        "--norm-placement deepnorm --reparam sigma --reparam-gamma-init spectral --encoder-layers 2 --decoder-layers 2 "
        "--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 4 --dropout 0 --optimizer adam "
        "--criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 --lr 1e-2 --max-tokens 600 "
        "--max-update 120 --disable-validation --seed 1 --save-dir model",
    ),
    "export": ("train", f"{SCRIPTS}/export_ctranslate2.py model/checkpoint_last.pt deployed --subset test"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ctranslate2")
    write_number_pairs(folder / "words", ("de", "en"), SplitSizes(train=600, valid=20, test=50), seed=1)
    return folder


@pytest.fixture(scope="module")
def result(folder):
    with running(folder, COMMANDS) as result:
        yield result


def test_greedy_translations_are_fairseqs(result):
    done = result("export")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "greedy search: 50 of 50 translations equal fairseq's" in done.stdout
    assert re.search(r"beam 5: \d+ of 50 translations equal", done.stdout)
