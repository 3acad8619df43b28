"""Options of the models: flat dataclasses, named as fairseq names them.

Flat, because fairseq ignores ``--encoder-layers`` on the command line when the config is nested, and because a flat
one leaves only plain values in a checkpoint. ``None`` means: as in the encoder. Annotations are evaluated here (no
``from __future__ import annotations``, no ``int | None``): fairseq builds its command line from the types themselves.
"""

from dataclasses import dataclass, field, replace
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from speech_mt.modules.layers import ACTIVATIONS, LayerConfig
from speech_mt.modules.residual import NORM_PLACEMENTS
from speech_mt.modules.token_mixing import token_mixings
from speech_mt.reparam import BASES, REPARAMS, SPECTRA

NEUTRENO_LAMBDA = 0.4


def option(default: object, help: str) -> object:  # noqa: A002
    """A dataclass field with its command-line help."""
    return field(default=default, metadata={"help": help})


@dataclass
class EncoderConfig(FairseqDataclass):
    """What every model has: an encoder, and the controls of weights and depth."""

    activation_fn: ChoiceEnum(list(ACTIVATIONS)) = option("relu", "activation of the feed-forward")
    dropout: float = option(0.1, "dropout on each residual branch and the embeddings")
    attention_dropout: float = option(0.0, "dropout on attention probabilities")
    activation_dropout: float = option(0.0, "dropout after the feed-forward's activation")
    encoder_embed_dim: int = option(512, "width of the encoder")
    encoder_ffn_embed_dim: int = option(2048, "width of the encoder's feed-forward")
    encoder_layers: int = option(6, "number of encoder layers")
    encoder_attention_heads: int = option(8, "attention heads of an encoder layer")
    max_source_positions: int = II("task.max_source_positions")
    checkpoint_activations: bool = option(False, "recompute each layer in the backward pass: less memory, more time")
    norm_placement: ChoiceEnum(list(NORM_PLACEMENTS)) = option(
        "post", "where LayerNorm stands, with the placement's own scales and initialisation"
    )
    reparam: ChoiceEnum(["none", *REPARAMS]) = option(
        "none",
        "every Linear weight of the layers. sigma: gamma / sigma(W) W (arXiv 2303.06296); spectral_norm: W / sigma(W) "
        "(arXiv 1802.05957); weight_norm: g W / ||W|| a row (arXiv 1602.07868)",
    )
    reparam_gamma_init: ChoiceEnum(["one", "spectral"]) = option(
        "one", "sigmaReparam: gamma starts at 1, or at sigma(W) so that nothing changes at update 0"
    )
    reparam_positive_gamma: bool = option(False, "sigmaReparam: gamma = softplus(parameter) > 0")
    reparam_from: Optional[str] = option(
        None, "start from this checkpoint of the same architecture without sigmaReparam, as the same function"
    )
    qk_norm: bool = option(False, "LayerNorm on the queries and keys of each head (arXiv 2302.05442)")
    attention_softcap: float = option(0.0, "C: attention logits become C tanh(logits / C) (arXiv 2408.00118); 0: off")
    qk_clip: float = option(
        0.0, "TAU: after an update, shrink W_q and W_k of heads with logits above TAU (arXiv 2507.20534); 0: off"
    )
    layerdrop: float = option(0.0, "probability to zero the branches of a layer, one draw a layer and forward")
    value_spectrum: ChoiceEnum(list(SPECTRA)) = option(
        "free",
        "eigenvalues of W_V W_O in self-attention (arXiv 2401.04301). smooth: psi^2; sharpen: -psi^2, at least -1; "
        "sharpen-first-half: the first half of the layers of each stack, the others free",
    )
    value_basis: ChoiceEnum(list(BASES)) = option(
        "orthogonal", "eigenvectors of W_V W_O under --value-spectrum: the Q of a learned matrix, or any matrix"
    )
    token_mixing: str = option(
        "",
        "in self-attention: attn_scale, feat_scale (arXiv 2203.05962), neutreno (arXiv 2312.00751), joined by commas",
    )
    neutreno_lambda: float = option(
        NEUTRENO_LAMBDA, "weight of the first layer's values in the others (the authors: text 0.4, images 0.6)"
    )


@dataclass
class DecoderConfig(FairseqDataclass):
    """The decoder of the encoder-decoders."""

    decoder_embed_dim: Optional[int] = option(None, "width of the decoder")
    decoder_ffn_embed_dim: Optional[int] = option(None, "width of the decoder's feed-forward")
    decoder_layers: int = option(6, "number of decoder layers")
    decoder_attention_heads: Optional[int] = option(None, "attention heads of a decoder layer")
    max_target_positions: int = II("task.max_target_positions")
    share_decoder_input_output_embed: bool = option(False, "tie the decoder's embedding and output projection")


