"""Sharpness: the largest eigenvalue of the Hessian of a loss, by power iteration on Hessian-vector products.

Gradient descent with step size eta is stable only while sharpness stays below 2/eta; for Adam what counts is
the preconditioned Hessian P^-1/2 H P^-1/2 with P = diag(sqrt(v_hat) + eps) (Cohen et al. 2022, arXiv
2207.14484).

Two ways to a product: a second backward pass, exact; and a central difference of two gradients, for losses that
torch cannot differentiate twice, such as CTC. Neither touches ``.grad``, the random state or the parameters.
Attention inside runs by its plain formula, for fused attention has no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Loss = Callable[[], Tensor]
Product = Callable[[Tensor], Tensor]


class Sharpness(NamedTuple):
    """Largest (most positive) eigenvalue, and how well it is known."""

    eigenvalue: float
    residual: float  # ||H v - eigenvalue v|| for the unit v found: some eigenvalue is at most this far away
    iterations: int  # Hessian-vector products taken
    converged: bool
    exact: bool  # by second backward passes, not by differences of gradients


def sharpness(
    loss: Loss,
    parameters: Iterable[Tensor],
    preconditioner: Sequence[Tensor] | None = None,
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    difference: bool | None = None,
    radius: float | None = None,
) -> Sharpness:
    """Largest eigenvalue of the Hessian of ``loss()`` with respect to ``parameters``.

    Args:
        loss: computes the scalar loss of one fixed batch, always from the same random state. It is called once,
            or with differences twice a product. Put the model in eval mode first, and use the model itself, not
            a DistributedDataParallel wrapper, whose hooks these gradients bypass.
        parameters: float32 or float64 leaves; those that do not require a gradient are left out.
        preconditioner: diagonal P, one positive tensor for each parameter, as :func:`adam_preconditioner` gives.
        tolerance: relative change of the Rayleigh quotient at which iteration stops, once the residual is
            below sqrt(tolerance) of it.
        max_iterations: most Hessian-vector products of a pass. Where the eigenvalue of largest modulus is
            negative, or one of each sign has it, a second pass on a shifted Hessian finds the largest.
        difference: False takes second backward passes, True differences of gradients, None differences only
            where a second derivative is not implemented.
        radius: L2 distance by which differences step off the parameters; by default 1e-2, in float64 1e-4.

    Raises:
        ValueError: no parameter requires a gradient, half-precision parameters, or a preconditioner that does
            not fit or is not positive.
        RuntimeError: ``difference=False`` and the loss cannot be differentiated twice.
    """
    parameters = list(parameters)
    if preconditioner is not None:
        preconditioner = [p for p, x in zip(preconditioner, parameters, strict=True) if x.requires_grad]
    parameters = [x for x in parameters if x.requires_grad]
    if not parameters:
        raise ValueError("no parameter requires a gradient")
    if any(torch.finfo(x.dtype).bits < 32 for x in parameters):
        raise ValueError("sharpness needs float32 or float64 parameters: half precision hides curvature")
    scale = _inverse_root(preconditioner, parameters)
    if radius is None:
        radius = 1e-4 if parameters[0].dtype == torch.float64 else 1e-2
    if difference is not True:
        try:
            product = _second_backward(loss, parameters)
            return _largest(lambda v: scale * product(scale * v), parameters, tolerance, max_iterations, True)
        except RuntimeError as error:
            if difference is False or "not implemented" not in str(error):
                raise
    product = _gradient_difference(loss, parameters, radius)
    return _largest(lambda v: scale * product(scale * v), parameters, tolerance, max_iterations, False)


def adam_preconditioner(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """P = sqrt(v_hat) + eps of each parameter, from the state of an Adam or AdamW (torch's or fairseq's).

    Raises:
        ValueError: a parameter has no second moment: no step was taken yet, or it is not the optimizer's.
    """
    groups = {id(x): group for group in optimizer.param_groups for x in group["params"]}
    diagonals = []
    for x in parameters:
        state = optimizer.state.get(x, {})
        if id(x) not in groups or "exp_avg_sq" not in state:
            raise ValueError(
                "Adam has no second moment for a parameter: take a step first, pass its own tensors"
            )
        group = groups[id(x)]
        correction = 1 - group["betas"][1] ** float(state["step"])
        diagonals.append((state["exp_avg_sq"] / correction).sqrt() + group["eps"])
    return diagonals


def _inverse_root(preconditioner: Sequence[Tensor] | None, parameters: list[Tensor]) -> Tensor:
    if preconditioner is None:
        return parameters[0].new_ones(())
    if any(p.shape != x.shape or not (p > 0).all() for p, x in zip(preconditioner, parameters, strict=True)):
        raise ValueError("preconditioner: want one positive number for each parameter")
    return _flatten(preconditioner).to(parameters[0]).rsqrt()


def _largest(
    product: Product, parameters: list[Tensor], tolerance: float, max_iterations: int, exact: bool
) -> Sharpness:
    generator = torch.Generator().manual_seed(0)
    size = sum(x.numel() for x in parameters)
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(parameters[0])
    value, residual, largest, first, settled = _power_iteration(product, start, tolerance, max_iterations)
    if settled and value >= 0:
        return Sharpness(value, residual, first, True, exact)
    # With H + |largest| no eigenvalue is negative, so that the one of largest modulus is the largest.
    value, residual, _, second, settled = _power_iteration(
        lambda v: product(v) + largest * v, start, tolerance, max_iterations
    )
    return Sharpness(value - largest, residual, first + second, settled, exact)


def _power_iteration(
    product: Product, v: Tensor, tolerance: float, max_iterations: int
) -> tuple[float, float, float, int, bool]:
    """Rayleigh quotient, residual, ||H v||, number of products, and whether it settled."""
    v = v / v.norm()
    value = residual = norm = float("nan")
    for iteration in range(1, max_iterations + 1):
        hv = product(v)
        last, value, norm = value, torch.dot(v, hv).item(), hv.norm().item()
        residual = (hv - value * v).norm().item()
        if norm == 0:
            return 0.0, 0.0, 0.0, iteration, True
        if abs(value - last) <= tolerance * abs(value) and residual <= tolerance**0.5 * abs(value):
            return value, residual, norm, iteration, True
        v = hv / norm
    return value, residual, norm, max_iterations, False


def _second_backward(loss: Loss, parameters: list[Tensor]) -> Product:
    with _undisturbed():
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
    # A parameter that is not used, or in which the loss is linear, has a gradient without a graph.
    curved = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    gradients = [gradients[i] for i in curved]

    def product(v: Tensor) -> Tensor:
        if not curved:
            return torch.zeros_like(v)
        pieces = _split(v, parameters)
        directions = [pieces[i] for i in curved]
        result = torch.autograd.grad(
            gradients, parameters, directions, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return _flatten(result)

    return product


def _gradient_difference(loss: Loss, parameters: list[Tensor], radius: float) -> Product:
    def gradient(step: Tensor) -> Tensor:
        originals = [x.data for x in parameters]  # other tensors stand in; these come back bit for bit
        try:
            for x, piece in zip(parameters, _split(step, parameters), strict=True):
                x.data = x.data + piece
            with _undisturbed():
                return _flatten(torch.autograd.grad(loss(), parameters, materialize_grads=True))
        finally:
            for x, original in zip(parameters, originals, strict=True):
                x.data = original

    def product(v: Tensor) -> Tensor:
        length = radius / v.norm()
        return (gradient(length * v) - gradient(-length * v)) / (2 * length)

    return product


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The same random numbers every time and none of training's; kernels that differentiate twice, rightly."""
    # cuDNN's CTC would pass for linear in its input.
    plain = torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
    with torch.random.fork_rng(), torch.enable_grad(), plain[0], plain[1]:
        yield


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = vector.split([x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]
