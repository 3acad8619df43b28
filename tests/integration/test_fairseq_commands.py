"""fairseq's own commands, run as users run them, with ``--user-dir user_dir`` and fairseq's own transformer."""

import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from speech_mt.checkpoint import load_checkpoint

from .conftest import BIN, PLUGIN, REPOSITORY, Done, Result, losses, running, weights, write_corpus

TINY = """--arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16
    --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2
    --optimizer adam --lr 0.01 --batch-size 7 --seed 7 --cpu --log-format json --log-interval 1"""
TRAIN = f"fairseq-train bin {PLUGIN} {TINY}"
TWO_RANKS = f"torchrun --standalone --nproc_per_node=2 '{BIN}'/{TRAIN}"
BLEU = """--eval-bleu --eval-bleu-args '{"beam": 1, "max_len_b": 10}' --best-checkpoint-metric bleu
    --maximize-best-checkpoint-metric"""
SHORT = "--max-update 4 --no-save --disable-validation"
BEST = f"bin {PLUGIN} --cpu --path straight/checkpoint_best.pt"

# name -> the command that has to be done before, and the command
COMMANDS = {
    "preprocess": (None, f"fairseq-preprocess {PLUGIN} -s de -t en --destdir bin --trainpref train --validpref valid "
                         "--testpref test"),
    "straight": ("preprocess", f"{TRAIN} --max-update 6 --save-interval-updates 3 --save-dir straight {BLEU}"),
    "two ranks": ("preprocess", f"{TWO_RANKS} --max-update 4 --save-interval-updates 2 --save-dir two"),
    "typo": (None, f"{TRAIN} --max-tokenz 40"),
    "no folder": (None, TRAIN.replace("bin", "nowhere", 1)),
    "bf16": ("preprocess", f"{TRAIN} {SHORT} --bf16"),
    "fp16": ("preprocess", f"{TRAIN} {SHORT} --fp16 --fp16-init-scale {2**30}"),
    "resumed": ("straight", f"{TRAIN} --max-update 6 --save-dir resumed --restore-file straight/checkpoint_1_3.pt"),
    "two resumed": ("two ranks", f"{TWO_RANKS} --max-update 4 --save-dir two_resumed --restore-file "
                                 "two/checkpoint_1_2.pt"),
    "generate": ("straight", f"fairseq-generate {BEST} --batch-size 7 --beam 2 --max-len-b 10"),
    "interactive": ("straight", f"fairseq-interactive {BEST} --input test.de --beam 2 --max-len-b 10"),
    "validate": ("straight", f"fairseq-validate {BEST} --batch-size 7"),
    "deeper": ("straight", f"{TRAIN} --encoder-layers 3 --restore-file straight/checkpoint_best.pt"),
    "malicious": ("preprocess", f"fairseq-generate bin {PLUGIN} --cpu --path evil.pt"),
    "cut short": ("preprocess", f"{TRAIN} --restore-file cut.pt"),
    "hydra": ("preprocess", "fairseq-hydra-train --config-dir . --config-name tiny"),
}  # fmt: skip

HYDRA = """
common: {cpu: true, log_format: json, user_dir: "${hydra:runtime.cwd}/plugin/user_dir"}
task: {_name: translation, data: "${hydra:runtime.cwd}/bin", source_lang: de, target_lang: en}
model:
  _name: transformer
  encoder: {layers: 1, embed_dim: 16, ffn_embed_dim: 16, attention_heads: 2}
  decoder: {layers: 1, embed_dim: 16, ffn_embed_dim: 16, attention_heads: 2}
criterion: {_name: cross_entropy}
optimizer: {_name: adam}
lr_scheduler: {_name: fixed}
optimization: {max_update: 2, lr: [0.01]}
dataset: {batch_size: 7}
checkpoint: {save_dir: "${hydra:runtime.cwd}/hydra"}
"""


