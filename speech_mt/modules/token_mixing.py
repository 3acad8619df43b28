"""Token mixing: three ways to keep self-attention from making all tokens alike, each alone or together.

| name | what | source |
|---|---|---|
| attn_scale | A_d + (1 + w_h) (A - A_d), A_d uniform over the visible keys: a learned w a head | arXiv 2203.05962 |
| feat_scale | u + s_low mean(u) + s_high (u - mean(u)): a learned s_low, s_high a channel | arXiv 2203.05962 |
| neutreno | A V + lambda (V0 - V), V0 the values of the stack's first layer; lambda fixed | arXiv 2312.00751 |

The papers have encoders without padding. Ours: a mean is one over valid tokens; under a causal mask it is a running
mean over the tokens so far, so that nothing of the future leaks and decoding step by step is the same function. At the
start, all w and s are 0: the function is that without them. None of the three acts on cross-attention.

Shape suffixes: B batch, T queries, S keys, C embedding, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speech_mt.errors import InputError

TOKEN_MIXINGS = ("attn_scale", "feat_scale", "neutreno")


def token_mixings(text: str) -> tuple[str, ...]:
    """``attn_scale,neutreno`` -> the names, each once.

    Raises:
        InputError: an unknown name.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in TOKEN_MIXINGS]:
        raise InputError(f"--token-mixing {', '.join(unknown)}: there are {', '.join(TOKEN_MIXINGS)}")
    return names


class AttnScale(nn.Module):
    """Attention with its deviation from uniform attention scaled by 1 + w_h, made of its output.

    Rows of A sum to 1, so (A_d + (1 + w) (A - A_d)) V = (1 + w) A V - w mean(V): the fused kernels stay. Dropout on A
    then acts within A V alone, where the paper's code has it on the sum.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def forward(self, out_BHTD: Tensor, v_BHSD: Tensor, key_padding_mask_BS: Tensor | None, causal: bool) -> Tensor:
        """A V and V -> (B, H, T, D); query t of T sees keys up to t + (S - T) if causal."""
        valid = None if key_padding_mask_BS is None else ~key_padding_mask_BS[:, None, :, None]
        if causal:
            mean = running_mean(v_BHSD, valid, dim=2)[0][:, :, -out_BHTD.shape[2] :]
        else:
            mean = masked_mean(v_BHSD, valid, dim=2)
        return out_BHTD + self.weight[:, None, None] * (out_BHTD - mean)


class FeatScale(nn.Module):
    """The mean of the tokens and what is left of each, scaled by 1 + s_low and 1 + s_high, after the output projection.

    A running mean has a state: the sum and number of the tokens before, a row a sentence.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(dim))
        self.high = nn.Parameter(torch.zeros(dim))

    def forward(
        self,
        u_BTC: Tensor,
        padding_mask_BT: Tensor | None,
        causal: bool,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(B, T, C), mask True at padding -> (B, T, C) and, if causal, the sum (B, C) and number (B, 1) so far."""
        valid = None if padding_mask_BT is None else ~padding_mask_BT[:, :, None]
        state = None
        if causal:
            mean, state = running_mean(u_BTC, valid, dim=1, past=past)
        else:
            mean = masked_mean(u_BTC, valid, dim=1)
        return u_BTC + self.low * mean + self.high * (u_BTC - mean), state


def neutreno(out_BHTD: Tensor, v_BHTD: Tensor, first_values_BHTD: Tensor, weight: float) -> Tensor:
    """A V + lambda (V0 - V) with V and V0 of the queries' own tokens, before the output projection."""
    return torch.add(out_BHTD, first_values_BHTD - v_BHTD, alpha=weight)


def masked_mean(x: Tensor, valid: Tensor | None, dim: int) -> Tensor:
    """Mean over ``dim`` where valid, kept as a dimension of 1; 0 where nothing is. Summed in float32 or wider."""
    if valid is None:
        return x.mean(dim, keepdim=True)
    total = (x * valid).sum(dim, keepdim=True, dtype=_wide(x))
    return (total / valid.sum(dim, keepdim=True).clamp(min=1)).to(x.dtype)


def running_mean(
    x: Tensor, valid: Tensor | None, dim: int, past: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Mean over ``dim`` up to each place, where valid; and the sum and number at the end, to go on from as ``past``.

    Summed in float32 or wider.
    """
    sums = x.to(_wide(x))
    sums = (sums if valid is None else sums * valid).cumsum(dim)
    if valid is None:
        shape = [1] * x.dim()
        shape[dim] = x.shape[dim]
        counts = torch.arange(1, x.shape[dim] + 1, dtype=sums.dtype, device=x.device).view(shape)
        counts = counts.expand(x.shape[0], *shape[1:])
    else:
        counts = valid.to(sums.dtype).cumsum(dim)
    if past is not None:
        sums, counts = sums + past[0].unsqueeze(dim), counts + past[1].unsqueeze(dim)
    return (sums / counts.clamp(min=1)).to(x.dtype), (sums.select(dim, -1), counts.select(dim, -1))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
