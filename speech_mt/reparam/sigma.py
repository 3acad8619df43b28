"""sigmaReparam: W_hat = gamma / sigma(W) * W  (Zhai et al., ICML 2023, arXiv 2303.06296, section 3.2).

sigma(W) is the largest singular value, tracked by one power-iteration step an *update*:

    v <- normalize(W u),  u <- normalize(W^T v),  sigma = v^T W u.

u and v are constants of the gradient, sigma is not. With G = dL/dW_hat and c = <G, W>:

    dL/dW     = gamma / sigma * (G - c / sigma * v u^T)          so that <dL/dW, W> = 0: W's scale is free
    dL/dgamma = c / sigma

Shapes: W is (m, n), v (m,), u (n,). One :class:`SigmaReparam` serves all weights of one module (a Transformer
layer): a single gamma vector is one parameter for the optimizer, and one autograd node normalises them together,
which on a GPU, where each call costs time, is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

# Added to each power step as a fraction of the old vector: a zero matrix then keeps its u and v instead of losing them.
KEEP = 1e-15
# Below this a matrix counts as zero: it is left as it is (sigma taken as 1) rather than blown up.
SIGMA_FLOOR = 1e-12


class _Normalize(torch.autograd.Function):
    """(gamma (k,), sigma (k,), u, v, k matrices) -> k matrices gamma_i / sigma_i * W_i."""

    @staticmethod
    def forward(ctx: Any, gamma: Tensor, sigma: Tensor, us: tuple, vs: tuple, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(gamma, sigma, *us, *vs, *weights)
        ctx.set_materialize_grads(False)
        return tuple(torch._foreach_mul(weights, (gamma / sigma).unbind()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gamma, sigma, *tensors = ctx.saved_tensors
        k = len(grads)
        us, vs, weights = tensors[:k], tensors[k : 2 * k], tensors[2 * k :]
        used = [i for i, grad in enumerate(grads) if grad is not None]
        if torch.is_grad_enabled():  # a second derivative is asked for, as for the Hessian's sharpness
            return _differentiable_backward(gamma, us, vs, weights, grads, used)

        whole = len(used) == k
        if not whole:
            gamma, sigma = gamma[used], sigma[used]
        picked = [tuple(sequence[i] for i in used) for sequence in (grads, weights, us, vs)]
        rescale = _rescale_in_few_passes if gamma.device.type == "cpu" else _rescale_in_few_calls
        grad_gamma, grad_weights = rescale(gamma, sigma, *picked)
        if whole:
            return grad_gamma, None, None, None, *grad_weights
        return (
            grad_gamma.new_zeros(k).index_copy(0, torch.tensor(used, device=gamma.device), grad_gamma),
            None,
            None,
            None,
            *_spread(grad_weights, used, k),
        )


def _rescale_in_few_calls(gamma, sigma, grads, weights, us, vs) -> tuple[Tensor, list[Tensor]]:  # noqa: ANN001
    """dL/dgamma and the dL/dW of all weights together: on a GPU each call costs time."""
    products = torch._foreach_mul(grads, weights)
    grad_gamma = torch.stack([product.sum() for product in products]) / sigma
    scale = gamma / sigma
    grad_weights = torch._foreach_mul(grads, scale.unbind())
    lifts = torch._foreach_mul(vs, (scale * grad_gamma).unbind())
    for grad, lift, u in zip(grad_weights, lifts, us, strict=True):
        grad.addr_(lift, u, alpha=-1)
    return grad_gamma, list(grad_weights)


def _rescale_in_few_passes(gamma, sigma, grads, weights, us, vs) -> tuple[Tensor, list[Tensor]]:  # noqa: ANN001
    """The same, one weight after the other: on a CPU each pass over memory, and each new page, costs time."""
    products = [torch.dot(g.reshape(-1), w.reshape(-1)) for g, w in zip(grads, weights, strict=True)]
    grad_gamma = torch.stack(products) / sigma
    scale = gamma / sigma
    lift = scale * grad_gamma
    pairs = zip(grads, vs, us, scale.tolist(), lift.tolist(), strict=True)
    return grad_gamma, [torch.addr(g, v, u, beta=a, alpha=-b) for g, v, u, a, b in pairs]


def _spread(values: Sequence[Tensor], indices: list[int], length: int) -> list[Tensor | None]:
    """A list of ``length`` with the values at their indices and None elsewhere."""
    spread: list[Tensor | None] = [None] * length
    for i, value in zip(indices, values, strict=True):
        spread[i] = value
    return spread


def _differentiable_backward(gamma, us, vs, weights, grads, used) -> tuple[Tensor | None, ...]:  # noqa: ANN001
    """The same gradients through ordinary operations, so that they can be differentiated again."""
    hats = [gamma[i] / _floored(torch.dot(vs[i], weights[i] @ us[i])) * weights[i] for i in used]
    wanted = [gamma, *(weights[i] for i in used)]
    wanted_grads = torch.autograd.grad(hats, wanted, [grads[i] for i in used], create_graph=True, allow_unused=True)
    return wanted_grads[0], None, None, None, *_spread(wanted_grads[1:], used, len(grads))


def _full_precision(weight: Tensor) -> Tensor:
    return weight if weight.dtype in (torch.float32, torch.float64) else weight.float()


def _floored(sigma: Tensor) -> Tensor:
    return sigma.masked_fill(sigma < SIGMA_FLOOR, 1.0)


class Matrix(NamedTuple):
    """Where a raw matrix W is: a parametrised weight, or one of the equal row blocks of a fused one."""

    weight: ParametrizationList
    chunk: int = 0
    chunks: int = 1

    def raw(self) -> Tensor:
        """(m, n); a convolution's (out, in, k...) is taken as (out, in * k...)."""
        weight = self.weight.original
        if weight.dim() > 2:
            weight = weight.flatten(1)
        return weight if self.chunks == 1 else weight.chunk(self.chunks)[self.chunk]


