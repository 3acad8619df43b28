"""How alike tokens have become, and which eigenvalue of the value-output map drives them there.

Token measures take x (B, T, d) and padding_mask (B, T), True at padding, work in float32 or wider and
return one number a sentence, (B,), NaN where fewer than two tokens are valid: one token is not "collapsed".

The value-output map of a layer is H = W_V W_O for row vectors, x -> x H, with X <- X + A X H in the
simplified model of "Setting the Record Straight on Transformer Oversmoothing" (arXiv 2401.04301). Weights
are as torch stores them, (out, in). Where the papers' exact definition is not known to us the docstring
says "our definition".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speech_mt.diagnostics.attention_entropy import NAN, beside_training


@beside_training
def token_cosine(x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Mean cosine of two different tokens of a sentence, (B,): 1 when all point the same way.

    Signed and off-diagonal: sum_{i != j} <u_i, u_j> = ||sum_i u_i||^2 - sum_i ||u_i||^2 with unit tokens u,
    O(T d).
    """
    x, tokens = _valid(x, padding_mask)
    unit = F.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)
    pairs = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    return _where_several(pairs / (tokens * (tokens - 1)), tokens)


@beside_training
def high_to_low_frequency(
    x: Tensor, padding_mask: Tensor | None = None, length_normalised: bool = False
) -> Tensor:
    """||HFC[X]||_F / ||LFC[X]||_F, (B,), 0 when all tokens are equal: LFC is their mean, HFC the rest.

    The mean over tokens is the constant component of their discrete Fourier transform (Wang et al. 2022,
    arXiv 2203.05962). Unrelated tokens give about sqrt(n - 1) for n tokens, so values of different lengths
    do not compare: ``length_normalised`` divides by that. inf if the mean is exactly 0.
    """
    x, tokens = _valid(x, padding_mask)
    mean, residual = _split_mean(x, tokens, padding_mask)
    ratio = _frobenius(residual) / (tokens.sqrt() * torch.linalg.vector_norm(mean, dim=-1))
    if length_normalised:
        ratio = ratio / (tokens - 1).sqrt()
    return _where_several(ratio, tokens)


