"""The plateau schedule: warm-up by updates, patience, and a state that a checkpoint keeps."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.optim import FairseqOptimizer

from speech_mt.errors import InputError
from speech_mt.optim.plateau import PlateauConfig, PlateauSchedule, telling


class SGD(FairseqOptimizer):
    def __init__(self):
        super().__init__(None)
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def schedule(**options):
    defaults = {"lr": [0.4], "maximize_best_checkpoint_metric": False, "warmup_updates": 0, "lr_patience": 0}
    return PlateauSchedule(PlateauConfig(**(defaults | options)), SGD())


def validations(plateau, metrics, first=10):
    """The learning rate after each validation, every 10 updates."""
    rates = []
    for i, metric in enumerate(metrics):
        plateau.step_update(first + 10 * i)
        plateau.validated(metric)
        rates.append(plateau.optimizer.get_lr())
    return rates


def test_warm_up_is_linear_and_sees_no_plateau():
    plateau = schedule(warmup_updates=4, warmup_init_lr=0.0)
    rates = []
    for update in range(6):
        rates.append(plateau.step_update(update))
        plateau.validated(50.0)  # never better; counted at updates 4 and 5
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert plateau.plateaus == 1


def test_the_rate_shrinks_after_patience_validations_without_improvement_and_again():
    plateau = schedule(lr_patience=1, lr_shrink=0.5)
    #               best  bad  bad: shrink  best  bad  bad: shrink
    metrics = [20.0, 20.0, 21.0, 19.0, 19.0, 19.5]
    assert validations(plateau, metrics) == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.2, 0.1])


def test_an_improvement_must_exceed_the_threshold_and_may_be_upwards():
    assert validations(schedule(lr_threshold=0.5), [20.0, 19.6, 19.0]) == pytest.approx([0.4, 0.2, 0.2])
    upwards = schedule(maximize_best_checkpoint_metric=True)
    assert validations(upwards, [1.0, 2.0, 1.5]) == pytest.approx([0.4, 0.4, 0.2])


def test_not_a_number_is_no_improvement():
    assert validations(schedule(), [float("nan"), 5.0, float("nan")]) == pytest.approx([0.2, 0.2, 0.1])


def test_a_validation_counts_once_though_fairseq_repeats_it_at_the_end_of_an_epoch():
    plateau = schedule(lr_patience=1)
    plateau.step_update(10)
    plateau.validated(20.0)
    plateau.step_update(20)
    plateau.validated(20.0)
    plateau.step(epoch=1, val_loss=20.0)
    assert (plateau.bad_validations, plateau.plateaus) == (1, 0)
    plateau.step(epoch=2, val_loss=None)
    assert plateau.bad_validations == 1


@pytest.mark.parametrize("cut", range(1, 6))
def test_resumed_anywhere_it_goes_on_as_if_never_stopped(cut):
    metrics = [20.0, 20.0, 21.0, 19.0, 19.0, 19.5, 19.0, 18.0]
    straight = schedule(lr_patience=2)
    expected = validations(straight, metrics)
    first = schedule(lr_patience=2)
    validations(first, metrics[:cut])
    resumed = schedule(lr_patience=2)
    resumed.load_state_dict(first.state_dict())
    assert validations(resumed, metrics[cut:], 10 + 10 * cut) == expected[cut:]
    assert resumed.state_dict() == straight.state_dict()


def test_fairseqs_validation_tells_the_schedule():
    plateau = schedule()
    plateau.step_update(7)
    trainer = SimpleNamespace(lr_scheduler=plateau)
    validate = telling(lambda cfg, trainer, *rest: [12.5, 40.0])
    assert validate(None, trainer, "task", "itr", ["dev-other", "dev-clean"]) == [12.5, 40.0]
    assert (plateau.best, plateau.seen_at) == (12.5, 7)
    telling(lambda *_: [None])(None, trainer)
    telling(lambda *_: [1.0])(None, SimpleNamespace(lr_scheduler=object()))  # another schedule
    assert plateau.best == 12.5


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr_shrink": 0.0}, "lr-shrink"), ({"lr_patience": -1}, "lr-patience"), ({"lr": [1.0, 2.0]}, "one --lr")],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(InputError, match=message):
        schedule(**options)