class SigmaReparam(nn.Module):
    """gamma, u, v and sigma of k weight matrices, and the matrices W_hat made of them.

    Everything here stays in float32 (float64 for a float64 model), whatever ``model.half()`` does to the weights.

    Args:
        matrices: the k weights, in a fixed order.
        gamma_init: ``"one"`` (the paper's text) or ``"spectral"``, gamma = sigma(W), which changes nothing at first.
        learn_gamma: False gives plain spectral normalisation (Miyato et al. 2018): gamma stays 1.
        positive_gamma: gamma = softplus(parameter), which keeps it above 0.
        svd: start u and v from an exact SVD instead of a converged power iteration.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        *,
        gamma_init: str = "one",
        learn_gamma: bool = True,
        positive_gamma: bool = False,
        svd: bool = False,
    ) -> None:
        super().__init__()
        if gamma_init not in ("one", "spectral"):
            raise ValueError(f"gamma_init is 'one' or 'spectral', not {gamma_init!r}")
        self.matrices = tuple(matrices)  # a tuple: they are not this module's children
        self.positive_gamma = positive_gamma
        weights = self._matrices()
        self.rows = [w.shape[0] for w in weights]
        self.cols = [w.shape[1] for w in weights]
        like = weights[0].detach()
        self.register_buffer("u", like.new_empty(sum(self.cols)))
        self.register_buffer("v", like.new_empty(sum(self.rows)))
        self.register_buffer("sigma", like.new_empty(len(weights)))
        self._views: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        self.reestimate(svd=svd)
        gamma = torch.ones_like(self.sigma) if gamma_init == "one" else self.sigma.clone()
        if positive_gamma:
            gamma = gamma + torch.log(-torch.expm1(-gamma))  # the inverse of softplus
        self.gamma = nn.Parameter(gamma, requires_grad=learn_gamma)
        self._hats: Sequence[Tensor] | None = None  # W_hat during one forward of the owner
        self._frozen: tuple[tuple, list[Tensor]] | None = None  # W_hat in evaluation, while no weight changes
        self._num_updates: int | None = None

    # -- the state ------------------------------------------------------------------------------------------

    def _raw(self) -> list[Tensor]:
        return [matrix.raw() for matrix in self.matrices]

    def _matrices(self) -> list[Tensor]:
        return [_full_precision(w) for w in self._raw()]

    def _split(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """u and v of each weight, views of the buffers."""
        if self._views is None:
            self._views = self.u.split(self.cols), self.v.split(self.rows)
        return self._views

    @torch.no_grad()
    def power_step(self) -> None:
        """One power-iteration step of every weight, in place: call it once an update."""
        with torch.autocast(self.u.device.type, enabled=False):
            matrices = self._matrices()
            us, vs = self._split()
            for w, u, v in zip(matrices, us, vs, strict=True):
                v.addmv_(w, u, beta=KEEP)
            torch._foreach_div_(vs, torch._foreach_norm(vs))
            for w, u, v in zip(matrices, us, vs, strict=True):
                u.addmv_(w.t(), v, beta=KEEP)
            norms = torch._foreach_norm(us)
            torch._foreach_div_(us, norms)
            self.sigma.copy_(_floored(torch.stack(norms)))

    @torch.no_grad()
    def reestimate(self, svd: bool = False, tolerance: float = 1e-5, max_steps: int = 200) -> None:
        """Find u, v and sigma of the present weights from nothing: at the start, and after averaging or folding."""
        self._frozen = None
        us, vs = self._split()
        if svd:
            for w, u, v in zip(self._matrices(), us, vs, strict=True):
                left, _, right = torch.linalg.svd(w, full_matrices=False)
                u.copy_(right[0])
                v.copy_(left[:, 0])
            self.power_step()
            return
        generator = torch.Generator().manual_seed(0)  # the same start on every rank
        self.u.copy_(torch.randn(self.u.numel(), generator=generator))
        self.v.copy_(torch.randn(self.v.numel(), generator=generator))
        for vectors in (us, vs):
            torch._foreach_div_(vectors, torch._foreach_norm(vectors))
        self.power_step()
        for _ in range(max_steps // 5):
            before = self.sigma.clone()
            for _ in range(5):
                self.power_step()
            if torch.all((self.sigma - before).abs() <= tolerance * self.sigma):
                return

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq calls this before every micro-batch: u advances once an update, whatever ``--update-freq`` is."""
        if num_updates != self._num_updates:
            self._num_updates = num_updates
            self.power_step()

    def effective_gamma(self) -> Tensor:
        """(k,): the spectral norms of the W_hat."""
        return F.softplus(self.gamma) if self.positive_gamma else self.gamma

    # -- the weights ----------------------------------------------------------------------------------------

    def weight_hats(self, start: int = 0, stop: int | None = None) -> list[Tensor]:
        """W_hat of the weights start to stop (default: all), each (m_i, n_i) and of the raw weight's dtype."""
        raw = self._raw()
        us, vs = self._split()
        gamma, sigma = self.effective_gamma(), self.sigma
        if (start, stop) != (0, None):
            raw, us, vs, gamma, sigma = (values[start:stop] for values in (raw, us, vs, gamma, sigma))
        weights = [_full_precision(w) for w in raw]
        with torch.autocast(self.u.device.type, enabled=False):
            if not self.training:  # the weights, or an average of u, may have moved since: one step, not kept
                with torch.no_grad():
                    us = [F.normalize(u, dim=0) for u in us]
                    images = [w.mv(u) for w, u in zip(weights, us, strict=True)]
                    vs = [F.normalize(image, dim=0) for image in images]
                    sigma = _floored(torch.stack(torch._foreach_norm(images)))
            hats = _Normalize.apply(gamma, sigma, tuple(us), tuple(vs), *weights)
        return [hat if hat.dtype == w.dtype else hat.to(w.dtype) for hat, w in zip(hats, raw, strict=True)]

    def weight_hat(self, index: int) -> Tensor:
        """W_hat of one weight: from the owner's running forward if there is one."""
        if self._hats is not None:
            return self._hats[index]
        return self.weight_hats(index, index + 1)[0]

    def hook(self, owner: nn.Module) -> None:
        """Normalise all weights at once while ``owner`` runs forward."""
        self._hooks = (
            owner.register_forward_pre_hook(self.enter_forward),
            owner.register_forward_hook(self.leave_forward, always_call=True),
        )

    def remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()

    def enter_forward(self, *_: object) -> None:
        """Forward pre-hook of the owner: normalise all its weights at once."""
        if self.training or torch.is_grad_enabled():
            self._hats = self.weight_hats()
            return
        versions = tuple((w.data_ptr(), w._version) for w in (*self._raw(), self.gamma))
        if self._frozen is None or self._frozen[0] != versions:
            self._frozen = versions, self.weight_hats()
        self._hats = self._frozen[1]

    def leave_forward(self, *_: object) -> None:
        """Forward hook of the owner."""
        self._hats = None

    # -- what PyTorch and fairseq do to modules -----------------------------------------------------------------

    def train(self, mode: bool = True) -> SigmaReparam:
        if mode:
            self._frozen = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SigmaReparam:
        self._frozen = self._views = None

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype in (torch.float32, torch.float64) else tensor.to(moved.device)

        return super()._apply(keep_precision, recurse)

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self._frozen = self._views = self._num_updates = None  # fairseq sets the update number before it loads
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{len(self.rows)} weights, learn_gamma={self.gamma.requires_grad}"
