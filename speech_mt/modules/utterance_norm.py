"""Normalisation of an utterance's features by one mean and one variance."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UtteranceNorm(nn.Module):
    """scale * (x - mean) / sqrt(variance + eps) + bias over the real frames AND channels of each utterance.

    The input of the speech models of sigmaReparam (Zhai et al. 2023, arXiv 2303.06296, speech code). scale and bias are
    a learned number each. Frames beyond an utterance's length become 0 and have no part in mean and variance.

    Args:
        eps: added to the variance; 1e-7 there.
    """

    def __init__(self, eps: float = 1e-7) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x_BTF: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, F), (B,) frames -> (B, T, F); computed in float32 at least."""
        x = x_BTF.to(torch.promote_types(x_BTF.dtype, torch.float32))
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        real = real[..., None].to(x)
        count = (real.sum(dim=(1, 2), keepdim=True) * x.shape[2]).clamp(min=1)
        mean = (x * real).sum(dim=(1, 2), keepdim=True) / count
        centred = (x - mean) * real
        variance = centred.square().sum(dim=(1, 2), keepdim=True) / count
        normed = centred * (variance + self.eps).rsqrt()
        return (normed * self.weight + self.bias * real).to(x_BTF.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