@dataclass
class SpectralTransformerConfig(EncoderConfig, DecoderConfig):
    """Text to text."""

    share_all_embeddings: bool = option(
        False, "tie the embeddings of source, target and output (needs a joined dictionary)"
    )


@dataclass
class SpectralMaskedLMConfig(EncoderConfig):
    """A bidirectional text encoder."""

    max_source_positions: int = II("task.tokens_per_sample")


@dataclass
class SpeechConfig(EncoderConfig):
    """What the speech encoders add: the convolution that shortens the input."""

    conv_kernel_sizes: str = option("5,5", "kernel of each convolution before the encoder")
    conv_strides: str = option("2,2", "stride of each: their product is the subsampling factor")
    conv_channels: int = option(1024, "channels between the convolutions (twice the output of each GLU)")
    conv_dropout: float = option(0.0, "dropout on the output of the convolutions, before positions join it")
    input_norm: bool = option(False, "normalise each utterance over time and channels, with a learned scale and bias")
    no_scale_embedding: bool = option(False, "do not multiply the output of the convolutions by sqrt(width)")
    positions: ChoiceEnum(["sinusoidal", "cape"]) = option(
        "sinusoidal", "of the encoder's frames; cape: centred and continuous (arXiv 2106.03143)"
    )
    cape_freq_scale: float = option(30.0, "CAPE: factor of the frequencies")
    cape_global_shift: float = option(30.0, "CAPE, training: shift each utterance by up to this many seconds")
    cape_local_shift: float = option(0.0, "CAPE, training: shift each frame by up to this part of a frame")
    cape_global_scale: float = option(1.0, "CAPE, training: stretch each utterance by up to this factor; 1: off")
    no_bias: bool = option(False, "no biases in the projections of the layers")
    fuse_qk: bool = option(False, "queries and keys from one matrix, with one spectral norm")
    attention_shift: bool = option(False, "encoder: a learned number a layer joins the input of its attention")
    init: ChoiceEnum(["fairseq", "sigma_reparam"]) = option(
        "fairseq",
        "initial weights of the encoder; sigma_reparam: as in the speech code of arXiv 2303.06296, convolutions LeCun "
        "uniform, layers normal with --init-std under --reparam and uniform within 1/sqrt(inputs) without",
    )
    init_std: float = option(0.1, "standard deviation of reparametrised weights under --init sigma_reparam")
    reparam_output: bool = option(False, "--reparam also the linear layer to the CTC labels")
    ctc_letters_only: bool = option(
        False, "CTC over the blank and the letters: fairseq's <pad>, </s> and <unk> get no label"
    )


@dataclass
class SpectralS2TTransformerConfig(SpeechConfig, DecoderConfig):
    """Speech to text by attention."""

    ctc_weight: float = option(0.0, "weight of CTC in the joint criterion; above 0, the encoder has a CTC head")


@dataclass
class SpectralCTCTransformerConfig(SpeechConfig):
    """Speech to text by CTC."""


def encoder_layer_config(cfg: EncoderConfig) -> LayerConfig:
    """The layers of the encoder."""
    return LayerConfig(
        embed_dim=cfg.encoder_embed_dim,
        ffn_embed_dim=cfg.encoder_ffn_embed_dim,
        attention_heads=cfg.encoder_attention_heads,
        encoder_layers=cfg.encoder_layers,
        decoder_layers=getattr(cfg, "decoder_layers", 0),
        norm_placement=str(cfg.norm_placement),
        activation_fn=str(cfg.activation_fn),
        dropout=cfg.dropout,
        attention_dropout=cfg.attention_dropout,
        activation_dropout=cfg.activation_dropout,
        layerdrop=cfg.layerdrop,
        qk_norm=cfg.qk_norm,
        attention_softcap=cfg.attention_softcap,
        qk_clip=cfg.qk_clip,
        token_mixing=token_mixings(cfg.token_mixing),
        neutreno_lambda=cfg.neutreno_lambda,
        bias=not getattr(cfg, "no_bias", False),
        fuse_qk=getattr(cfg, "fuse_qk", False),
        attention_shift=getattr(cfg, "attention_shift", False),
    )


def decoder_layer_config(cfg: EncoderConfig) -> LayerConfig:
    """The layers of the decoder."""
    return replace(
        encoder_layer_config(cfg),
        embed_dim=decoder_dim(cfg),
        ffn_embed_dim=cfg.decoder_ffn_embed_dim or cfg.encoder_ffn_embed_dim,
        attention_heads=cfg.decoder_attention_heads or cfg.encoder_attention_heads,
        encoder_dim=cfg.encoder_embed_dim,
    )


def decoder_dim(cfg: EncoderConfig) -> int:
    """Width of the decoder."""
    return cfg.decoder_embed_dim or cfg.encoder_embed_dim