@beside_training
def rank_collapse_residual(x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """||X - 1 mean^T|| / ||X||, (B,), in the norm sqrt(||.||_1 ||.||_inf); 0 when all tokens are equal.

    Dong et al. 2021, "Attention is not all you need", with the token mean as the rank-1 part.
    """
    x, tokens = _valid(x, padding_mask)
    _, residual = _split_mean(x, tokens, padding_mask)
    return _where_several(_composite_norm(residual) / _composite_norm(x), tokens)


@beside_training
def attention_map_similarity(
    *maps: Tensor, query_padding_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Cosine of the attention maps of every two layers, (L, L), averaged over heads and sentences.

    Each map is (B, H, T, S), flattened per sentence and head over valid rows and columns. Our definition
    for NeuTRENO's "redundancy in attention maps between layers" (arXiv 2312.00751). All causal maps share
    an empty triangle, and thus a high floor: compare like with like.
    """
    rows = []
    for weights in maps:
        weights = _wide(weights)
        if query_padding_mask is not None:
            weights = weights.masked_fill(query_padding_mask[:, None, :, None], 0.0)
        if key_padding_mask is not None:
            weights = weights.masked_fill(key_padding_mask[:, None, None, :], 0.0)
        rows.append(F.normalize(weights.flatten(2), dim=-1))
    units = torch.stack(rows, dim=2)  # (B, H, L, T * S)
    similarity = units @ units.mT
    present = similarity.diagonal(dim1=-2, dim2=-1).amin(-1) > 0  # a sentence without a valid row has no map
    return similarity[present].mean(0)


@beside_training
def value_output_matrix(
    value_weight: Tensor, output_weight: Tensor, layer_norm_weight: Tensor | None = None
) -> Tensor:
    """H = W_V W_O (d, d) of all heads together; diag(g) H in a pre-LN layer with LayerNorm weight g (d,)."""
    matrix = (_wide(output_weight) @ _wide(value_weight)).mT
    return matrix if layer_norm_weight is None else _wide(layer_norm_weight).unsqueeze(1) * matrix


@beside_training
def value_output_eigenvalues(
    value_weight: Tensor, output_weight: Tensor, num_heads: int, layer_norm_weight: Tensor | None = None
) -> Tensor:
    """Non-zero eigenvalues of each head's W_V^h W_O^h, complex (H, d_head), from a (d_head, d_head) core."""
    value = _wide(value_weight).double()
    if layer_norm_weight is not None:
        value = value * layer_norm_weight
    value = value.unflatten(0, (num_heads, -1))  # (H, d_head, d)
    output = _wide(output_weight).double().unflatten(1, (num_heads, -1)).movedim(1, 0)  # (H, d, d_head)
    return torch.linalg.eigvals(value @ output)


@beside_training
def asymmetry(matrix: Tensor) -> Tensor:
    """||H - H^T||_F / (2 ||H||_F) of (..., d, d), our definition: 0 symmetric, 1 antisymmetric."""
    matrix = _wide(matrix)
    return _frobenius(matrix - matrix.mT) / (2 * _frobenius(matrix))


@beside_training
def condition_number(matrix: Tensor) -> Tensor:
    """sigma_max / sigma_min of (..., m, n), in float64; inf for a singular matrix. Plot its log10."""
    singular_values = torch.linalg.svdvals(matrix.detach().double())
    return singular_values[..., 0] / singular_values[..., -1]


class DominatingShare(NamedTuple):
    """Share of each head's channels, each (H,), by the eigenvalue that dominates; the three add up to 1."""

    smoothing: Tensor  # the eigenvalue 1 of A, whose eigenvector is the same for all tokens
    sharpening: Tensor  # another one
    neither: Tensor  # equal largest modulus, as for a zero eigenvalue of H


@beside_training
def dominating_share(
    value_output: Tensor,
    attention: Tensor,
    padding_mask: Tensor | None = None,
    causal: bool = False,
    tolerance: float = 1e-9,
) -> DominatingShare:
    """Which eigenvalue 1 + l_j a_i of X + A X H has the largest modulus, voted by every l_j over all a_i.

    Repeated layers send the features of channel j to the eigenvector of the winner: with a = 1 all tokens
    become equal. Our definition of the distribution in arXiv 2401.04301: a sentence and channel is one
    vote.

    Args:
        value_output: (H, d_head) complex, from :func:`value_output_eigenvalues`.
        attention: (B, H, T, T) self-attention weights; the theory says nothing about cross-attention.
        padding_mask: (B, T) bool, True at padding; rows and columns left out.
        causal: the eigenvalues of a triangular map are its diagonal, no decomposition needed.
        tolerance: relative difference of moduli below which nothing dominates.
    """
    batch, _, length, _ = attention.shape
    votes = []
    for sentence in range(batch):
        valid = slice(None) if padding_mask is None else ~padding_mask[sentence]
        weights = attention[sentence][:, valid][:, :, valid].double()
        if weights.size(-1) < 2:
            continue
        a = weights.diagonal(dim1=-2, dim2=-1) if causal else torch.linalg.eigvals(weights)  # (H, n)
        a = a.to(torch.complex128)
        one = (a - 1).abs().argmin(-1, keepdim=True)
        modulus = (1 + value_output.to(a).unsqueeze(-1) * a.unsqueeze(1)).abs()  # (H, d_head, n)
        one = one.unsqueeze(1).expand(-1, modulus.size(1), -1)
        constant = modulus.gather(-1, one).squeeze(-1)
        other = modulus.scatter(-1, one, -1.0).amax(-1)
        margin = tolerance * torch.maximum(constant, other)
        votes.append(torch.stack([constant > other + margin, other > constant + margin]).double())
    if not votes:
        return DominatingShare(*torch.full((3, attention.size(1)), NAN, device=attention.device))
    smoothing, sharpening = torch.stack(votes).mean((0, 3)).float()
    return DominatingShare(smoothing, sharpening, 1 - smoothing - sharpening)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _valid(x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x with zeros at padding, and the number of valid tokens of each sentence (B,)."""
    x = _wide(x)
    if padding_mask is None:
        return x, x.new_full((x.size(0),), x.size(1))
    return x.masked_fill(padding_mask.unsqueeze(-1), 0.0), (~padding_mask).sum(1).to(x.dtype)


def _split_mean(x: Tensor, tokens: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token mean (B, d), and x without it, zero at padding."""
    mean = x.sum(1) / tokens.clamp(min=1).unsqueeze(-1)
    residual = x - mean.unsqueeze(1)
    return mean, residual if padding_mask is None else residual.masked_fill(padding_mask.unsqueeze(-1), 0.0)


def _where_several(values: Tensor, tokens: Tensor) -> Tensor:
    return values.masked_fill(tokens < 2, NAN)


def _frobenius(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))


def _composite_norm(x: Tensor) -> Tensor:
    absolute = x.abs()
    return (absolute.sum(-2).amax(-1) * absolute.sum(-1).amax(-1)).sqrt()
