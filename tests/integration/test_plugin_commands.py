"""The plugin's models and criterions through fairseq's commands: resume, ranks, precisions, folding, speech."""

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile
import torch

import speech_mt
from speech_mt.checkpoint import load_checkpoint
from speech_mt.data.manifest import write_manifest
from speech_mt.errors import InputError

from .conftest import BIN, PLUGIN, REPOSITORY, Result, hypotheses, losses, running, weights, write_corpus

SCRIPTS = f"python {REPOSITORY}/scripts"
SIZE = """--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32
    --encoder-attention-heads 2"""
COMMON = "--optimizer adam --lr 0.01 --clip-norm 1 --batch-size 6 --seed 7 --cpu --log-format json --log-interval 1"
LABEL_SMOOTHED = "--criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 --monitor-interval 1"
OURS = f"fairseq-train bin {PLUGIN} --arch spectral_transformer {SIZE} {COMMON} {LABEL_SMOOTHED}"
SIGMA = f"{OURS} --reparam sigma --norm-placement deepnorm --reparam-gamma-init spectral"
TWO_RANKS = f"torchrun --standalone --nproc_per_node=2 '{BIN}'/{SIGMA}"
SHORT = "--max-update 3 --no-save --disable-validation"
DECODE = "--cpu --batch-size 7 --beam 2 --max-len-b 10 --required-batch-size-multiple 1"
SPEECH = f"fairseq-train speech {PLUGIN} --task speech_manifest {COMMON} --max-update 2"

