"""What ``--on-collapse`` makes of fairseq's training loop."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from speech_mt.diagnostics import training_loop
from speech_mt.diagnostics.collapse import Collapse
from speech_mt.diagnostics.training_loop import acting_on_trouble
from speech_mt.errors import InputError

COLLAPSE = Collapse("rank collapse", "encoder", (1, 2), None, 7, "tokens are alike")


class Trainer:
    """As much of fairseq's as is asked."""

    def __init__(self, on_collapse, collapses):
        self.criterion = SimpleNamespace(on_collapse=on_collapse, collapses=collapses)
        self.saved = []

    def get_criterion(self):
        return self.criterion

    def get_num_updates(self):
        return 7

    def consolidate_optimizer(self):
        pass

    def save_checkpoint(self, path, extra_state):
        self.saved.append((str(path), extra_state))


def run(trainer):
    """One update of the loop; what it returns."""
    cfg = SimpleNamespace(
        checkpoint=SimpleNamespace(save_dir="run"),
        common=SimpleNamespace(tensorboard_logdir=None),
        distributed_training=SimpleNamespace(distributed_rank=0),
    )
    epoch = SimpleNamespace(state_dict=lambda: {"epoch": 2})
    loop = acting_on_trouble(lambda *arguments: ("stock", arguments[4:]))
    return loop(cfg, trainer, None, epoch, ["valid"], False)


SAVED = [("run/checkpoint_collapse_7.pt", {"train_iterator": {"epoch": 2}, "val_loss": None})]


def test_without_collapse_the_loop_is_fairseqs():
    trainer = Trainer("stop", [])
    assert run(trainer) == ("stock", (["valid"], False))
    assert trainer.saved == []


def test_checkpoint_saves_once_and_goes_on():
    trainer = Trainer("checkpoint", [COLLAPSE])
    for _ in range(2):
        assert run(trainer) == ("stock", (["valid"], False))
    assert trainer.saved == SAVED


def test_stop_saves_and_ends_in_one_message():
    trainer = Trainer("stop", [COLLAPSE])
    with pytest.raises(InputError) as error:
        run(trainer)
    assert str(error.value) == (
        "--on-collapse stop: update 7: rank collapse in encoder layers 1-2: tokens are alike; "
        "--restore-file run/checkpoint_collapse_7.pt goes on from here"
    )
    assert trainer.saved == SAVED


def test_criterions_without_a_monitor_are_left_alone():
    trainer = Trainer("stop", [])
    trainer.criterion = object()
    assert run(trainer)[0] == "stock"


def test_fairseq_train_is_wrapped_once(monkeypatch):
    module = ModuleType("fairseq_cli.train")
    module.validate_and_save = stock = lambda *_: "stock"
    monkeypatch.setitem(sys.modules, "fairseq_cli.train", module)
    for _ in range(2):
        training_loop.install()
    assert module.validate_and_save.__wrapped__ is stock
