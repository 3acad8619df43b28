"""Value spectrum: the value-output map of self-attention as H = W_V W_O = V diag(l) V^-1 with eigenvalues of one sign.

In the simplified model X <- X + A X H of "Setting the Record Straight on Transformer Oversmoothing" (arXiv 2401.04301)
the eigenvalues are 1 + l_j a_i, with those of attention, a_i, between -1 and 1 and one of them 1, whose eigenvector is
the same for all tokens. It dominates whenever l_j > 0 (tokens grow alike), and never while -1 <= l_j < 0:

    smooth     l = psi^2
    sharpen    l = -min(psi^2, 1)        (psi beyond 1 has no gradient)

V is the Q of a learned Theta = Q R (orthogonal basis: H is symmetric, its norm the largest modulus of l), or is
learned itself (general basis; V^-1 by solving). The diagonal of R is positive, which makes Q unique and continuous in
Theta: H would not notice another sign of a column of V, but the value bias and NeuTRENO's V - V0 would.

Rows are tokens: x -> x V (heads) diag(l) V^-1, so v_proj.weight = V^T and out_proj.weight = V^-T diag(l), (out, in).
Each head's own map has the eigenvalues of its columns of V. Biases stay: they move all tokens alike. The theory says
nothing about cross-attention, whose weights stay free. The factor of Theta or V is computed once an *update* (see
:meth:`ValueSpectrum.set_num_updates`), in float32; only its gradient is computed in every backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speech_mt.errors import InputError

SPECTRA = ("free", "smooth", "sharpen", "sharpen-first-half")
BASES = {"orthogonal": "theta", "general": "v"}  # and the name of the learned matrix
SMALLEST_PIVOT = 1e-6  # of R, against its largest: below, the gradient of Q explodes
LARGEST_CONDITION = 1e4  # of a general V: ||V||_F ||V^-1||_F / d, which is at most its condition number


class _Orthogonal(torch.autograd.Function):
    """Theta (d, d) -> its Q, which is known already; backward is that of the QR decomposition."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, q: Tensor, r: Tensor) -> Tensor:
        ctx.save_for_backward(theta, q, r)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        theta, q, r = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for, as for the Hessian's sharpness
            return _differentiable(lambda x: _qr(x)[0], theta, grad), None, None
        upper = torch.triu(q.mT @ grad)
        symmetric = upper + torch.triu(upper, 1).mT
        return torch.linalg.solve_triangular(r.mT, grad - q @ symmetric, upper=False, left=False), None, None


class _InverseTransposed(torch.autograd.Function):
    """V (d, d) -> V^-T, which is known already."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(v, inverse)
        return inverse.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        v, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(_solve_identity, v, grad), None
        return -(inverse @ grad.mT @ inverse), None


def _differentiable(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    return torch.autograd.grad(function(x), x, grad, create_graph=True)[0]


def _qr(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R with a positive diagonal of R; LAPACK's own signs jump with the entries of Theta, and differ on a GPU."""
    q, r = torch.linalg.qr(theta)
    signs = r.diagonal().sign()
    return q * signs, r * signs.unsqueeze(1)


def _solve_identity(v: Tensor) -> Tensor:
    """V^-T; scaling column j by l_j is then solving V^T X = diag(l). A singular V gives inf or NaN."""
    return torch.linalg.solve_ex(v.mT, torch.eye(len(v), dtype=v.dtype, device=v.device))[0]


