"""Where LayerNorm stands around a residual branch, and how deep stacks scale it.

| placement | x_{l+1} | initialisation | source |
|---|---|---|---|
| post | LN(x + f(x)) | fairseq's | Vaswani et al. 2017 |
| pre | x + f(LN(x)); a LN ends the stack | fairseq's | Xiong et al. 2020, arXiv 2002.04745 |
| deepnorm | LN(alpha x + f(x)) | Xavier normal, values, outputs and feed-forward by beta | arXiv 2203.00555 |
| admin | LN(omega x + f(x)) | fairseq's; omega from the depth | Liu et al. 2020, arXiv 2004.08249 |
| subln | x + f(LN(x)), a second LN within f; a LN ends the stack | by sqrt of log depths | arXiv 2210.06423 |
| sandwich | x + LN(f(LN(x))); a LN ends the stack | fairseq's | Ding et al. 2021, arXiv 2105.13290 |
| none | x + f(x) | fairseq's | what sigmaReparam makes possible, arXiv 2303.06296 |

N encoder and M decoder layers; M = 0 is an encoder alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_PLACEMENTS = ("post", "pre", "deepnorm", "admin", "subln", "sandwich", "none")
NORM_FIRST = ("pre", "subln", "sandwich")  # the stream is never normalised: a LayerNorm of its own ends the stack


def deepnorm_alpha_beta(encoder_layers: int, decoder_layers: int, decoder: bool) -> tuple[float, float]:
    """(alpha, beta) of DeepNorm.

    Encoder-decoder: alpha = 0.81 (N^4 M)^(1/16), beta = 0.87 (N^4 M)^(-1/16) in the encoder, alpha = (3 M)^(1/4),
    beta = (12 M)^(-1/4) in the decoder. Encoder alone: (2 N)^(1/4), (8 N)^(-1/4). arXiv 2203.00555, section 3: the
    paper's values; torchscale's code divides by 1.15 where the paper multiplies by 0.87.
    """
    n, m = encoder_layers, decoder_layers
    if m == 0:
        return (2 * n) ** 0.25, (8 * n) ** -0.25
    if decoder:
        return (3 * m) ** 0.25, (12 * m) ** -0.25
    return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)


def admin_omega(encoder_layers: int, decoder_layers: int, decoder: bool) -> float:
    """omega = sqrt((L + 1) / ln(L + 1) - 1) for L residual branches, 2 N or 3 M.

    The constant, profiling-free form with output change O(log n) of the authors' admin-torch; it is not learned, so
    that it folds into the branch as DeepNorm's alpha does.
    """
    branches = 3 * decoder_layers if decoder else 2 * encoder_layers
    return math.sqrt((branches + 1) / math.log(branches + 1) - 1)


def subln_gain(encoder_layers: int, decoder_layers: int, decoder: bool) -> float:
    """What Sub-LN multiplies initial values, outputs and the feed-forward by (cross-attention is left alone).

    Decoder sqrt(log 3M), encoder sqrt(log(3M) log(2N) / 3), encoder alone sqrt(log 2N). arXiv 2210.06423, section 4.
    """
    if decoder_layers == 0:
        return math.sqrt(math.log(2 * encoder_layers))
    if decoder:
        return math.sqrt(math.log(3 * decoder_layers))
    return math.sqrt(math.log(3 * decoder_layers) * math.log(2 * encoder_layers) / 3)


def residual_scale(placement: str, encoder_layers: int, decoder_layers: int, decoder: bool) -> float:
    """What the residual stream is multiplied by before the branch joins it."""
    if placement == "deepnorm":
        return deepnorm_alpha_beta(encoder_layers, decoder_layers, decoder)[0]
    return admin_omega(encoder_layers, decoder_layers, decoder) if placement == "admin" else 1.0


def init_gain(placement: str, encoder_layers: int, decoder_layers: int, decoder: bool) -> float:
    """What the initial values, outputs and feed-forward are multiplied by: deepnorm's beta, Sub-LN's gain, else 1."""
    depth = encoder_layers, decoder_layers, decoder
    if placement == "deepnorm":
        return deepnorm_alpha_beta(*depth)[1]
    return subln_gain(*depth) if placement == "subln" else 1.0


def init_for_depth_(
    layer: nn.Module, placement: str, encoder_layers: int, decoder_layers: int, decoder: bool
) -> None:
    """The placement's published initialisation, in place, over that of fairseq."""
    gain = init_gain(placement, encoder_layers, decoder_layers, decoder)
    if placement == "deepnorm":
        for name, linear in _linears(layer):
            nn.init.xavier_normal_(linear.weight, gain=1.0 if name.endswith(("q_proj", "k_proj")) else gain)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
    elif placement == "subln":
        for name, linear in _linears(layer):
            if name.endswith(("fc1", "fc2", "self_attn.v_proj", "self_attn.out_proj")):
                linear.weight.data.mul_(gain)


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, child) for name, child in layer.named_modules() if isinstance(child, nn.Linear)]


class ResidualNorm(nn.Module):
    """The LayerNorm and the sum around one residual branch: ``x = r.after(x, f(r.before(x)))``.

    Its parameters have LayerNorm's names, so that they sit where fairseq's ``*_layer_norm`` has them; the second
    LayerNorm of sandwich is the child ``branch_norm``.

    Args:
        dim: C of the residual stream.
        placement: one of :data:`NORM_PLACEMENTS`.
        scale: what the residual stream is multiplied by (deepnorm's alpha, admin's omega).
        eps: of LayerNorm.

    Raises:
        ValueError: an unknown placement.
    """

    def __init__(self, dim: int, placement: str, scale: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        if placement not in NORM_PLACEMENTS:
            raise ValueError(f"norm placement {placement!r} is not one of {', '.join(NORM_PLACEMENTS)}")
        self.dim, self.placement, self.scale, self.eps = dim, placement, scale, eps
        if placement == "none":
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        else:
            self.weight = nn.Parameter(torch.ones(dim))
            self.bias = nn.Parameter(torch.zeros(dim))
        self.branch_norm = nn.LayerNorm(dim, eps) if placement == "sandwich" else None

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)

    def before(self, x: Tensor) -> Tensor:
        """(..., C) residual stream -> the branch's input."""
        return self._norm(x) if self.placement in NORM_FIRST else x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        """The residual stream after the branch's output joined it, (..., C)."""
        if self.branch_norm is not None:
            branch = self.branch_norm(branch)
        x = x + branch if self.scale == 1 else torch.add(branch, x, alpha=self.scale)
        return x if self.placement in (*NORM_FIRST, "none") else self._norm(x)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.placement}" + (f", scale={self.scale:.4f}" if self.scale != 1 else "")
