"""Sharpness equals the largest eigenvalue of a Hessian formed in full, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from speech_mt.diagnostics.sharpness import adam_preconditioner, sharpness


def quadratic(eigenvalues, dtype=torch.float64):
    """0.5 x^T H x with known eigenvalues in a random basis, x in two pieces."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(
        torch.randn(size, size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    ).Q
    hessian = basis * torch.tensor(eigenvalues, dtype=dtype) @ basis.T
    x = [
        torch.ones(2, 1, dtype=dtype, requires_grad=True),
        torch.ones(size - 2, dtype=dtype, requires_grad=True),
    ]

    def loss():
        flat = torch.cat([piece.flatten() for piece in x])
        return 0.5 * flat @ hessian @ flat

    return loss, x, hessian


BOTH = pytest.mark.parametrize("difference", [False, True])


@BOTH
@pytest.mark.parametrize(
    ("eigenvalues", "largest"),
    [
        ([5.0, 1.0, 0.5, 0.1], 5.0),
        ([2.0, 1.0, 0.5, -9.0], 2.0),  # the largest is not the one of largest modulus
        ([3.0, 1.0, 0.5, -3.0], 3.0),  # a Rayleigh quotient that stops moving without being an eigenvalue
        ([3.0] * 9 + [-3.0], 3.0),
        ([-1.0, -2.0, -3.0, -4.0], -1.0),
        ([0.0, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_known_eigenvalues(eigenvalues, largest, difference):
    loss, x, _ = quadratic(eigenvalues)
    found = sharpness(loss, x, tolerance=1e-6, max_iterations=200, difference=difference)
    assert found.eigenvalue == pytest.approx(largest, abs=1e-4)
    assert found.converged
    assert found.exact is not difference


def test_stops_at_max_iterations_and_says_so():
    loss, x, _ = quadratic([5.0, 4.9, 4.8, 4.7])
    found = sharpness(loss, x, tolerance=1e-12, max_iterations=3)
    assert not found.converged
    assert found.iterations == 6  # two passes


@BOTH
def test_preconditioned(difference):
    loss, x, hessian = quadratic([5.0, 1.0, 0.5, 0.1])
    diagonal = torch.tensor([0.01, 4.0, 0.2, 1.0], dtype=torch.float64)
    want = torch.linalg.eigvalsh(hessian / (diagonal.sqrt() * diagonal.sqrt()[:, None]))[-1].item()
    pieces = [diagonal[:2].view(2, 1), diagonal[2:]]
    found = sharpness(loss, x, pieces, tolerance=1e-8, max_iterations=2000, difference=difference)
    assert found.eigenvalue == pytest.approx(want, rel=1e-6)


def full_hessian(loss, parameters):
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), parameters, create_graph=True)])
    rows = [torch.autograd.grad(g, parameters, retain_graph=True) for g in gradient]
    return torch.stack([torch.cat([piece.flatten() for piece in row]) for row in rows])


class TinyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k, self.out = (
            nn.LayerNorm(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        x = self.norm(x)
        q, k = (p(x).unsqueeze(1) for p in (self.q, self.k))
        return self.out(x + F.scaled_dot_product_attention(q, k, k).squeeze(1))


@pytest.fixture
def transformer():
    torch.manual_seed(0)
    model, x = TinyTransformer().double(), torch.randn(2, 5, 4, dtype=torch.float64)
    target = torch.randint(3, (2, 5))
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1), target.flatten())


@BOTH
def test_a_transformer_with_fused_attention(transformer, difference):
    model, loss = transformer
    parameters = list(model.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.linalg.eigvalsh(full_hessian(loss, parameters))[-1].item()
    found = sharpness(loss, parameters, tolerance=1e-6, max_iterations=1000, difference=difference)
    assert found.eigenvalue == pytest.approx(want, rel=1e-3)
    assert found.residual < 1e-2 * want


def test_ctc_falls_back_on_differences_of_gradients():
    """Checked against the Hessian by differences in float64, one column at a time."""
    torch.manual_seed(0)
    x = torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True)

    def loss():
        lengths = torch.tensor([8, 8]), torch.tensor([2, 3])
        return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2, 0], [3, 1, 2]]), *lengths)

    columns = []
    for i in range(x.numel()):
        step = torch.zeros_like(x).flatten()
        step[i] = 1e-5
        ends = []
        for sign in (1, -1):
            x.data += sign * step.view_as(x)
            ends.append(torch.autograd.grad(loss(), x)[0].flatten())
            x.data -= sign * step.view_as(x)
        columns.append((ends[0] - ends[1]) / 2e-5)
    want = torch.linalg.eigvalsh(torch.stack(columns))[-1].item()
    found = sharpness(loss, [x], tolerance=1e-6, max_iterations=2000)
    assert not found.exact
    assert found.eigenvalue == pytest.approx(want, rel=1e-3)
    with pytest.raises(RuntimeError, match="not implemented"):
        sharpness(loss, [x], difference=False)


