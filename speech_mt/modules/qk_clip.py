"""QK-Clip: after an update, shrink the query and key weights of heads whose logits grew too large.

With S the head's largest logit since the last update, W_q and W_k of the head are multiplied by sqrt(tau / S) each
where S > tau, so that the same input would give logits up to tau. The forward pass is untouched. Kimi K2,
arXiv 2507.20534.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speech_mt.diagnostics.attention_entropy import max_logit
from speech_mt.errors import InputError


class QKClip(nn.Module):
    """Watches one attention's logits and clips its projections.

    Args:
        num_heads: H.
        tau: largest logit allowed.
    """

    def __init__(self, num_heads: int, tau: float) -> None:
        super().__init__()
        self.tau = tau
        self.register_buffer("largest", torch.full((num_heads,), -torch.inf), persistent=False)
        self._num_updates: int | None = None

    def observe(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool, scale: float) -> None:
        """Remember the largest logit of each head: q (B, H, T, D), k (B, H, S, D), before any softcap."""
        seen = max_logit(q, k, key_padding_mask, causal, scale)
        torch.maximum(self.largest, seen.to(self.largest), out=self.largest)

    @torch.no_grad()
    def clip_(self, num_updates: int, projections: tuple[nn.Linear, nn.Linear]) -> None:
        """At the first micro-batch of an update: clip what the last update left behind, alike on all ranks.

        Raises:
            InputError: the weights are half precision, so that their float32 copies would undo the clipping.
        """
        if num_updates == self._num_updates:
            return
        self._num_updates = num_updates
        if projections[0].weight.dtype != torch.float32:
            raise InputError("--qk-clip needs float32 weights: train without --fp16 and --bf16 (--amp is fine)")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.largest, torch.distributed.ReduceOp.MAX)
        shrink = (self.tau / self.largest.clamp(min=self.tau)).sqrt()
        for projection in projections:
            rows = shrink.repeat_interleave(projection.out_features // len(shrink))
            projection.weight.mul_(rows[:, None])
            if projection.bias is not None:
                projection.bias.mul_(rows)
        self.largest.fill_(-torch.inf)

    def extra_repr(self) -> str:
        return f"tau={self.tau}"
