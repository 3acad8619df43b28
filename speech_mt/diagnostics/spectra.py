"""Spectra of weights: norms, the query-key product of each head, and the entropy that it cannot go below.

Weights are as torch stores them, (out, in), a head being a block of d_head rows of W_Q and W_K. The logits
of a head are x_i^T (W_Q^T W_K) x_j / sqrt(d_head), the paper's W_Q W_K^T with its (in, out) matrices. Its
non-zero singular values are those of a (d_head, d_head) core, so no (d_model, d_model) matrix is formed.

Low entropy alone is not collapse (Qi et al., arXiv 2505.21910): it is benign while W_Q^T W_K keeps many
singular values, malignant when its energy concentrates in few. Hence effective rank and energy
concentration.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speech_mt.diagnostics.attention_entropy import beside_training


@beside_training
def spectral_norm(
    matrix: Tensor, exact: bool = False, tolerance: float = 1e-5, max_iterations: int = 300
) -> Tensor:
    """Largest singular value of (..., m, n), shape (...), in float32 or wider.

    By power iteration from a fixed start until it grows by less than ``tolerance`` (relative): a lower
    bound, low by more only where the two largest singular values are close. ``exact`` takes the SVD.
    """
    matrix = _wide(matrix)
    if exact:
        return torch.linalg.svdvals(matrix)[..., 0]
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(matrix.size(-1), generator=generator, dtype=torch.float64)
    u = u.to(matrix).expand(*matrix.shape[:-2], -1)
    sigma = matrix.new_zeros(matrix.shape[:-2])
    for _ in range(max_iterations):
        u = F.normalize(u, dim=-1, eps=torch.finfo(matrix.dtype).tiny)
        v = (matrix @ u.unsqueeze(-1)).squeeze(-1)
        last, sigma = sigma, torch.linalg.vector_norm(v, dim=-1)
        if not (sigma - last > tolerance * sigma).any():  # so written, a NaN ends the loop and is returned
            break
        # v / sigma keeps u = W^T v within range whatever the scale of W.
        v = F.normalize(v, dim=-1, eps=torch.finfo(matrix.dtype).tiny)
        u = (matrix.mT @ v.unsqueeze(-1)).squeeze(-1)
    return sigma


@beside_training
def query_key_singular_values(
    query_weight: Tensor, key_weight: Tensor, num_heads: int, query_bias: Tensor | None = None
) -> Tensor:
    """Non-zero singular values of W_Q^T W_K of each head, without 1/sqrt(d_head): (H, r), falling.

    Args:
        query_weight: (H * d_head, d_model).
        key_weight: (H * d_head, d_keys); d_keys differs in cross-attention to another width.
        num_heads: H.
        query_bias: (H * d_head,); if given, the product is that for queries [x, 1]. A key bias adds the same
            to every logit of a row and never matters.

    With W_Q^T = Q_1 R_1 and W_K^T = Q_2 R_2 these are the singular values of R_1 R_2^T.
    """
    query_weight = _wide(query_weight)
    if query_bias is not None:
        query_weight = torch.cat([query_weight, _wide(query_bias).unsqueeze(1)], dim=1)
    triangles = [
        torch.linalg.qr(weight.unflatten(0, (num_heads, -1)).mT, mode="r").R
        for weight in (query_weight, _wide(key_weight))
    ]
    return torch.linalg.svdvals(triangles[0] @ triangles[1].mT)


def effective_rank(singular_values: Tensor) -> Tensor:
    """exp of the entropy of the singular values (..., r) scaled to sum 1 (Roy and Vetterli 2007): 1 to r.

    NaN for a zero matrix, which has no such distribution.
    """
    p = singular_values / singular_values.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def spectral_energy_concentration(singular_values: Tensor, top: int) -> Tensor:
    """SEC(s) of Qi et al.: share of sum sigma_i^2 in the ``top`` largest of (..., r), sorted falling.

    NaN for a zero matrix.
    """
    energy = singular_values.square()
    return energy[..., :top].sum(-1) / energy.sum(-1)


@beside_training
def attention_sigma(
    query_weight: Tensor,
    key_weight: Tensor,
    x: Tensor,
    num_heads: int,
    padding_mask: Tensor | None = None,
    *,
    query_bias: Tensor | None = None,
    memory: Tensor | None = None,
    memory_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The sigma of Theorem 3.1 that a head really has, (B, H): scale ||W_Q^T W_K||_2 ||X||_2 ||X_keys||_2.

    It bounds the L2 norm of every row of logits (up to a constant, which softmax ignores). In
    self-attention the last two factors are ||X X^T||_2. A causal row sees part of X, so sigma holds for it
    with its own keys.

    Args:
        query_weight, key_weight, num_heads, query_bias: as in :func:`query_key_singular_values`.
        x: (B, T, d_model), what the query projection is applied to (after LayerNorm in a pre-LN layer).
        padding_mask: (B, T) bool, True at padding.
        memory: (B, S, d_keys), what keys are made of in cross-attention; x by default.
        memory_padding_mask: (B, S) bool, True at padding.
        scale: 1/sqrt(d_head) by default.
    """
    if memory is None:
        memory, memory_padding_mask = x, padding_mask
    if query_bias is not None:
        x = F.pad(x, (0, 1), value=1.0)
    norms = [
        spectral_norm(tokens if mask is None else tokens.masked_fill(mask.unsqueeze(-1), 0.0), exact=True)
        for tokens, mask in ((x, padding_mask), (memory, memory_padding_mask))
    ]
    product = query_key_singular_values(query_weight, key_weight, num_heads, query_bias)[:, 0]
    if scale is None:
        scale = (query_weight.size(0) // num_heads) ** -0.5
    return scale * (norms[0] * norms[1]).unsqueeze(1) * product


def entropy_lower_bound(sigma: Tensor | float, keys: Tensor | int) -> Tensor:
    """Lower bound in nats on the entropy of an attention row (Zhai et al. 2023, Theorem 3.1).

    With T keys and beta = exp(-sigma sqrt(T/(T-1))),

        Ent >= log(1 + (T-1) beta) + sigma sqrt(T (T-1)) beta / (1 + (T-1) beta),

    attained by a zero-mean row of logits of L2 norm sigma with one large entry and T-1 equal ones. Computed
    as softplus(z) + a sigmoid(z) with a = sigma sqrt(T/(T-1)), z = log(T-1) - a, which neither overflows
    nor gives NaN for large sigma. ``sigma`` and ``keys`` broadcast; 0 for a single key.
    """
    sigma, keys = torch.as_tensor(sigma), torch.as_tensor(keys)
    sigma = sigma if sigma.is_floating_point() else sigma.to(torch.get_default_dtype())
    others = (keys.to(sigma.device, torch.float64) - 1).clamp(min=1).to(sigma.dtype)
    a = (sigma * (1 + 1 / others).sqrt()).clamp(max=1e4)  # the bound is 0 long before that; inf * 0 is NaN
    z = others.log() - a
    bound = F.softplus(z) + a * torch.sigmoid(z)
    return bound.masked_fill(keys.to(sigma.device) < 2, 0.0)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
