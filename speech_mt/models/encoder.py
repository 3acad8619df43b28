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

from speech_mt.data.features import FRAME_SHIFT_MS
from speech_mt.errors import InputError
from speech_mt.models.config import EncoderConfig, SpeechConfig, encoder_layer_config
from speech_mt.modules.conv_frontend import ConvFrontend
from speech_mt.modules.layers import EncoderLayer
from speech_mt.modules.positions import CAPE
from speech_mt.modules.residual import NORM_FIRST
from speech_mt.modules.utterance_norm import UtteranceNorm

EncoderOut = dict[str, list[Tensor]]
NOT_LETTERS = ("<pad>", "</s>", "<unk>")  # ids 1 to 3 of a fairseq dictionary; <s>, 0, is the blank
UNLIKELY = -1e4  # their logit: finite, also in half precision


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

        def reorder(key: str, value: Tensor) -> Tensor:
            if key not in ("encoder_out", "encoder_states", "ctc_logits"):
                return value.index_select(0, new_order)
            # (S, B, C) that lies in memory as (B, S, C), as the decoder reads it, and stays so
            return value.transpose(0, 1).index_select(0, new_order).transpose(0, 1)

        return {key: [reorder(key, value) for value in values] for key, values in encoder_out.items()}

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
        self.embed_scale = 1.0 if cfg.no_scale_embedding else self.embed_scale
        self.input_norm = UtteranceNorm() if cfg.input_norm else None
        self.conv_dropout = cfg.conv_dropout
        self.embed_positions = self._positions(cfg)
        self.ctc_letters_only = cfg.ctc_letters_only
        labels = ctc_classes - len(NOT_LETTERS) if cfg.ctc_letters_only else ctc_classes
        self.ctc_proj = nn.Linear(cfg.encoder_embed_dim, labels) if ctc_classes else None
        if str(cfg.init) == "sigma_reparam":
            init_as_sigma_reparam_(self, cfg)

    def _positions(self, cfg: SpeechConfig) -> nn.Module:
        if str(cfg.positions) == "sinusoidal":
            return PositionalEmbedding(cfg.max_source_positions, cfg.encoder_embed_dim, self.PADDING)
        try:
            return CAPE(
                cfg.encoder_embed_dim,
                FRAME_SHIFT_MS / 1000 * self.subsample.stride,
                cfg.cape_freq_scale,
                cfg.cape_global_shift,
                cfg.cape_local_shift,
                cfg.cape_global_scale,
            )
        except ValueError as error:
            raise InputError(f"--positions cape: {error}") from None

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, return_all_hiddens: bool = False) -> EncoderOut:
        """(B, T, F) features and (B,) frames -> encoder output, plus ``ctc_logits`` if the encoder has them."""
        if self.input_norm is not None:
            src_tokens = self.input_norm(src_tokens, src_lengths)
        x, lengths = self.subsample(src_tokens, src_lengths)
        x = F.dropout(x, self.conv_dropout, self.training)
        padding_mask = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        if isinstance(self.embed_positions, CAPE):
            positions = self.embed_positions(padding_mask).to(x.dtype)
        else:
            positions = self.embed_positions(padding_mask.long() * self.PADDING)
        x = self.embed_scale * x + positions
        out = self.encode(x, padding_mask if padding_mask.any() else None, return_all_hiddens)
        if self.ctc_proj is not None:
            out["ctc_logits"] = [self._ctc_logits(out["encoder_out"][0])]
        return out

    def _ctc_logits(self, x_SBC: Tensor) -> Tensor:
        """(S, B, V); what is no letter has no score to speak of."""
        logits = self.ctc_proj(x_SBC)
        if not self.ctc_letters_only:
            return logits
        unlikely = logits.new_full((*logits.shape[:-1], len(NOT_LETTERS)), UNLIKELY)
        return torch.cat([logits[..., :1], unlikely, logits[..., 1:]], dim=-1)


@torch.no_grad()
def init_as_sigma_reparam_(encoder: SpeechEncoder, cfg: SpeechConfig) -> None:
    """The initialisation of the speech code of sigmaReparam (Zhai et al. 2023), in place.

    Convolutions and the output: LeCun uniform, +-sqrt(3 / inputs); reparametrised weights: normal with ``init_std``,
    which with gamma 1 sets the size of steps and not the function; others: uniform +-sqrt(1 / inputs). All biases there
    are: uniform +-sqrt(1 / inputs).

    Raises:
        InputError: the norm placement has an initialisation of its own.
    """
    if str(cfg.norm_placement) in ("deepnorm", "subln"):
        raise InputError(f"--norm-placement {cfg.norm_placement} has its own initial weights: leave out --init")
    for name, module in encoder.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d):
            continue
        inputs = module.weight[0].numel()
        if str(cfg.reparam) != "none" and (name.startswith("layers.") or cfg.reparam_output and name == "ctc_proj"):
            nn.init.normal_(module.weight, std=cfg.init_std)
        else:
            bound = math.sqrt((1 if name.startswith("layers.") else 3) / inputs)
            nn.init.uniform_(module.weight, -bound, bound)
        if module.bias is not None:
            nn.init.uniform_(module.bias, -(inputs**-0.5), inputs**-0.5)


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text!r}: give whole numbers with commas between, such as 5,5") from None
