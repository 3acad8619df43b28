"""Sharpness in the middle of a training: right, on a fixed batch, and without a trace."""

import pytest
import torch
from torch import nn

from speech_mt.criterions.sharpness_probe import SharpnessProbe
from speech_mt.errors import InputError


class Regression(nn.Module):
    """One linear layer after dropout, and a BatchNorm that is not trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 1, bias=False), nn.BatchNorm1d(3, affine=False).eval()

    def forward(self, x):
        return self.linear(nn.functional.dropout(x, 0.5, self.training))


def criterion(model, batch):
    """Sum of squares, number of rows, log."""
    return model(batch["x"]).square().sum(), len(batch["x"]), {}


def curvature(x):
    """The Hessian of the mean of (x w)^2 is 2 x^T x / n."""
    return torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1].item()


def test_the_largest_eigenvalue_on_the_first_batch_without_dropout():
    first, second = ({"x": torch.randn(5, 3)} for _ in range(2))
    model, probe = Regression().train(), SharpnessProbe(10)
    for updates, batch in ((0, first), (10, second)):
        assert probe.measure(criterion, model, batch, updates) == pytest.approx(curvature(first["x"]), rel=0.02)


def test_it_leaves_no_trace():
    model, batch = Regression(), {"x": torch.randn(5, 3)}
    model.train()
    model.norm.eval()
    state = torch.get_rng_state()
    SharpnessProbe(1).measure(criterion, model, batch, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.linear.weight.grad is None
    assert model.training
    assert not model.norm.training


def test_it_is_due_once_an_interval():
    model, batch, probe, due = Regression(), {"x": torch.randn(5, 3)}, SharpnessProbe(2), []
    for updates in (0, 0, 1, 1, 2, 2):  # two micro-batches an update
        due.append(probe.is_due(updates))
        if due[-1]:
            probe.measure(criterion, model, batch, updates)
    assert due == [True, False, False, False, True, False]


def test_half_precision_is_refused_in_one_message():
    with pytest.raises(InputError, match="--monitor sharpness: .*float32"):
        SharpnessProbe(1).measure(criterion, Regression().half(), {"x": torch.randn(5, 3).half()}, 0)


def test_the_interval_is_a_number_of_updates():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        SharpnessProbe(0)
