"""What sigmaReparam is compared with, by the same interface.

| name | W_hat | source |
|---|---|---|
| spectral_norm | W / sigma(W) | Miyato et al. 2018, arXiv 1802.05957 |
| weight_norm | g W / ||W||, a norm and a g for each row | Salimans and Kingma 2016, arXiv 1602.07868 |
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrizations

from speech_mt.reparam.apply import select_weights, sigma_reparam


def spectral_norm(module: nn.Module, *, include: str = "", exclude: str | None = None) -> list[str]:
    """sigmaReparam with gamma fixed at 1; arguments, result and errors as :func:`sigma_reparam`."""
    return sigma_reparam(module, include=include, exclude=exclude, learn_gamma=False)


def weight_norm(module: nn.Module, *, include: str = "", exclude: str | None = None) -> list[str]:
    """PyTorch's weight normalisation, started at the present weights; arguments and result as the others'."""
    selected = select_weights(module, include, exclude)
    for _, child, parameter in selected:
        parametrizations.weight_norm(child, parameter, dim=0)
    return [weight.qualified_name for weight in selected]
