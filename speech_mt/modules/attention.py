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

from speech_mt.errors import InputError
from speech_mt.modules.qk_clip import QKClip
from speech_mt.modules.token_mixing import AttnScale, FeatScale, neutreno

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
        inner_norm: a LayerNorm before the output projection (Sub-LN, arXiv 2210.06423).
        qk_norm: a LayerNorm without bias on the queries and keys of each head (arXiv 2302.05442).
        softcap: logits become C tanh(logits / C) (Gemma 2, arXiv 2408.00118); 0 is off. The fused kernels cannot do
            it, so the attention matrix is formed.
        qk_clip: largest logit before the projections are shrunk (see :class:`QKClip`); 0 is off.
        attn_scale, feat_scale, neutreno_lambda: see :mod:`speech_mt.modules.token_mixing`, for self-attention; 0 is
            off.
        fuse_qk: in self-attention, queries and keys come from one matrix with one spectral norm, ``qk_proj`` (2C, C).

    Raises:
        InputError: H does not divide C; fused queries and keys with what needs them apart.
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
        inner_norm: bool = False,
        qk_norm: bool = False,
        softcap: float = 0.0,
        qk_clip: float = 0.0,
        attn_scale: bool = False,
        feat_scale: bool = False,
        neutreno_lambda: float = 0.0,
        fuse_qk: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise InputError(f"embedding dimension {embed_dim} is not a multiple of {num_heads} heads")
        if fuse_qk and (static_kv or qk_clip):
            raise InputError("fused queries and keys: for self-attention, without --qk-clip")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = self.head_dim**-0.5
        self.dropout = dropout
        self.static_kv = static_kv
        self.fuse_qk = fuse_qk
        # The order is fairseq's, so that one seed gives one initialisation.
        if fuse_qk:
            self.qk_proj = nn.Linear(embed_dim, 2 * embed_dim, bias=bias)
        else:
            self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        if not fuse_qk:
            self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters(same_width=kdim is None or kdim == embed_dim)
        self.inner_attn_ln = nn.LayerNorm(embed_dim) if inner_norm else None
        self.q_norm = nn.LayerNorm(self.head_dim, bias=False) if qk_norm else None
        self.k_norm = nn.LayerNorm(self.head_dim, bias=False) if qk_norm else None
        self.softcap = softcap
        self.qk_clip = QKClip(num_heads, qk_clip) if qk_clip else None
        self.attn_scale = AttnScale(num_heads) if attn_scale else None
        self.feat_scale = FeatScale(embed_dim) if feat_scale else None
        self.neutreno_lambda = neutreno_lambda
        self.observer: Observer | None = None
        self._state_key = f"attention.{next(_instances)}"

    def reset_parameters(self, same_width: bool = True) -> None:
        """Xavier uniform; q, k and v by 1/sqrt(2), as if they were one fused matrix."""
        gain = 1 / math.sqrt(2) if same_width else 1.0
        if self.fuse_qk:
            for rows in self.qk_proj.weight.chunk(2):
                nn.init.xavier_uniform_(rows, gain=gain)
        for projection in (self.v_proj,) if self.fuse_qk else (self.k_proj, self.v_proj, self.q_proj):
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
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query_BTC: (B, T, C).
            key_BSC: (B, S, kdim) for cross-attention; None for self-attention.
            key_padding_mask: (B, S) bool, True at padding; with an incremental state, of all keys so far.
            causal: mask out the future (self-attention without incremental state).
            incremental_state: keys and values of earlier steps, kept between calls.
            need_weights: also return the attention probabilities, which are then not fused away.
            first_values: (B, H, T, D), the stack's first layer's :meth:`values` of the queries' tokens, for NeuTRENO.

        Returns:
            output (B, T, C), and the probabilities (B, H, T, S) or None.
        """
        if self.fuse_qk:
            q, k = map(self._heads, self.qk_proj(query_BTC).chunk(2, dim=-1))
        else:
            q, k = self._heads(self.q_proj(query_BTC)), None
        if self.q_norm is not None:
            q = self.q_norm(q)
        k, v = self._keys_and_values(query_BTC if key_BSC is None else key_BSC, incremental_state, k)
        if self.observer is not None:
            with torch.no_grad():
                self.observer(self, q.detach(), k.detach(), key_padding_mask, causal)
        if self.qk_clip is not None and self.training:
            self.qk_clip.observe(q, k, key_padding_mask, causal, self.scale)

        queries, keys = q.shape[2], k.shape[2]
        only_causal = causal and key_padding_mask is None and queries == keys and queries > 1
        # on a CPU the fused kernel is made for many queries: for one, a step of decoding, two products are faster
        one_on_cpu = queries == 1 and q.device.type == "cpu" and not torch.is_grad_enabled()
        explicit = self.softcap > 0 or need_weights or one_on_cpu
        mask = None
        if explicit or not only_causal:
            mask = visible(key_padding_mask, causal, queries, keys, q.device)
        weights = self._weights(q, k, mask) if explicit else None
        dropout = self.dropout if self.training else 0.0
        if explicit:
            out = F.dropout(weights, dropout).to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, None if only_causal else mask, dropout, is_causal=only_causal, scale=self.scale
            )
        if self.attn_scale is not None:
            out = self.attn_scale(out, v, key_padding_mask, causal)
        if self.neutreno_lambda and first_values is not None:
            out = neutreno(out, v[:, :, -queries:], first_values, self.neutreno_lambda)
        out = out.transpose(1, 2).flatten(2)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        out = self.out_proj(out)
        if self.feat_scale is not None:
            out = self._scale_features(out, key_padding_mask, causal, incremental_state)
        return out, weights if need_weights else None

    def values(self, x_BTC: Tensor) -> Tensor:
        """V of these tokens, (B, H, T, D)."""
        return self._heads(self.v_proj(x_BTC))

    def _scale_features(
        self,
        out_BTC: Tensor,
        key_padding_mask: Tensor | None,
        causal: bool,
        incremental_state: IncrementalState | None,
    ) -> Tensor:
        """FeatScale; a step of decoding goes on with the running mean of the steps before."""
        queries_mask = None if key_padding_mask is None else key_padding_mask[:, -out_BTC.shape[1] :]
        if incremental_state is None:
            return self.feat_scale(out_BTC, queries_mask, causal)[0]
        state = incremental_state[self._state_key]
        past = (state["feature_sum"], state["feature_count"]) if "feature_sum" in state else None
        out, (state["feature_sum"], state["feature_count"]) = self.feat_scale(out_BTC, queries_mask, True, past)
        return out

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The attention probabilities (B, H, T, S), float32."""
        logits = (q * self.scale) @ k.transpose(-2, -1)
        if self.softcap > 0:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if mask is not None:
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # finite: no NaN where nothing is visible
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def _keys_and_values(
        self, x_BSC: Tensor, incremental_state: IncrementalState | None, k: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All keys and values there are; ``k``: the new keys, where they were made with the queries."""
        past = None if incremental_state is None else incremental_state.get(self._state_key)
        if past is not None and self.static_kv:
            return past["k"], past["v"]
        k, v = self._heads(self.k_proj(x_BSC)) if k is None else k, self.values(x_BSC)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if incremental_state is None:
            return k, v
        if self.static_kv:  # once a sentence, lest every step's product copies them
            k, v = k.contiguous(), v.contiguous()
        if past is not None:
            k, v = torch.cat([past["k"], k], dim=2), torch.cat([past["v"], v], dim=2)
        incremental_state[self._state_key] = {**(past or {}), "k": k, "v": v}
        return k, v

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq calls this before every micro-batch."""
        if self.qk_clip is not None:
            self.qk_clip.clip_(num_updates, (self.q_proj, self.k_proj))

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
