"""Encoders: a stack of Transformer layers after a text embedding or a convolution over speech features.

Shape suffixes: B batch, S source positions, F features, C embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from fairseq.models import FairseqEncoder
from fairseq.modules import PositionalEmbedding
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from speech_mt.errors import InputError
from speech_mt.models.config import EncoderConfig, SpeechConfig, encoder_layer_config
from speech_mt.modules.conv_frontend import ConvFrontend
from speech_mt.modules.layers import EncoderLayer
from speech_mt.modules.residual import NORM_FIRST

EncoderOut = dict[str, list[Tensor]]


class TransformerEncoder(FairseqEncoder):
    """The stack. Subclasses make its input and call :meth:`encode`."""

    def __init__(self, cfg: EncoderConfig, dictionary: object = None) -> None:
        super().__init__(dictionary)
        self.dropout = cfg.dropout
        self.max_source_positions = cfg.max_source_positions
        self.embed_scale = math.sqrt(cfg.encoder_embed_dim)
        layer_cfg = encoder_layer_config(cfg)
        layers = [EncoderLayer(layer_cfg) for _ in range(cfg.encoder_layers)]
        if cfg.checkpoint_activations:
            layers = [checkpoint_wrapper(layer) for layer in layers]
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(cfg.encoder_embed_dim) if layer_cfg.norm_placement in NORM_FIRST else None

    def encode(self, x_BSC: Tensor, padding_mask: Tensor | None, return_all_hiddens: bool = False) -> EncoderOut:
        """Run the layers.

        Args:
            x_BSC: embedded input; what lies at padding does not matter.
            padding_mask: (B, S), True at padding, or None if there is none.
            return_all_hiddens: also return the input and each layer's output.

        Returns:
            fairseq's encoder output: lists that hold ``encoder_out`` (S, B, C), ``encoder_padding_mask`` (B, S) or
            nothing, ``encoder_states`` (S, B, C) each.
        """
        x = F.dropout(x_BSC, self.dropout, self.training)
        states = [x]
        first_values = self.layers[0].first_values(x) if self.layers else None
        for i, layer in enumerate(self.layers):
            x = layer(x, padding_mask, first_values if i else None)
            states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x.transpose(0, 1)],
            "encoder_padding_mask": [] if padding_mask is None else [padding_mask],
            "encoder_embedding": [],
            "encoder_states": [state.transpose(0, 1) for state in states] if return_all_hiddens else [],
            "src_tokens": [],
            "src_lengths": [],
        }

    def reorder_encoder_out(self, encoder_out: EncoderOut, new_order: Tensor) -> EncoderOut:
        """Follow a beam search: sentence i becomes the old sentence new_order[i]."""
        batch_dim = {"encoder_out": 1, "encoder_states": 1}
        return {
            key: [value.index_select(batch_dim.get(key, 0), new_order) for value in values]
            for key, values in encoder_out.items()
        }

    def max_positions(self) -> int:
        return self.max_source_positions


class TextEncoder(TransformerEncoder):
    """Embeds tokens and their positions (sinusoidal), and encodes them."""

    def __init__(self, cfg: EncoderConfig, dictionary: object, embed_tokens: nn.Embedding) -> None:
        super().__init__(cfg, dictionary)
        self.padding_idx = embed_tokens.padding_idx
        self.embed_tokens = embed_tokens
        self.embed_positions = PositionalEmbedding(cfg.max_source_positions, cfg.encoder_embed_dim, self.padding_idx)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, return_all_hiddens: bool = False
    ) -> EncoderOut:
        """(B, S) token ids -> encoder output; see :meth:`TransformerEncoder.encode`."""
        padding_mask = src_tokens.eq(self.padding_idx)
        x = self.embed_scale * self.embed_tokens(src_tokens) + self.embed_positions(src_tokens)
        return self.encode(x, padding_mask if padding_mask.any() else None, return_all_hiddens)


class SpeechEncoder(TransformerEncoder):
    """Shortens (B, T, F) features by convolutions, adds positions, and encodes them.

    Args:
        cfg: the model's options.
        features: F.
        ctc_classes: if not 0, ``ctc_logits`` (S, B, ctc_classes) over the last layer join the output.
    """

    PADDING = 1  # PositionalEmbedding counts positions from PADDING + 1 on

    def __init__(self, cfg: SpeechConfig, features: int, ctc_classes: int = 0) -> None:
        super().__init__(cfg)
        self.subsample = ConvFrontend(
            features,
            cfg.conv_channels,
            cfg.encoder_embed_dim,
            kernel_sizes=_integers("--conv-kernel-sizes", cfg.conv_kernel_sizes),
            strides=_integers("--conv-strides", cfg.conv_strides),
        )
        self.embed_positions = PositionalEmbedding(cfg.max_source_positions, cfg.encoder_embed_dim, self.PADDING)
        self.ctc_proj = nn.Linear(cfg.encoder_embed_dim, ctc_classes) if ctc_classes else None

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, return_all_hiddens: bool = False) -> EncoderOut:
        """(B, T, F) features and (B,) frames -> encoder output, plus ``ctc_logits`` if the encoder has them."""
        x, lengths = self.subsample(src_tokens, src_lengths)
        padding_mask = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        x = self.embed_scale * x + self.embed_positions(padding_mask.long() * self.PADDING)
        out = self.encode(x, padding_mask if padding_mask.any() else None, return_all_hiddens)
        if self.ctc_proj is not None:
            out["ctc_logits"] = [self.ctc_proj(out["encoder_out"][0])]
        return out


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text!r}: give whole numbers with commas between, such as 5,5") from None
