"""Where LayerNorm stands around a residual branch, and how deep stacks scale it.

| placement | x_{l+1} | source |
|---|---|---|
| post | LN(x + f(x)) | Vaswani et al. 2017 |
| pre | x + f(LN(x)), and one LN after the stack | Xiong et al. 2020, arXiv 2002.04745 |
| deepnorm | LN(alpha x + f(x)), f's weights started smaller by beta | Wang et al. 2022, arXiv 2203.00555 |
| none | x + f(x) | what sigmaReparam makes possible, Zhai et al. 2023, arXiv 2303.06296 |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_PLACEMENTS = ("post", "pre", "deepnorm", "none")


def final_norm(placement: str) -> bool:
    """Whether the stack ends in a LayerNorm of its own: it does where the residual stream is never normalised."""
    return placement == "pre"


def deepnorm_alpha_beta(encoder_layers: int, decoder_layers: int, decoder: bool) -> tuple[float, float]:
    """(alpha, beta) of DeepNorm for an N-layer encoder and M-layer decoder, or an encoder alone (M = 0).

    Encoder-decoder: alpha = 0.81 (N^4 M)^(1/16), beta = 0.87 (N^4 M)^(-1/16) in the encoder, alpha = (3 M)^(1/4),
    beta = (12 M)^(-1/4) in the decoder. Encoder alone: (2 N)^(1/4), (8 N)^(-1/4). arXiv 2203.00555, section 3 (the
    paper's values; torchscale divides by 1.15 where the paper multiplies by 0.87).
    """
    n, m = encoder_layers, decoder_layers
    if m == 0:
        return (2 * n) ** 0.25, (8 * n) ** -0.25
    if decoder:
        return (3 * m) ** 0.25, (12 * m) ** -0.25
    return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)


def deepnorm_init_(layer: nn.Module, beta: float) -> None:
    """Xavier normal with gain beta on values, outputs and the feed-forward, gain 1 on queries and keys; biases 0."""
    for name, child in layer.named_modules():
        if isinstance(child, nn.Linear):
            nn.init.xavier_normal_(child.weight, gain=1.0 if name.endswith(("q_proj", "k_proj")) else beta)
            if child.bias is not None:
                nn.init.zeros_(child.bias)


class ResidualNorm(nn.Module):
    """The LayerNorm and the sum around one residual branch: ``x = r.after(x, f(r.before(x)))``.

    Its parameters have LayerNorm's names, so that they sit where fairseq's ``*_layer_norm`` has them.

    Args:
        dim: C of the residual stream.
        placement: one of :data:`NORM_PLACEMENTS`.
        alpha: what the residual stream is multiplied by (deepnorm).
        eps: of LayerNorm.
    """

    def __init__(self, dim: int, placement: str, alpha: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        if placement not in NORM_PLACEMENTS:
            raise ValueError(f"norm placement {placement!r} is not one of {', '.join(NORM_PLACEMENTS)}")
        self.dim, self.placement, self.alpha, self.eps = dim, placement, alpha, eps
        if placement == "none":
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        else:
            self.weight = nn.Parameter(torch.ones(dim))
            self.bias = nn.Parameter(torch.zeros(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)

    def before(self, x: Tensor) -> Tensor:
        """(..., C) residual stream -> the branch's input."""
        return self._norm(x) if self.placement == "pre" else x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        """The residual stream after the branch's output joined it, (..., C)."""
        if self.placement == "deepnorm":
            return self._norm(torch.add(branch, x, alpha=self.alpha))
        x = x + branch
        return self._norm(x) if self.placement == "post" else x

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.placement}" + (f", alpha={self.alpha:.4f}" if self.alpha != 1 else "")
