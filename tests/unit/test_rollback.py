"""After a spike: back to the last checkpoint, at a smaller rate, and not forever."""

from types import SimpleNamespace

import pytest
import torch

from speech_mt.errors import InputError
from speech_mt.recovery import rollback
from speech_mt.recovery.nonfinite import NonFiniteBudget
from speech_mt.recovery.rollback import MOST_ROLLBACKS, roll_back


@pytest.fixture
def trainer(tmp_path):
    """A real trainer's rate, updates and checkpoints, without a model: inverse square root, no warm-up, 0.1 at 1."""
    from fairseq.logging import metrics
    from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler
    from fairseq.trainer import Trainer

    class Schedule(FairseqLRScheduler):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step_update(self, updates):
            self.optimizer.set_lr(0.1 / max(updates, 1) ** 0.5)
            return self.optimizer.get_lr()

    class Optimizer:
        def __init__(self):
            self.param_groups = [{"lr": 0.0}, {"lr": 0.0}]

        def set_lr(self, rate):
            for group in self.param_groups:
                group["lr"] = rate

        def get_lr(self):
            return self.param_groups[0]["lr"]

    class Fake(Trainer):
        def __init__(self):
            self._num_updates, self._optimizer, self.quantizer = 16, Optimizer(), None
            self._lr_scheduler = Schedule(self._optimizer)
            self._criterion = SimpleNamespace(
                rollback_on_spike=0.5, lr_scale=1.0, rollbacks=0, nonfinite=NonFiniteBudget(3, skipped=2)
            )

        optimizer = property(lambda self: self._optimizer)
        lr_scheduler = property(lambda self: self._lr_scheduler)

        def load_checkpoint(self, path, reset_meters):
            assert reset_meters
            assert torch.load(path) == 9
            self._criterion.lr_scale, self._criterion.rollbacks, self._criterion.nonfinite.skipped = 1.0, 0, 0
            self.set_num_updates(9)

    rollback.install()
    torch.save(9, tmp_path / "checkpoint_last.pt")
    with metrics.aggregate(new_root=True):  # what is logged here is of no other test
        yield Fake()


def cfg(folder):
    return SimpleNamespace(checkpoint=SimpleNamespace(save_dir=folder))


def test_the_rate_is_the_schedules_times_the_factor_from_then_on(trainer, tmp_path):
    trainer.lr_step_update()
    assert trainer.get_lr() == pytest.approx(0.1 / 4)
    roll_back(cfg(tmp_path), trainer, 16)
    assert trainer.get_num_updates() == 9
    assert trainer.get_lr() == pytest.approx(0.1 / 3 / 2)
    for update in (10, 11):
        trainer.set_num_updates(update)
        trainer.lr_step_update()  # twice in an update, as at the end of an epoch
        assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.05 / update**0.5] * 2)
    roll_back(cfg(tmp_path), trainer, 11)
    assert trainer.get_lr() == pytest.approx(0.1 / 3 / 4)


def test_what_was_counted_is_not_rolled_back(trainer, tmp_path):
    roll_back(cfg(tmp_path), trainer, 16)
    criterion = trainer.get_criterion()
    assert (criterion.rollbacks, criterion.nonfinite.skipped, criterion.lr_scale) == (1, 2, 0.5)


def test_without_a_checkpoint_the_run_goes_on_and_says_so(trainer, tmp_path, caplog):
    roll_back(cfg(tmp_path / "empty"), trainer, 16)
    assert trainer.get_num_updates() == 16
    assert "there is no" in caplog.text


def test_it_gives_up_in_the_end(trainer, tmp_path):
    for _ in range(MOST_ROLLBACKS):
        roll_back(cfg(tmp_path), trainer, 16)
    with pytest.raises(InputError, match="spiked again after 10 rollbacks"):
        roll_back(cfg(tmp_path), trainer, 16)
