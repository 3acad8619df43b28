"""Which sample of a batch is not finite, and how often that may be."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from speech_mt.diagnostics.monitor import Monitor
from speech_mt.recovery.nonfinite import NonFiniteBudget, _causes, mark_nonfinite, take_row


def test_a_finite_loss_and_its_gradient_stay_bit_for_bit():
    x = torch.tensor([0.1, 0.7], requires_grad=True)
    (plain,) = torch.autograd.grad(x.exp().sum(), x)
    loss = mark_nonfinite(x.exp().sum())
    (marked,) = torch.autograd.grad(loss, x)
    assert loss == x.exp().sum()
    assert torch.equal(plain, marked)


def test_an_infinite_loss_has_no_finite_gradient():
    """Its own gradient is 1: fairseq would take the step."""
    x = torch.tensor(1.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(mark_nonfinite(x + torch.inf), x)
    assert gradient.isnan()


def test_the_budget_stops_once_it_is_spent():
    budget = NonFiniteBudget(allowed=1)
    budget.spend(4, "loss not finite for utterance 'u3'")
    assert (budget.skipped, budget.stop) == (1, "")
    budget.spend(8, "loss not finite for utterance 'u5'")
    assert budget.stop == "update 9: loss not finite for utterance 'u5' (--skip-nonfinite 1, 1 were skipped before)"


def test_a_row_is_a_batch_of_its_own():
    batch = {"id": torch.tensor([7, 9]), "ntokens": 5, "nsentences": 2, "net_input": {"x": torch.ones(2, 3)}}
    row = take_row(batch, 1)
    assert row["id"].tolist() == [9]
    assert row["nsentences"] == 1
    assert row["net_input"]["x"].shape == (1, 3)


class Square(nn.Module):
    """sqrt(w x): its gradient at x = 0 is infinite, its value is not."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))


def trainer():
    model = Square()
    criterion = SimpleNamespace(
        plain_loss=lambda m, s: ((m.w * s["net_input"]["x"]).sqrt().sum(), len(s["id"]), {}), watcher=Monitor()
    )
    return SimpleNamespace(get_model=lambda: model, get_criterion=lambda: criterion, _set_seed=lambda: None)


@pytest.mark.parametrize(
    ("values", "causes"),
    [
        ([1.0, 4.0, 9.0], {}),
        ([1.0, np.nan, 9.0], {1: "features"}),
        ([1.0, -4.0, 9.0], {1: "loss"}),
        ([1.0, 4.0, 0.0], {2: "gradient"}),
    ],
)
def test_the_guilty_sample_and_what_is_wrong_with_it(values, causes):
    sample = {"id": torch.tensor([3, 1, 2]), "net_input": {"x": torch.tensor(values)[:, None]}}
    assert _causes(trainer(), sample) == causes