class ValueSpectrum(nn.Module):
    """Theta (or V) and psi of one self-attention, and the two weights made of them.

    Both stay in float32 (float64 for a float64 model), whatever ``model.half()`` does to the other weights.

    Args:
        dim: d, the width of the attention.
        sign: 1 smooths, -1 sharpens.
        basis: a key of :data:`BASES`.
        scale: of the initial psi, which is uniform in [0, 1): an initial gain of W_V and of W_O becomes that of psi.
        like: dtype and device.
    """

    def __init__(
        self, dim: int, sign: int, basis: str = "orthogonal", scale: float = 1.0, like: Tensor | None = None
    ) -> None:
        super().__init__()
        like = torch.empty(0) if like is None else like.detach()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.matrix_name = BASES[basis]
        self.register_parameter(self.matrix_name, nn.Parameter(like.new_empty(dim, dim, dtype=dtype)))
        self.psi = nn.Parameter(like.new_empty(dim, dtype=dtype))
        self.register_buffer("sign", like.new_tensor(float(sign), dtype=dtype))  # so that a state dict explains itself
        self.sharpens = sign < 0
        nn.init.orthogonal_(self.matrix)
        nn.init.uniform_(self.psi, 0.0, scale)
        self._factors: tuple[tuple[int, int], tuple[Tensor, ...]] | None = None
        self._weights: tuple[Tensor, Tensor] | None = None  # during one forward of the attention
        self._num_updates: int | None = None

    @property
    def matrix(self) -> nn.Parameter:
        """Theta of the orthogonal basis, V of the general one, (d, d)."""
        return getattr(self, self.matrix_name)

    def eigenvalues(self) -> Tensor:
        """(d,): l, with gradient; head h has the h-th block of them."""
        squares = self.psi.square()
        return -squares.clamp(max=1.0) if self.sharpens else squares

    def basis(self) -> tuple[Tensor, Tensor]:
        """V and V^-T, (d, d) each, with gradient."""
        if self.matrix_name == "theta":
            q = _Orthogonal.apply(self.theta, *self._cached_factors())
            return q, q
        return self.v, _InverseTransposed.apply(self.v, *self._cached_factors())

    def weights(self) -> tuple[Tensor, Tensor]:
        """W_V and W_O as torch stores them: v_proj.weight, out_proj.weight, (d, d) each.

        Raises:
            InputError: Theta or V has become singular.
        """
        if self._weights is not None:
            return self._weights
        with torch.autocast(self.psi.device.type, enabled=False):
            v, inverse_transposed = self.basis()
            return v.mT, inverse_transposed * self.eigenvalues()

    @torch.no_grad()
    def _cached_factors(self) -> tuple[Tensor, ...]:
        # the version counts changes in place, but fairseq's optimizers go by .data, which it does not see
        key = self.matrix.data_ptr(), self.matrix._version
        if self._factors is None or self._factors[0] != key:
            factorise = self._orthogonal if self.matrix_name == "theta" else self._inverse
            self._factors = key, factorise(self.matrix.detach())
        return self._factors[1]

    def _orthogonal(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        q, r = _qr(theta)
        pivots = r.diagonal()
        if pivots.min() < SMALLEST_PIVOT * pivots.max():
            raise InputError(
                f"value spectrum: Theta is nearly singular (pivots of its R from {pivots.min():.1e} to "
                f"{pivots.max():.1e}), so its gradient is unbounded; train with a lower learning rate"
            )
        return q, r

    def _inverse(self, v: Tensor) -> tuple[Tensor]:
        inverse = _solve_identity(v)
        condition = v.norm() * inverse.norm() / len(v)
        if not condition < LARGEST_CONDITION and v.isfinite().all():
            raise InputError(
                f"value spectrum: the general basis V is nearly singular (condition number at least {condition:.1e}); "
                "train with a lower learning rate or with an orthogonal basis"
            )
        return (inverse,)

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq calls this before every micro-batch: Theta is decomposed once an update."""
        if num_updates != self._num_updates:
            self._num_updates, self._factors = num_updates, None

    # -- in its attention -------------------------------------------------------------------------------------

    def hook(self, attention: nn.Module) -> None:
        """Make both weights at once while the attention runs forward."""
        self._hooks = (
            attention.register_forward_pre_hook(self._enter_forward),
            attention.register_forward_hook(self._leave_forward, always_call=True),
        )

    def remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()

    def _enter_forward(self, *_: object) -> None:
        self._weights = self.weights()

    def _leave_forward(self, *_: object) -> None:
        self._weights = None

    # -- what PyTorch and fairseq do to modules ---------------------------------------------------------------

    def train(self, mode: bool = True) -> ValueSpectrum:
        if mode != self.training:
            self._factors = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ValueSpectrum:
        self._factors = None

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype in (torch.float32, torch.float64) else tensor.to(moved.device)

        return super()._apply(keep_precision, recurse)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object, **kwargs: object) -> None:
        self._factors = self._num_updates = None
        sign = state_dict.get(prefix + "sign")
        if sign is not None and (sign < 0) != self.sharpens:
            kinds = ("sharpens", "smooths") if sign < 0 else ("smooths", "sharpens")
            raise InputError(
                f"{prefix.removesuffix('.')}: the checkpoint {kinds[0]}, the model {kinds[1]}: use the checkpoint's "
                "--value-spectrum"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        basis = next(name for name, matrix in BASES.items() if matrix == self.matrix_name)
        return f"{len(self.psi)}, {'sharpen' if self.sharpens else 'smooth'}, {basis} basis"
