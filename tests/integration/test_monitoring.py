"""The monitor in fairseq-train, on fairseq's own transformer: it changes nothing, sees everything, and ends a run."""

import json
import re
from collections.abc import Iterator

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speech_mt.plotting.runs import load_run

from .conftest import BIN, PLUGIN, Result, losses, running, write_corpus

TRANSFORMER = """--arch transformer --encoder-layers 4 --decoder-layers 4 --encoder-embed-dim 16 --decoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2"""
HOT = f"""fairseq-train bin {PLUGIN} {TRANSFORMER} --optimizer adam --lr 0.1 --batch-size 20 --seed 7 --cpu
    --log-format json --log-interval 10 --disable-validation --no-epoch-checkpoints --label-smoothing 0.1"""
CRITERION = "--criterion label_smoothed_cross_entropy_with_entropy"
WATCHED = f"{HOT} {CRITERION} --monitor-interval 1 --collapse-patience 30 --tensorboard-logdir tb"
ONE_LINE = WATCHED.replace("\n", " ")
TWO_RANKS = f"""torchrun --standalone --nproc_per_node=2 -- '{BIN}'/{HOT} {CRITERION} --update-freq 2
    --checkpoint-activations --monitor entropy,logits,spectra,smoothing --monitor-interval 2 --log-interval 2
    --max-update 2 --no-save --tensorboard-logdir tb2"""

COMMANDS = {
    "preprocess": (
        None,
        "fairseq-preprocess -s de -t en --destdir bin --trainpref train --validpref valid --testpref test",
    ),
    "stopped": ("preprocess", f"{WATCHED} --on-collapse stop --max-update 150 --save-dir stopped"),
    "unwatched": ("preprocess", f"{HOT} --criterion label_smoothed_cross_entropy --max-update 20 --no-save"),
    "goes on": ("stopped", f'bash -c "{ONE_LINE} --save-dir on --max-update 150 --restore-file stopped/*collapse*.pt"'),
    "two ranks": ("preprocess", TWO_RANKS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny corpus."""
    folder = tmp_path_factory.mktemp("monitoring")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def result(folder) -> Iterator[Result]:
    """The finished command of a given name."""
    with running(folder, COMMANDS) as result:
        yield result


def test_a_collapsing_run_ends_with_one_line_and_a_checkpoint(result, folder):
    done = result("stopped")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    pattern = (
        r"error: --on-collapse stop: update (\d+): \w+ collapse in (encoder|decoder|cross) .*; --restore-file (.*) goes"
    )
    match = re.match(pattern, last)
    assert match, done.stderr
    assert match[3] == f"stopped/checkpoint_collapse_{match[1]}.pt"
    assert (folder / match[3]).exists()
    assert re.search(rf"WARNING \| speech_mt\S* \| update {match[1]}: \w+ collapse in {match[2]}", done.stdout)


def test_losses_are_those_of_fairseqs_own_criterion(result):
    watched = re.findall(r"train_inner \| (\{.*\})", result("stopped").stdout)
    plain = losses(result("unwatched"))
    assert list(plain) == ["10", "20"]
    assert [json.loads(line)["loss"] for line in watched[:2]] == list(plain.values())


def test_going_on_appends_to_the_same_curves(result, folder):
    assert result("goes on").returncode == 0, result("goes on").stderr
    run = load_run(folder / "tb")
    steps = run.scalar("loss").steps.tolist()
    stop = int(re.search(r"checkpoint_collapse_(\d+)", result("stopped").stderr)[1])
    assert [*range(10, stop, 10), stop] == [step for step in steps if step <= stop]  # the last updates are not lost
    assert steps == sorted(set(steps))
    assert steps[-1] == 150
    assert {f"{name}/{kind}" for name in ("entropy", "max_logit") for kind in ("encoder", "decoder", "cross")} <= set(
        run.quantities
    )


def test_tensorboard_has_cards_heat_maps_and_charts(result, folder):
    result("goes on")
    events = EventAccumulator(str(folder / "tb" / "train_inner"), size_guidance={"tensors": 0, "images": 0})
    events.Reload()
    assert b"collapse" in events.Tensors("collapse/text_summary")[0].tensor_proto.string_val[0]
    assert {f"layer_by_head/entropy_normalised/{k}" for k in ("encoder", "decoder", "cross")} <= set(
        events.Tags()["images"]
    )
    assert events.Tensors("custom_scalars__config__")


def test_two_ranks_are_watched_through_recomputation_and_written_once(result, folder):
    done = result("two ranks")
    assert done.returncode == 0, done.stderr
    entry = json.loads(re.findall(r"train_inner \| (\{.*\})", done.stdout)[-1])
    for name in ("entropy", "max_logit", "query_key_norm"):
        for kind in ("encoder", "decoder", "cross"):
            assert f"{name}/{kind}/03" in entry
    assert 0 < float(entry["entropy_normalised/cross/03"]) <= 1
    assert len(list((folder / "tb2" / "train_inner").iterdir())) == 1
