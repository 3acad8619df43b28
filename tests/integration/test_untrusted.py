"""Nothing runs that should not: pickles in checkpoints, wherever a path to one is taken; and no port is opened."""

import os
import re
from pathlib import Path

import pytest
import torch

from .commands import Commands
from .conftest import PLUGIN, REPOSITORY, write_corpus

TRAIN = f"""fairseq-train bin {PLUGIN} --arch spectral_transformer_tiny --optimizer adam --lr 0.01 --batch-size 20 --cpu
    --criterion label_smoothed_cross_entropy_with_entropy --max-update 2 --disable-validation --no-save --seed 1"""
SCRIPTS = f"{REPOSITORY}/scripts"
WAYS = {
    "--restore-file": f"{TRAIN} --restore-file evil.pt",
    "--finetune-from-model": f"{TRAIN} --finetune-from-model evil.pt --save-dir new",
    "--reparam-from": f"{TRAIN} --reparam sigma --reparam-from evil.pt",
    "fairseq-generate": f"fairseq-generate bin {PLUGIN} --cpu --path evil.pt",
    "fairseq-validate": f"fairseq-validate bin {PLUGIN} --cpu --batch-size 9 --path evil.pt",
    "average": f"{SCRIPTS}/average_checkpoints.py --inputs evil.pt evil.pt --output out.pt",
    "fold": f"{SCRIPTS}/fold_checkpoint.py evil.pt out.pt",
    "inspect": f"{SCRIPTS}/inspect_checkpoint.py evil.pt",
}


class Malicious:
    """Unpickled, it leaves a file behind."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch '{self.witness}'",)


@pytest.fixture(scope="module")
def commands(tmp_path_factory, command_server):
    commands = Commands(command_server, tmp_path_factory.mktemp("untrusted"))
    write_corpus(commands.folder)
    done = commands.run(
        "fairseq-preprocess -s de -t en --destdir bin --trainpref train --validpref valid --testpref test"
    )
    assert done.returncode == 0, done.stderr
    evil = {"model": {}, "cfg": {}, "optimizer_history": [], "args": Malicious(commands.folder / "witness")}
    torch.save(evil | {"extra_state": {}}, commands.folder / "evil.pt")
    return commands


@pytest.mark.parametrize("way", WAYS)
def test_a_malicious_checkpoint_is_refused_on_every_way_in(commands, way):
    done = commands.run(WAYS[way])
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: [^\n]*evil\.pt: refused, nothing was run: [^\n]* call \w+\.system[^\n]*\n", done.stderr
    )
    assert not (commands.folder / "witness").exists()


def test_one_explicit_variable_lets_a_trusted_file_in(commands):
    done = commands.run(WAYS["fold"], SPEECH_MT_TRUST_CHECKPOINTS="1")
    assert "refused" not in done.stderr
    assert (commands.folder / "witness").exists()
    (commands.folder / "witness").unlink()


def listening(pid: int) -> list[str]:
    """Local addresses on which a process accepts connections."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return found


def test_a_training_with_tensorboard_opens_no_port(commands):
    run = commands.start(f"{TRAIN} --max-update 30 --tensorboard-logdir tb --log-format json --log-interval 1")
    looked = 0
    while run.runs():
        if "train_inner" in run.output():
            looked += 1
            try:
                assert listening(run.pid) == []
            except FileNotFoundError:
                break
    assert run.wait().returncode == 0
    assert looked > 0
