"""Several processes on CPUs by gloo are one process with the same batches; they end together, and go on as fewer."""

import json
import re

import pytest
import torch

from speech_mt.checkpoint import load_checkpoint

from .commands import Commands
from .conftest import PLUGIN, losses, write_corpus

SCRIPT = """
import logging, os, sys, torch
logging.basicConfig(format="%(levelname)s | %(name)s | %(message)s", level="INFO", stream=sys.stdout)
from fairseq_cli import train
from fairseq.trainer import Trainer
step = Trainer.train_step
rank = int(os.environ.get("RANK", 0))

def train_step(self, samples, *args, **kwargs):
    if rank == 1 and self.get_num_updates() == int(os.environ.get("DIE_AT", -1)):
        from speech_mt.errors import InputError
        raise InputError("rank 1 has found a fault in its data")
    out = step(self, samples, *args, **kwargs)
    torch.save(self.get_model().state_dict(), f"{os.environ['DUMP']}-{rank}.pt")
    return out

Trainer.train_step = train_step
train.cli_main()
"""
TRAIN = f"""bin {PLUGIN} --arch spectral_transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --reparam sigma --optimizer adam --lr 0.01 --clip-norm 1
    --criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 --monitor entropy,logits,gamma,smoothing
    --monitor-interval 1 --dropout 0 --batch-size 5 --seed 7 --cpu --log-format json --log-interval 1 --max-update 3
    --disable-validation --no-epoch-checkpoints"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory, command_server):
    commands = Commands(command_server, tmp_path_factory.mktemp("ranks"))
    write_corpus(commands.folder)
    (commands.folder / "train_and_dump.py").write_text(SCRIPT)
    done = commands.run("fairseq-preprocess -s de -t en --destdir bin --trainpref train --validpref valid")
    assert done.returncode == 0, done.stderr
    return commands


PORTS = iter(range(29700, 29800))


def run_ranks(commands, count, options, dump, **environment):
    """One process a rank with torchrun's environment variables; 20 sentences an update, however many ranks."""
    command = f"./train_and_dump.py {TRAIN} --update-freq {4 // count} {options}"
    environment |= {"DUMP": dump}
    if count > 1:
        environment |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(PORTS))}
    ranks = [commands.start(command, **environment, RANK=str(r), LOCAL_RANK=str(r)) for r in range(count)]
    return [rank.wait() for rank in ranks]


def logged(done):
    return [json.loads(line) for line in re.findall(r"train_inner \| (\{.*\})", done.stdout)]


@pytest.fixture(scope="module")
def one(commands):
    (done,) = run_ranks(commands, 1, "--save-dir one", "one")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_are_one_process_with_the_same_batches(commands, one, count):
    """Up to the order of summation: 2e-3 of the loss, which is logged with three decimals, 1e-3 of what is measured."""
    done = run_ranks(commands, count, f"--save-dir ranks{count}", f"ranks{count}")
    assert [rank.returncode for rank in done] == [0] * count, done[0].stderr
    alone, together = losses(one), losses(done[0])
    assert list(alone) == list(together) == ["1", "2", "3"]
    assert [float(together[u]) for u in together] == pytest.approx([float(alone[u]) for u in alone], abs=2e-3)
    assert logged(done[1]) == []

    watched = ("entropy", "entropy_normalised", "max_logit", "gamma", "cosine", "hfc_lfc", "rank_residual")
    for expected, found in zip(logged(one), logged(done[0]), strict=True):
        names = [name for name in expected if name.startswith(watched)]
        assert len(names) > 20
        assert {n: float(found[n]) for n in names} == pytest.approx({n: float(expected[n]) for n in names}, rel=1e-3)

    states = [torch.load(commands.folder / f"ranks{count}-{rank}.pt") for rank in range(count)]
    assert any(name.endswith("sigma_reparam.u") for name in states[0])
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_at_the_same_place(commands, one, before, after):
    folder = f"from{before}to{after}"
    first = run_ranks(commands, before, f"--save-dir {folder} --max-update 1", folder)
    assert first[0].returncode == 0, first[0].stderr
    second = run_ranks(commands, after, f"--save-dir {folder}", folder)
    assert second[0].returncode == 0, second[0].stderr
    processes = "1 process" if before == 1 else f"{before} processes"
    assert f"the checkpoint is of {processes}, this run has {after}: it goes on after batch 4" in second[0].stdout
    found, expected = losses(second[0]), losses(one)
    assert list(found) == ["2", "3"]
    assert [float(found[u]) for u in found] == pytest.approx([float(expected[u]) for u in found], abs=2e-3)
    place = load_checkpoint(commands.folder / folder / "checkpoint_last.pt")["extra_state"]["train_iterator"]
    assert place["num_shards"] == after


def test_a_rank_that_dies_ends_the_job_with_its_message(commands):
    """As under torchrun, which ends the others: here their connection breaks."""
    done = run_ranks(commands, 2, "--no-save", "dead", DIE_AT="1")
    assert done[1].returncode == 1
    assert done[1].stderr == "[rank1]: error: rank 1 has found a fault in its data\n"
    assert done[0].returncode != 0
