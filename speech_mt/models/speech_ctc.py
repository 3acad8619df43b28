"""``spectral_ctc_transformer``: a speech encoder that scores letters or pieces frame by frame, trained with CTC."""

from __future__ import annotations

from argparse import Namespace

import torch
from fairseq.models import FairseqEncoderModel, register_model, register_model_architecture
from fairseq.tasks import FairseqTask
from torch import Tensor

from speech_mt.models.config import SpectralCTCTransformerConfig
from speech_mt.models.encoder import SpeechEncoder
from speech_mt.models.spectral import SpectralModel, check_config, check_speech_task, reparametrize, set_defaults


@register_model("spectral_ctc_transformer", dataclass=SpectralCTCTransformerConfig)
class SpectralCTCTransformer(SpectralModel, FairseqEncoderModel):
    """Convolutions over filterbanks, a Transformer encoder, a linear layer to the dictionary (blank is index 0)."""

    @classmethod
    def build_model(cls, cfg: SpectralCTCTransformerConfig, task: FairseqTask) -> SpectralCTCTransformer:
        """A new model for the task's features and dictionary."""
        check_speech_task(cls, task)
        check_config(cfg)
        model = cls(SpeechEncoder(cfg, task.cfg.num_mel_bins, ctc_classes=len(task.target_dictionary)))
        reparametrize(model, cfg)
        return model

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, **_: object) -> dict[str, Tensor | None]:
        """(B, T, F) features, (B,) frames -> ``encoder_out`` (S, B, V) scores, ``padding_mask`` (B, S) or None."""
        out = self.encoder(src_tokens, src_lengths)
        return {
            "encoder_out": out["ctc_logits"][0],
            "padding_mask": next(iter(out["encoder_padding_mask"]), None),
        }

    def get_normalized_probs(
        self, net_output: dict[str, Tensor | None], log_probs: bool, sample: dict | None = None
    ) -> Tensor:
        """(S, B, V) probabilities or their logarithms, float32."""
        scores = net_output["encoder_out"].float()
        return scores.log_softmax(-1) if log_probs else torch.softmax(scores, -1)


@register_model_architecture("spectral_ctc_transformer", "spectral_ctc_transformer_tiny")
def tiny(args: Namespace) -> None:
    """4 layers of width 128: for tests and a laptop."""
    set_defaults(
        args,
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=512,
        encoder_attention_heads=4,
        encoder_layers=4,
        conv_channels=256,
    )


@register_model_architecture("spectral_ctc_transformer", "spectral_ctc_transformer_36l")
def zhai_36l(args: Namespace) -> None:
    """The 36-layer model of sigmaReparam's speech code: 255,798,776 parameters with 28 letters and the blank."""
    set_defaults(
        args,
        encoder_embed_dim=768,
        encoder_ffn_embed_dim=3072,
        encoder_attention_heads=4,
        encoder_layers=36,
        conv_kernel_sizes="7",
        conv_strides="3",
        conv_dropout=0.3,
        dropout=0.0,
        attention_dropout=0.3,
        activation_dropout=0.3,
        layerdrop=0.3,
        input_norm=True,
        no_scale_embedding=True,
        positions="cape",
        no_bias=True,
        fuse_qk=True,
        attention_shift=True,
        reparam="sigma",
        reparam_output=True,
        ctc_letters_only=True,
        init="sigma_reparam",
    )
