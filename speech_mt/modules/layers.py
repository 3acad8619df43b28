"""Transformer encoder and decoder layers, batch first, with fairseq's parameter names.

Shape suffixes: B batch, T positions, S source positions, C embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speech_mt.modules.attention import IncrementalState, MultiheadAttention
from speech_mt.modules.residual import ResidualNorm, init_for_depth_, residual_scale

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu, "tanh": torch.tanh}


@dataclass(frozen=True)
class LayerConfig:
    """What a layer needs to know; one for all layers of a stack.

    ``encoder_layers`` and ``decoder_layers`` (0: no decoder) are the depths of the whole model: the scales and
    initialisations of deep placements depend on both. With ``attention_shift`` an encoder layer adds a learned number,
    at first 0, to the input of its attention, as the speech code of sigmaReparam does.
    """

    embed_dim: int
    ffn_embed_dim: int
    attention_heads: int
    encoder_layers: int
    decoder_layers: int = 0
    encoder_dim: int | None = None
    norm_placement: str = "post"
    activation_fn: str = "relu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layerdrop: float = 0.0
    bias: bool = True
    qk_norm: bool = False
    attention_softcap: float = 0.0
    qk_clip: float = 0.0
    token_mixing: tuple[str, ...] = ()
    neutreno_lambda: float = 0.0
    fuse_qk: bool = False
    attention_shift: bool = False


class _Layer(nn.Module):
    """The feed-forward branch, dropout and layerdrop, which encoder and decoder layers share."""

    def __init__(self, cfg: LayerConfig, decoder: bool) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation = ACTIVATIONS[cfg.activation_fn]
        depth = (cfg.norm_placement, cfg.encoder_layers, cfg.decoder_layers, decoder)
        self.residual_scale = residual_scale(*depth)
        self.self_attn = self._attention(
            attn_scale="attn_scale" in cfg.token_mixing,
            feat_scale="feat_scale" in cfg.token_mixing,
            neutreno_lambda=cfg.neutreno_lambda if "neutreno" in cfg.token_mixing else 0.0,
        )
        self.self_attn_layer_norm = self._residual_norm()
        self.attention_shift = nn.Parameter(torch.zeros(1)) if cfg.attention_shift and not decoder else None
        if decoder:
            self.encoder_attn = self._attention(kdim=cfg.encoder_dim, static_kv=True)
            self.encoder_attn_layer_norm = self._residual_norm()
        self.fc1 = nn.Linear(cfg.embed_dim, cfg.ffn_embed_dim, bias=cfg.bias)
        self.fc2 = nn.Linear(cfg.ffn_embed_dim, cfg.embed_dim, bias=cfg.bias)
        self.ffn_layernorm = nn.LayerNorm(cfg.ffn_embed_dim) if cfg.norm_placement == "subln" else None
        self.final_layer_norm = self._residual_norm()
        init_for_depth_(self, *depth)

    def _attention(self, **options: object) -> MultiheadAttention:
        cfg = self.cfg
        return MultiheadAttention(
            cfg.embed_dim,
            cfg.attention_heads,
            dropout=cfg.attention_dropout,
            bias=cfg.bias,
            inner_norm=cfg.norm_placement == "subln" and not options.get("static_kv"),
            qk_norm=cfg.qk_norm,
            softcap=cfg.attention_softcap,
            qk_clip=cfg.qk_clip,
            fuse_qk=cfg.fuse_qk and not options.get("static_kv"),
            **options,
        )

    def _residual_norm(self) -> ResidualNorm:
        return ResidualNorm(self.cfg.embed_dim, self.cfg.norm_placement, self.residual_scale)

    def first_values(self, x_BTC: Tensor) -> Tensor | None:
        """As a stack's first layer: its values of the stack's input, which NeuTRENO adds in the others; else None."""
        if not self.self_attn.neutreno_lambda:
            return None
        return self.self_attn.values(self._attention_input(x_BTC))

    def _attention_input(self, x_BTC: Tensor) -> Tensor:
        """What self-attention is given of the residual stream."""
        x = self.self_attn_layer_norm.before(x_BTC)
        return x if self.attention_shift is None else x + self.attention_shift

    def _dropout(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.cfg.dropout, self.training)

    def _layerdrop(self) -> float:
        """One draw a layer and forward, which multiplies every branch of it by 0 or 1 (so no parameter is unused)."""
        if not self.training or self.cfg.layerdrop == 0:
            return 1.0
        return float(torch.rand(()) >= self.cfg.layerdrop)

    def _join(self, residual: ResidualNorm, x: Tensor, branch: Tensor, keep: float) -> Tensor:
        branch = self._dropout(branch)
        return residual.after(x, branch if keep == 1 else branch * keep)

    def _feed_forward(self, x: Tensor, keep: float) -> Tensor:
        hidden = self.activation(self.fc1(self.final_layer_norm.before(x)))
        hidden = F.dropout(hidden, self.cfg.activation_dropout, self.training)
        if self.ffn_layernorm is not None:
            hidden = self.ffn_layernorm(hidden)
        return self._join(self.final_layer_norm, x, self.fc2(hidden), keep)


class EncoderLayer(_Layer):
    """Self-attention and feed-forward."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__(cfg, decoder=False)

    def forward(self, x_BTC: Tensor, padding_mask: Tensor | None = None, first_values: Tensor | None = None) -> Tensor:
        """(B, T, C), mask (B, T) True at padding, NeuTRENO's V0 -> (B, T, C)."""
        keep = self._layerdrop()
        branch, _ = self.self_attn(
            self._attention_input(x_BTC), key_padding_mask=padding_mask, first_values=first_values
        )
        x = self._join(self.self_attn_layer_norm, x_BTC, branch, keep)
        return self._feed_forward(x, keep)


class DecoderLayer(_Layer):
    """Causal self-attention, cross-attention and feed-forward."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__(cfg, decoder=True)

    def forward(
        self,
        x_BTC: Tensor,
        encoder_out_BSC: Tensor,
        encoder_padding_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        causal: bool = True,
        need_weights: bool = False,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) and the source (B, S, C') -> (B, T, C) and, if asked for, cross-attention (B, H, T, S)."""
        keep = self._layerdrop()
        branch, _ = self.self_attn(
            self._attention_input(x_BTC),
            key_padding_mask=padding_mask,
            causal=causal and incremental_state is None,
            incremental_state=incremental_state,
            first_values=first_values,
        )
        x = self._join(self.self_attn_layer_norm, x_BTC, branch, keep)
        branch, weights = self.encoder_attn(
            self.encoder_attn_layer_norm.before(x),
            encoder_out_BSC,
            key_padding_mask=encoder_padding_mask,
            incremental_state=incremental_state,
            need_weights=need_weights,
        )
        x = self._join(self.encoder_attn_layer_norm, x, branch, keep)
        return self._feed_forward(x, keep), weights
