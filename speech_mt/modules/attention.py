"""Multi-head attention over fused kernels, with incremental decoding and a place from which it can be watched.

Parameters are named as in fairseq (``q_proj``, ``k_proj``, ``v_proj``, ``out_proj``), tensors are batch first. The
projections are always applied through ``Linear.forward``, in training and in decoding alike, so a parametrised
weight acts in both.

Shape suffixes: B batch, T queries, S keys, C embedding, H heads, D head width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (module, q_BHTD, k_BHSD, key_padding_mask_BS, causal) -> None; called under no_grad with detached tensors.
Observer = Callable[["MultiheadAttention", Tensor, Tensor, Tensor | None, bool], None]
IncrementalState = dict[str, dict[str, Tensor | None]]

_instances = itertools.count()


def visible(
    key_padding_mask: Tensor | None,
    causal: bool,
    queries: int,
    keys: int,
    device: torch.device | None = None,
) -> Tensor | None:
    """The mask of what may be attended to, or None for everything.

    Args:
        key_padding_mask: (B, S), True at padding.
        causal: query t of T sees keys up to t + (S - T), as in incremental decoding.

    Returns:
        bool, True where visible, broadcastable to (B, H, T, S).
    """
    mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
    if causal and queries > 1:
        past = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        mask = past if mask is None else mask & past
    return mask


class MultiheadAttention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017), self- or cross-attention.

    Args:
        embed_dim: C, of queries and output.
        num_heads: H; must divide C.
        kdim: width of keys and values in cross-attention (default: C).
        dropout: on the attention probabilities.
        bias: of the four projections.
        static_kv: keys and values stay the same while decoding (cross-attention): they are projected once.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        static_kv: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embedding dimension {embed_dim} is not a multiple of {num_heads} heads")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = self.head_dim**-0.5
        self.dropout = dropout
        self.static_kv = static_kv
        # The order is fairseq's, so that one seed gives one initialisation.
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters(same_width=kdim is None or kdim == embed_dim)
        self.observer: Observer | None = None
        self._state_key = f"attention.{next(_instances)}"

    def reset_parameters(self, same_width: bool = True) -> None:
        """Xavier uniform; q, k and v by 1/sqrt(2), as if they were one fused matrix."""
        gain = 1 / math.sqrt(2) if same_width else 1.0
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        query_BTC: Tensor,
        key_BSC: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query_BTC: (B, T, C).
            key_BSC: (B, S, kdim) for cross-attention; None for self-attention.
            key_padding_mask: (B, S) bool, True at padding; with an incremental state, of all keys so far.
            causal: mask out the future (self-attention without incremental state).
            incremental_state: keys and values of earlier steps, kept between calls.
            need_weights: also return the attention probabilities (a second, unfused pass).

        Returns:
            output (B, T, C), and the probabilities (B, H, T, S) or None.
        """
        q = self._heads(self.q_proj(query_BTC))
        k, v = self._keys_and_values(query_BTC if key_BSC is None else key_BSC, incremental_state)
        if self.observer is not None:
            with torch.no_grad():
                self.observer(self, q.detach(), k.detach(), key_padding_mask, causal)

        queries, keys = q.shape[2], k.shape[2]
        only_causal = causal and key_padding_mask is None and queries == keys and queries > 1
        mask = None if only_causal else visible(key_padding_mask, causal, queries, keys, q.device)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=only_causal)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not need_weights:
            return out, None
        mask = visible(key_padding_mask, causal, queries, keys, q.device)
        logits = q @ k.transpose(-2, -1) * self.scale
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf)
        return out, torch.softmax(logits, dim=-1, dtype=torch.float32)

    def _keys_and_values(self, x_BSC: Tensor, incremental_state: IncrementalState | None) -> tuple[Tensor, Tensor]:
        if incremental_state is None:
            return self._heads(self.k_proj(x_BSC)), self._heads(self.v_proj(x_BSC))
        past = incremental_state.get(self._state_key)
        if past is not None and self.static_kv:
            return past["k"], past["v"]
        k, v = self._heads(self.k_proj(x_BSC)), self._heads(self.v_proj(x_BSC))
        if past is not None:
            k, v = torch.cat([past["k"], k], dim=2), torch.cat([past["v"], v], dim=2)
        incremental_state[self._state_key] = {"k": k, "v": v}
        return k, v

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Follow a beam search: row i becomes the old row new_order[i].

        The beams of one sentence share its source, so cross-attention moves only when sentences are finished.
        """
        past = incremental_state.get(self._state_key)
        if past is None or (self.static_kv and past["k"].shape[0] == len(new_order)):
            return
        for name, value in past.items():
            past[name] = value.index_select(0, new_order)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, dropout={self.dropout}"