class Malicious:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self):
        return os.system, ("touch witness",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a tiny corpus (reversed sentences), a hydra configuration and two bad checkpoints."""
    folder = tmp_path_factory.mktemp("commands")
    write_corpus(folder)
    (folder / "plugin").symlink_to(REPOSITORY)
    (folder / "tiny.yaml").write_text(HYDRA)
    torch.save(
        {"model": {}, "cfg": Malicious(), "extra_state": {}, "optimizer_history": []}, folder / "evil.pt"
    )
    (folder / "cut.pt").write_bytes((folder / "evil.pt").read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def result(folder) -> Iterator[Result]:
    """The finished command of a given name."""
    with running(folder, COMMANDS) as result:
        yield result


def error(done: Done) -> str:
    """The one line on stderr, but for what is said while fairseq is imported."""
    lines = [
        line
        for line in done.stderr.splitlines()
        if not re.match(r".*torch\.jit\.script|  warnings\.|INFO:", line)
    ]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_preprocess_logs_to_stdout_without_debug_lines(result):
    done = result("preprocess")
    assert done.returncode == 0
    assert "| INFO | fairseq_cli.preprocess | [de] train.de: 60 sents" in done.stdout
    assert "DEBUG" not in done.stderr


def test_a_training_says_nothing_on_stderr(result):
    """Nothing but what torch and fairseq say while they are imported."""
    noise = [line for line in result("straight").stderr.splitlines() if "warnings.warn(" not in line]
    assert all("torch.jit.script" in line or line.startswith("INFO:") for line in noise), noise


def test_every_sentence_is_trained_on_and_validated(result):
    log = result("straight").stdout
    valid = json.loads(re.findall(r"\| valid \| (\{.*\})", log)[-1])
    assert valid["valid_bsz"] == "6.7"  # 20 sentences in 3 batches: 7 + 7 + 6
    assert re.search(r"grouped total_num_itrs = 9", log)  # 60 in 9: 8 x 7 + 4


def test_a_resumed_training_is_the_uninterrupted_one(result, folder):
    straight, resumed = losses(result("straight")), losses(result("resumed"))
    assert list(resumed) == ["4", "5", "6"]
    assert resumed == {update: straight[update] for update in resumed}
    one, other = (weights(folder / run / "checkpoint_last.pt") for run in ("straight", "resumed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_ranks_train_one_model_and_resume(result, folder):
    straight, resumed = losses(result("two ranks")), losses(result("two resumed"))
    assert len(straight) == 4  # rank 0 alone logs
    assert list(resumed) == ["3", "4"]
    assert resumed == {update: straight[update] for update in resumed}
    one, other = (weights(folder / run / "checkpoint_last.pt") for run in ("two", "two_resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_ranks_share_each_update(result):
    """The first update of two ranks is two of the single process's batches, not one."""
    log = result("two ranks").stdout
    first = json.loads(re.search(r"train_inner \| (\{.*\})", log)[1])
    assert first["bsz"] == "14"
    assert "training on 2 devices" in log


def test_bf16_trains_on_a_cpu(result):
    full, half = losses(result("straight")), losses(result("bf16"))
    assert list(half) == ["1", "2", "3", "4"]
    assert all(abs(float(half[update]) - float(full[update])) < 0.05 for update in half)
    assert half != {update: full[update] for update in half}


def test_fp16_skips_overflowing_updates_on_a_cpu(result):
    done = result("fp16")
    assert "gradient overflow detected, ignoring gradient, setting loss scale to:" in done.stdout
    assert list(losses(done)) == ["1", "2", "3", "4"]


def test_generate_yields_every_hypothesis(result, folder):
    done = result("generate")
    assert done.returncode == 0, done.stderr
    assert {int(i) for i in re.findall(r"^H-(\d+)\t", done.stdout, re.MULTILINE)} == set(range(50))
    with zipfile.ZipFile(folder / "straight" / "checkpoint_best.pt") as checkpoint:
        pickled = next(checkpoint.read(name) for name in checkpoint.namelist() if name.endswith("data.pkl"))
    assert b"numpy" in pickled  # --eval-bleu keeps its score as a numpy scalar, and it loads


def test_interactive_translates_each_line(result, folder):
    done = result("interactive")
    assert (
        re.findall(r"^S-\d+\t(.*)", done.stdout, re.MULTILINE)
        == (folder / "test.de").read_text().splitlines()
    )
    assert len(re.findall(r"^H-\d+\t", done.stdout, re.MULTILINE)) == 50
    assert "rebuild_batches" not in done.stdout + done.stderr


def test_validate_needs_no_task_and_agrees_with_training(result):
    loss = re.search(r"valid on 'valid' subset \| loss ([\d.]+)", result("validate").stdout)[1]
    assert f'"valid_loss": "{loss}"' in result("straight").stdout


def test_hydra_train_with_a_relocatable_user_dir(result, folder):
    done = result("hydra")
    assert done.returncode == 0, done.stderr
    assert (
        load_checkpoint(folder / "hydra" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 2
    )


def test_a_malicious_checkpoint_is_refused_and_does_not_run(result, folder):
    done = result("malicious")
    assert done.returncode == 1
    assert re.match(r"error: evil\.pt: refused, .* call (posix|nt)\.system", error(done))
    assert not (folder / "witness").exists()


def test_a_checkpoint_cut_short_is_named(result):
    assert result("cut short").returncode == 1
    assert error(result("cut short")).startswith("error: cut.pt: cut short")


def test_a_checkpoint_of_another_depth_names_both(result):
    done = result("deeper")
    assert done.returncode == 1
    assert error(done) == (
        "error: straight/checkpoint_best.pt: the checkpoint does not fit the model: "
        "encoder.layers: the model has 3, the checkpoint 1 (the checkpoint lacks 1, 2)"
    )


def test_a_mistyped_option_is_one_line_with_the_nearest(result):
    done = result("typo")
    assert done.returncode == 2
    assert error(done).startswith("error: no option --max-tokenz: did you mean --max-tokens")


def test_a_missing_data_folder_is_one_line(result):
    done = result("no folder")
    assert done.returncode == 1
    assert error(done).startswith("error: nowhere: no such data folder; python scripts/prepare_text.py makes one")
