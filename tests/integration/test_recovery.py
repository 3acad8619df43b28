"""Bad numbers are named, kept aside and left out; the run is the one that never saw them."""

import json
import re

import numpy as np
import pytest
import torch

from speech_mt.checkpoint import load_checkpoint
from speech_mt.data.manifest import write_manifest

from .commands import Commands
from .conftest import PLUGIN, REPOSITORY, write_corpus

BAD = "u2"
TRAIN = f"""fairseq-train speech {PLUGIN} --task speech_manifest --arch spectral_ctc_transformer_tiny --conv-channels 16
    --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --reparam sigma
    --criterion ctc_with_entropy --zero-infinity --optimizer adam --lr 0.01 --batch-size 1 --curriculum 9 --seed 7 --cpu
    --required-batch-size-multiple 1 --disable-validation --log-format json --log-interval 1 --max-epoch 1
    --monitor-interval 1"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory, command_server):
    """Cached features of six utterances of different lengths; in ``speech``, one of them holds a NaN."""
    folder = tmp_path_factory.mktemp("recovery")
    generator = np.random.default_rng(0)
    lengths = 30 + 4 * np.arange(6)
    features = generator.normal(size=(lengths.sum(), 80)).astype(np.float32)
    offsets = np.cumsum(lengths) - lengths
    for name in ("speech", "clean"):
        (folder / name).mkdir()
        bad = features.copy()
        bad[offsets[2] + 5, 3] = np.nan
        np.save(folder / name / "all.npy", bad)
        rows = [
            {"id": f"u{i}", "audio": "none.wav", "duration": frames / 100, "text": "one two", "speaker": "noise"}
            | {"features": "all.npy", "offset": offsets[i], "frames": frames}
            for i, frames in enumerate(lengths)
        ]
        rows = [row for row in rows if name == "speech" or row["id"] != BAD]
        for split in ("train", "valid"):
            write_manifest(folder / name / f"{split}.tsv", rows)
    commands = Commands(command_server, folder)
    for name in ("speech", "clean"):
        assert commands.run(f"{REPOSITORY}/scripts/build_vocabulary.py {name}/train.tsv").returncode == 0
    return commands


def state(commands, run):
    return load_checkpoint(commands.folder / run / "checkpoint_last.pt")


def equal(one, other):
    """Weights, u, v, gamma, and the optimizer's state, bit for bit."""
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    first, second = (s["last_optimizer_state"]["state"] for s in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[i][key], second[i][key]) for i in first for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_skipped_batch_leaves_no_trace(commands, precision):
    run = f"skipped{precision}"
    skipped = commands.run(f"{TRAIN} {precision} --skip-nonfinite 1 --save-dir {run}")
    assert skipped.returncode == 0, skipped.stderr
    assert f"features not finite for utterance '{BAD}'" in skipped.stdout
    clean = commands.run(f"{TRAIN} {precision} --save-dir clean{precision}".replace(" speech ", " clean "))
    assert clean.returncode == 0, clean.stderr
    equal(state(commands, run), state(commands, f"clean{precision}"))
    assert not list((commands.folder / run).glob("crash*"))


def test_what_was_skipped_is_kept_aside_unpickled(commands):
    commands.run(f"{TRAIN} --skip-nonfinite 1 --save-dir aside")
    (path,) = (commands.folder / "aside" / "nonfinite").iterdir()
    with np.load(path, allow_pickle=False) as kept:
        assert kept["causes"].tolist() == [f"utterance '{BAD}': features"]
        assert np.isnan(kept["net_input.src_tokens"]).any()


def test_a_spent_budget_is_one_message_and_a_checkpoint_that_goes_on(commands):
    """The task refuses such features by itself while nothing is to be skipped."""
    done = commands.run(f"{TRAIN} --save-dir refused")
    assert done.returncode == 1
    assert re.fullmatch(rf"error: .*utterance '{BAD}': its cached features are not finite.*\n", done.stderr)

    done = commands.run(f"{TRAIN} --skip-nonfinite 1 --max-epoch 2 --save-dir spent")
    assert done.returncode == 1
    message = (
        rf"error: update 9: features not finite for utterance '{BAD}' .*1 were skipped before\); --restore-file (\S+)"
    )
    match = re.match(message, done.stderr)
    assert match, done.stderr
    done = commands.run(f"{TRAIN} --skip-nonfinite 2 --max-epoch 2 --save-dir spent --restore-file {match[1]}")
    assert done.returncode == 0, done.stderr
    assert state(commands, "spent")["optimizer_history"][-1]["num_updates"] == 10
    assert state(commands, "spent")["extra_state"]["speech_mt"]["criterion"]["nonfinite_skipped"] == 2


def run_ranks(commands, command, count, port):
    """One process a rank, as torchrun starts them."""
    environment = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [commands.start(command, **environment, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    return [rank.wait() for rank in ranks]


def test_all_ranks_skip_together(commands):
    done = run_ranks(commands, f"{TRAIN} --skip-nonfinite 1 --save-dir two", 2, 29611)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    assert re.search(rf"rank \d: features not finite for utterance '{BAD}'", done[0].stdout)
    updates = [json.loads(line)["num_updates"] for line in re.findall(r"train_inner \| (\{.*\})", done[0].stdout)]
    assert updates == ["1", "2"]  # of three pairs of batches
    model = state(commands, "two")["model"]
    assert all(value.isfinite().all() for value in model.values())


def test_an_fp16_overflow_says_where_and_how_large_the_logits_are(commands):
    done = commands.run(
        f"{TRAIN} --skip-nonfinite 1 --fp16 --fp16-init-scale {2**30} --no-save".replace(" speech ", " clean ")
    )
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"update 1: overflow in (\d+) of (\d+) gradients, from (\S+) on; largest attention logit (\S+)", done.stdout
    )
    assert found, done.stdout
    assert 0 < int(found[1]) <= int(found[2])
    assert float(found[4]) == pytest.approx(0, abs=100)


def test_a_spike_of_the_loss_rolls_back_and_the_run_goes_on_at_a_smaller_rate(commands):
    """The fifth epoch's rate is 300 times too large: the loss leaps from 4 to 30 and more."""
    write_corpus(commands.folder)
    assert commands.run("fairseq-preprocess -s de -t en --destdir bin --trainpref train").returncode == 0
    done = commands.run(
        f"""fairseq-train bin {PLUGIN} --arch spectral_transformer --encoder-layers 2 --decoder-layers 2
        --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --reparam sigma --dropout 0
        --criterion label_smoothed_cross_entropy_with_entropy --optimizer adam --lr 0.01,0.01,0.01,0.01,3
        --lr-scheduler fixed --clip-norm 1 --batch-size 5 --seed 7 --cpu --disable-validation --max-epoch 5
        --save-interval-updates 4 --keep-interval-updates 1 --no-epoch-checkpoints --rollback-on-spike 0.1
        --log-format json --log-interval 1 --save-dir rolled"""
    )
    assert done.returncode == 0, done.stderr
    before, told, after = done.stdout.partition("the loss spiked: back to rolled/checkpoint_last.pt, update 48")
    assert told, before
    entries = r'train_inner \| .*?"loss": "([\d.]+)".*?"num_updates": "(\d+)", "lr": "([\d.]+)"'
    worst = max(float(loss) for loss, update, _ in re.findall(entries, before) if int(update) > 48)
    found = [(float(loss), int(update), float(lr)) for loss, update, lr in re.findall(entries, after)]
    assert worst > 20
    assert found[0][1] == 49
    assert all(loss < 6 and lr == 0.001 for loss, _, lr in found)