def test_differences_in_float32_agree_with_second_backward_passes():
    torch.manual_seed(0)
    model, x, target = TinyTransformer(), torch.randn(2, 5, 4), torch.randint(3, (10,))

    def loss():
        return F.cross_entropy(model(x).flatten(0, 1), target)

    exact = sharpness(loss, model.parameters(), max_iterations=500)
    difference = sharpness(loss, model.parameters(), max_iterations=500, difference=True)
    assert (exact.exact, difference.exact) == (True, False)
    assert difference.eigenvalue == pytest.approx(exact.eigenvalue, rel=5e-3)


@BOTH
def test_leaves_no_trace(transformer, difference):
    model, plain = transformer
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = [(p.clone(), p.data_ptr(), p._version) for p in model.parameters()]

    def loss():  # dropout draws from the global generator
        return plain() * F.dropout(torch.ones(50)).mean()

    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = sharpness(loss, model.parameters(), difference=difference)
    assert torch.equal(torch.get_rng_state(), state)
    assert sharpness(loss, model.parameters(), difference=difference) == first
    for p, (value, pointer, version) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert (p.data_ptr(), p._version) == (pointer, version)
        assert (p.grad == 7).all()
        assert p.grad_fn is None


def test_parameters_come_back_when_the_loss_fails():
    x = torch.ones(3, requires_grad=True)

    def loss():
        raise RuntimeError("out of memory")

    pointer = x.data_ptr()
    with pytest.raises(RuntimeError, match="out of memory"):
        sharpness(loss, [x], difference=True)
    assert x.data_ptr() == pointer
    assert x.tolist() == [1, 1, 1]


@BOTH
def test_works_under_no_grad_and_skips_what_has_no_curvature(difference):
    """3 x^2 + y: unused, linear and frozen parameters have curvature 0."""
    x, y, unused = (torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(3))
    frozen = torch.ones(())
    with torch.no_grad():
        found = sharpness(lambda: 3 * x * x + y * frozen, [x, y, unused, frozen], difference=difference)
    assert found.eigenvalue == pytest.approx(6, rel=1e-6)
    assert sharpness(lambda: y * 1, [y], difference=difference).eigenvalue == pytest.approx(0, abs=1e-6)


def test_adam_preconditioner_is_the_square_root_of_the_second_moment():
    """Constant gradient 3: v_hat = 9 at any step, so P = 3 + eps."""
    x = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([x], eps=1e-3)
    with pytest.raises(ValueError, match="no second moment"):
        adam_preconditioner(optimizer, [x])
    for _ in range(5):
        x.grad = torch.full_like(x, 3.0)
        optimizer.step()
    assert adam_preconditioner(optimizer, [x])[0].tolist() == pytest.approx([3.001, 3.001], rel=1e-5)
    with pytest.raises(ValueError, match="no second moment"):
        adam_preconditioner(optimizer, [torch.zeros(2)])


@pytest.mark.parametrize(
    ("parameters", "preconditioner", "message"),
    [
        ([torch.ones(2)], None, "no parameter"),
        ([torch.ones(2, dtype=torch.bfloat16, requires_grad=True)], None, "half precision"),
        ([torch.ones(2, requires_grad=True)], [torch.tensor([1.0, 0.0])], "positive"),
        ([torch.ones(2, requires_grad=True)], [torch.ones(3)], "preconditioner"),
    ],
)
def test_bad_arguments_are_refused(parameters, preconditioner, message):
    with pytest.raises(ValueError, match=message):
        sharpness(lambda: parameters[0].sum(), parameters, preconditioner)