COMMANDS = {
    "preprocess": (
        None,
        "fairseq-preprocess -s de -t en --destdir bin --trainpref train --validpref valid --testpref test",
    ),
    "vocabulary": (None, f"{SCRIPTS}/build_vocabulary.py speech/train.tsv"),
    "straight": ("preprocess", f"{SIGMA} --max-update 6 --save-interval-updates 3 --save-dir straight"),
    "two updates": ("preprocess", f"{SIGMA} {SHORT} --dropout 0 --update-freq 2"),
    "two ranks": ("preprocess", f"{TWO_RANKS} {SHORT} --dropout 0"),
    "recomputed": ("preprocess", f"{SIGMA} {SHORT} --checkpoint-activations"),
    "bf16": ("preprocess", f"{SIGMA} {SHORT} --bf16"),
    "memory-efficient fp16": ("preprocess", f"{SIGMA} {SHORT} --memory-efficient-fp16 --fp16-init-scale 4"),
    "ema": ("preprocess", f"{SIGMA} --max-update 3 --disable-validation --store-ema --save-dir ema"),
    "resumed": ("straight", f"{SIGMA} --max-update 6 --save-dir resumed --restore-file straight/checkpoint_1_3.pt"),
    "generate": ("straight", f"fairseq-generate bin {PLUGIN} {DECODE} --path straight/checkpoint_last.pt"),
    "again": ("straight", f"fairseq-generate bin {PLUGIN} {DECODE} --path straight/checkpoint_last.pt"),
    "fold": ("straight", f"{SCRIPTS}/fold_checkpoint.py straight/checkpoint_last.pt folded.pt"),
    "stock generate": ("fold", f"fairseq-generate bin {DECODE} --path folded.pt"),
    "reparam from": ("fold", f"{OURS} {SHORT} --reparam sigma --reparam-from folded.pt --dropout 0"),
    "plain from": ("fold", f"fairseq-train bin {PLUGIN} --arch transformer {SIZE} --decoder-embed-dim 16 "
                           f"--decoder-ffn-embed-dim 32 --decoder-attention-heads 2 {COMMON} {LABEL_SMOOTHED} {SHORT} "
                           "--finetune-from-model folded.pt --dropout 0"),
    "average": ("straight", f"{SCRIPTS}/average_checkpoints.py --inputs straight/checkpoint_1_3.pt "
                            "straight/checkpoint_last.pt --output average.pt"),
    "average generate": ("average", f"fairseq-generate bin {PLUGIN} {DECODE} --path average.pt"),
    "hydra": ("preprocess", f"fairseq-hydra-train --config-dir '{REPOSITORY}/examples/numbers/config' --config-name "
                            "sigma_reparam 'task.data=${hydra:runtime.cwd}/bin' "
                            "'common.user_dir=${hydra:runtime.cwd}/plugin/user_dir' "
                            "model.encoder_layers=1 model.decoder_layers=1 optimization.max_update=2 "
                            "common.log_format=json common.log_interval=1"),
    "ctc": ("vocabulary", f"{SPEECH} --arch spectral_ctc_transformer_tiny --encoder-layers 2 --encoder-embed-dim 16 "
                          "--encoder-attention-heads 2 --reparam sigma --value-spectrum smooth --specaugment lb "
                          "--criterion ctc_with_entropy --best-checkpoint-metric wer --keep-best-checkpoints 1 "
                          "--validate-interval-updates 1 --lr-scheduler plateau --lr-patience 0 --save-dir ctc"),
    "ctc generate": ("ctc", f"fairseq-generate speech {PLUGIN} --task speech_manifest --cpu --batch-size 2 "
                            "--path ctc/checkpoint_last.pt"),
    "s2t": ("vocabulary", f"{SPEECH} --arch spectral_s2t_transformer_tiny {SIZE} --value-spectrum sharpen "
                          "--value-basis general --token-mixing attn_scale,feat_scale,neutreno --weight-decay 0.01 "
                          "--criterion label_smoothed_cross_entropy_with_ctc_and_entropy --ctc-weight 0.3 "
                          "--save-dir s2t"),
    "s2t generate": ("s2t", f"fairseq-generate speech {PLUGIN} --task speech_manifest --cpu --batch-size 2 --beam 2 "
                            "--max-len-b 8 --path s2t/checkpoint_last.pt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny parallel corpus, and tones of random pitch that say words."""
    folder = tmp_path_factory.mktemp("plugin")
    write_corpus(folder)
    (folder / "plugin").symlink_to(REPOSITORY)
    generator = np.random.default_rng(0)
    (folder / "speech" / "audio").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        rows = []
        for i in range(5):
            seconds = 0.5 + 0.1 * i
            audio = f"audio/{split}{i}.flac"
            tone = np.sin(np.arange(int(16000 * seconds)) / 16000 * generator.integers(500, 5000))
            soundfile.write(folder / "speech" / audio, 0.3 * tone, 16000)
            text = ["two", "six ten", "one", "nine", "ten two"][i]
            rows.append({"id": f"{split}{i}", "audio": audio, "duration": seconds, "text": text})
        write_manifest(folder / "speech" / f"{split}.tsv", [row | {"speaker": "tone"} for row in rows])
    return folder


@pytest.fixture(scope="module")
def result(folder) -> Iterator[Result]:
    """The finished command of a given name."""
    with running(folder, COMMANDS) as result:
        yield result


def test_a_resumed_training_is_the_uninterrupted_one(result, folder):
    straight, resumed = losses(result("straight")), losses(result("resumed"))
    assert list(resumed) == ["4", "5", "6"]
    assert resumed == {update: straight[update] for update in resumed}
    one, other = (weights(folder / run / "checkpoint_last.pt") for run in ("straight", "resumed"))
    assert any("sigma_reparam.u" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_ranks_are_one_process_with_twice_the_update_frequency(result):
    """Without dropout, whose random numbers differ; up to the order of summation, which shows in the last digit."""
    ranks, updates = losses(result("two ranks")), losses(result("two updates"))
    assert list(ranks) == list(updates) == ["1", "2", "3"]
    assert all(float(ranks[update]) == pytest.approx(float(updates[update]), abs=2e-3) for update in ranks)


def test_activation_checkpointing_changes_no_loss(result):
    straight = losses(result("straight"))
    assert losses(result("recomputed")) == {update: straight[update] for update in ("1", "2", "3")}


@pytest.mark.parametrize("precision", ["bf16", "memory-efficient fp16"])
def test_low_precision_trains_close_to_float32(result, precision):
    straight, half = losses(result("straight")), losses(result(precision))
    assert list(half) == ["1", "2", "3"]
    assert all(abs(float(half[update]) - float(straight[update])) < 0.1 for update in half)


def test_ema_is_kept_beside_the_weights(result, folder):
    assert result("ema").returncode == 0, result("ema").stderr
    state = torch.load(folder / "ema" / "checkpoint_last.pt", weights_only=False)
    assert state["extra_state"]["ema"].keys() == state["model"].keys()


def test_generation_repeats_exactly(result):
    assert len(hypotheses(result("generate"))) == 100
    assert hypotheses(result("generate")) == hypotheses(result("again"))


def test_a_folded_checkpoint_decodes_in_stock_fairseq(result):
    """Without the plugin; DeepNorm folds into LayerNorm up to its eps, so scores may differ in the last digit."""
    assert "a stock fairseq transformer" in result("fold").stdout
    ours, stock = hypotheses(result("generate")), hypotheses(result("stock generate"))

    def split(lines):
        return [re.match(r"([HD]-\d+)\t(\S+)\t(.*)", line).groups() for line in lines]

    assert [(name, text) for name, _, text in split(ours)] == [(name, text) for name, _, text in split(stock)]
    scores = [[float(score) for _, score, _ in split(lines)] for lines in (ours, stock)]
    np.testing.assert_allclose(*scores, atol=2e-4)


def test_sigma_reparam_starts_from_a_stock_checkpoint_as_the_same_function(result):
    assert losses(result("reparam from"))["1"] == losses(result("plain from"))["1"]


def test_an_average_decodes(result):
    assert len(hypotheses(result("average generate"))) == 100


def test_entropy_is_in_the_training_log(result):
    entry = json.loads(re.search(r"train_inner \| (\{.*\})", result("straight").stdout)[1])
    expected = {f"entropy/{kind}/{layer:02d}" for kind in ("encoder", "decoder", "cross") for layer in (0, 1)}
    assert expected <= entry.keys()
    assert all(0 < float(entry[name]) < 3 for name in expected)


def test_hydra_trains_and_gamma_has_a_learning_rate_of_its_own(result):
    done = result("hydra")
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    assert re.search(r"Group : gamma:.*'lr': \[0\.004\]", log)
    assert re.search(r"sigma reparametrises 16 weights", log)
    assert re.search(r'"num_updates": "2"', log)


@pytest.mark.parametrize("model", ["ctc", "s2t"])
def test_speech_models_train_and_decode_every_utterance(result, model):
    assert list(losses(result(model))) == ["1", "2"]
    lines = hypotheses(result(f"{model} generate"))
    assert {line.split("\t")[0] for line in lines if line.startswith("H-")} == {f"H-{i}" for i in range(5)}


@pytest.mark.parametrize(
    ("checkpoint", "command", "options"),
    [
        ("straight/checkpoint_last.pt", "generate", {"beam": 2, "max_len_b": 10}),
        ("folded.pt", "stock generate", {"beam": 2, "max_len_b": 10}),
        ("ctc/checkpoint_last.pt", "ctc generate", {}),
        ("s2t/checkpoint_last.pt", "s2t generate", {"beam": 2, "max_len_b": 8}),
    ],
)
def test_a_loaded_model_says_what_generate_prints(result, folder, monkeypatch, checkpoint, command, options):
    """In the order of its inputs, whatever the batches; an empty text stays empty."""
    printed = [line.split("\t") for line in hypotheses(result(command)) if line.startswith("D-")]
    expected = [text for _, _, text in sorted(printed, key=lambda fields: int(fields[0].removeprefix("D-")))]
    monkeypatch.chdir(folder)
    model = speech_mt.load(checkpoint, "cpu")
    if hasattr(model, "translate"):
        texts = (folder / "test.de").read_text().splitlines()
        assert model.translate(texts, batch_size=7, **options) == expected
        found = model.translate(["", *texts[:2], " \t", texts[2]], batch_size=2, **options)
        assert found == ["", *expected[:2], "", expected[2]]
    else:
        files = [folder / "speech" / "audio" / f"test{i}.flac" for i in range(5)]
        assert model.transcribe(files, batch_size=2, **options) == expected


def test_a_translation_model_names_texts_that_are_too_long(result, folder, monkeypatch):
    assert result("straight").returncode == 0
    monkeypatch.chdir(folder)
    model = speech_mt.load("straight/checkpoint_last.pt", "cpu")
    long = "w1 " * 10_000
    with pytest.raises(InputError, match=r"2 of the texts have more than 1,024 tokens.* 1 \(10,001 tokens\), 3 \("):
        model.translate(["w1", long, "w2", long])
    assert isinstance(model.translate(["w1 unknown 漢字"], beam=1, max_len_b=5)[0], str)


def test_ctc_validation_reports_the_word_error_rate(result):
    assert re.search(r'"valid_wer": "[\d.]+"', result("ctc").stdout)


def test_the_best_checkpoint_by_word_error_rate_is_kept_and_the_plateau_with_it(result, folder):
    rates = [float(rate) for rate in re.findall(r'"valid_wer": "([\d.]+)"', result("ctc").stdout)]
    (kept,) = (folder / "ctc").glob("checkpoint.best_wer_*.pt")
    assert float(kept.stem.removeprefix("checkpoint.best_wer_")) == pytest.approx(min(rates), abs=1e-3)
    state = load_checkpoint(folder / "ctc" / "checkpoint_last.pt")["optimizer_history"][-1]["lr_scheduler_state"]
    assert state == {
        "best": min(rates),
        "plateaus": sum(rate >= min(rates[:i]) for i, rate in enumerate(rates) if i),
        "bad_validations": 0,
        "seen_at": 2,
    }
