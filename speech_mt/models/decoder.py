"""The decoder of the encoder-decoders.

Shape suffixes: B batch, T target positions, S source positions, C embedding.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from fairseq.models import FairseqIncrementalDecoder
from fairseq.modules import PositionalEmbedding
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from speech_mt.models.config import EncoderConfig, decoder_dim, decoder_layer_config
from speech_mt.models.encoder import EncoderOut
from speech_mt.modules.attention import IncrementalState
from speech_mt.modules.layers import DecoderLayer
from speech_mt.modules.residual import NORM_FIRST


class TransformerDecoder(FairseqIncrementalDecoder):
    """Embeds the tokens so far, runs the layers over them and the encoder output, and scores the next token."""

    def __init__(self, cfg: EncoderConfig, dictionary: object, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        dim = decoder_dim(cfg)
        self.dropout = cfg.dropout
        self.max_target_positions = cfg.max_target_positions
        self.embed_scale = math.sqrt(dim)
        self.padding_idx = embed_tokens.padding_idx
        self.embed_tokens = embed_tokens
        self.embed_positions = PositionalEmbedding(cfg.max_target_positions, dim, self.padding_idx)
        layer_cfg = decoder_layer_config(cfg)
        layers = [DecoderLayer(layer_cfg) for _ in range(cfg.decoder_layers)]
        if cfg.checkpoint_activations:
            layers = [checkpoint_wrapper(layer) for layer in layers]
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(dim) if layer_cfg.norm_placement in NORM_FIRST else None
        self.output_projection = nn.Linear(dim, embed_tokens.num_embeddings, bias=False)
        if cfg.share_decoder_input_output_embed:
            self.output_projection.weight = embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, mean=0, std=dim**-0.5)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: EncoderOut,
        incremental_state: IncrementalState | None = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, dict]:
        """Score every next token.

        Args:
            prev_output_tokens: (B, T), shifted right; padding on either side, as long as it stays while decoding.
            encoder_out: see :class:`speech_mt.models.encoder.TransformerEncoder`.
            incremental_state: while decoding, what earlier steps computed; only the last token is then new.
            features_only: leave out the output projection.
            full_context_alignment: let positions see the future (for alignments of a given target).
            alignment_layer: the layer whose cross-attention is returned (default: the last, while decoding only).
            alignment_heads: how many of its heads are averaged (default: all).
            return_all_hiddens: also return each layer's output.

        Returns:
            (B, T, V) scores or (B, T, C) features, and a dict: ``attn`` [(B, T, S) or None], ``inner_states``
            [(T, B, C)], ``encoder_out``.
        """
        # Right padding lies in the future of every real token, so the causal mask alone hides it.
        padding = prev_output_tokens.eq(self.padding_idx)
        hidden_by_causality = not full_context_alignment and not padding[:, 0].any()
        padding_mask = None if hidden_by_causality or not padding.any() else padding

        # While decoding, fairseq counts positions from the left end, which is right unless there is padding.
        by_step = incremental_state if padding_mask is None else None
        positions = self.embed_positions(prev_output_tokens, incremental_state=by_step)
        if incremental_state is not None:
            prev_output_tokens, positions = prev_output_tokens[:, -1:], positions[:, -1:]
        x = self.embed_scale * self.embed_tokens(prev_output_tokens) + positions
        x = F.dropout(x, self.dropout, self.training)
        encoder_out_BSC = encoder_out["encoder_out"][0].transpose(0, 1)
        encoder_padding_mask = next(iter(encoder_out["encoder_padding_mask"]), None)
        if alignment_layer is None and incremental_state is not None:
            alignment_layer = len(self.layers) - 1

        attention, states = None, [x]
        first_values = self.layers[0].first_values(x) if self.layers else None
        for i, layer in enumerate(self.layers):
            x, weights = layer(
                x,
                encoder_out_BSC,
                encoder_padding_mask,
                padding_mask,
                incremental_state,
                causal=not full_context_alignment,
                need_weights=i == alignment_layer,
                first_values=first_values if i else None,
            )
            states.append(x)
            if weights is not None:
                attention = weights[:, :alignment_heads].mean(dim=1)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if not features_only:
            x = self.output_layer(x)
        return x, {
            "attn": [attention],
            "inner_states": [state.transpose(0, 1) for state in states] if return_all_hiddens else [],
            "encoder_out": encoder_out,
        }

    def output_layer(self, features: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        return self.max_target_positions
