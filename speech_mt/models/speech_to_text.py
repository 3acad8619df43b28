"""``spectral_s2t_transformer``: speech to text by attention, with an optional CTC head on the encoder."""

from __future__ import annotations

from argparse import Namespace

from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.models.transformer import Embedding
from fairseq.tasks import FairseqTask
from torch import Tensor

from speech_mt.errors import InputError
from speech_mt.models.config import SpectralS2TTransformerConfig, decoder_dim
from speech_mt.models.decoder import TransformerDecoder
from speech_mt.models.encoder import SpeechEncoder
from speech_mt.models.spectral import SpectralModel, check_config, check_speech_task, reparametrize, set_defaults


@register_model("spectral_s2t_transformer", dataclass=SpectralS2TTransformerConfig)
class SpectralS2TTransformer(SpectralModel, FairseqEncoderDecoderModel):
    """Convolutions over filterbanks, a Transformer encoder, a Transformer decoder."""

    @classmethod
    def build_model(cls, cfg: SpectralS2TTransformerConfig, task: FairseqTask) -> SpectralS2TTransformer:
        """A new model for the task's features and dictionary; a CTC head if there is a ``ctc_weight``."""
        check_speech_task(cls, task)
        check_config(cfg)
        target = task.target_dictionary
        embedding = Embedding(len(target), decoder_dim(cfg), target.pad())
        encoder = SpeechEncoder(cfg, task.cfg.num_mel_bins, ctc_classes=len(target) if cfg.ctc_weight > 0 else 0)
        model = cls(encoder, TransformerDecoder(cfg, target, embedding))
        reparametrize(model, cfg)
        return model

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor, **kwargs: object
    ) -> tuple[Tensor, dict]:
        """(B, T, F) features, (B,) frames, (B, U) target ids so far -> (B, U, V) scores and extras."""
        encoder_out = self.encoder(src_tokens, src_lengths)
        return self.decoder(prev_output_tokens, encoder_out=encoder_out, **kwargs)

    def get_ctc_output(self, net_output: tuple[Tensor, dict], sample: dict | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the CTC head (S, B, V) and the encoder's frames (B,); asked for by the criterion."""
        encoder_out = net_output[1]["encoder_out"]
        if "ctc_logits" not in encoder_out:
            raise InputError("the joint criterion needs a CTC head on the encoder: give the model the same ctc_weight")
        log_probs = encoder_out["ctc_logits"][0].float().log_softmax(-1)
        frames = log_probs.new_full((log_probs.shape[1],), log_probs.shape[0]).long()
        for padding_mask in encoder_out["encoder_padding_mask"]:
            frames = frames - padding_mask.sum(dim=1)
        return log_probs, frames

    def get_ctc_target(self, sample: dict) -> tuple[Tensor, Tensor]:
        """The targets (B, U) and their lengths (B,), the end of sentence left out of both."""
        lengths = sample["target_lengths"]
        return sample["target"][:, : lengths.max()], lengths


@register_model_architecture("spectral_s2t_transformer", "spectral_s2t_transformer_tiny")
def tiny(args: Namespace) -> None:
    """4L-2L of width 128: for tests and a laptop."""
    set_defaults(
        args,
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=512,
        encoder_attention_heads=4,
        encoder_layers=4,
        decoder_layers=2,
        conv_channels=256,
    )


@register_model_architecture("spectral_s2t_transformer", "spectral_s2t_transformer_s")
def small(args: Namespace) -> None:
    """The size of fairseq's s2t_transformer_s, about 30 M parameters: 12L-6L of width 256, pre-LN."""
    _sized(args, width=256, ffn=2048, heads=4, dropout=0.1)


@register_model_architecture("spectral_s2t_transformer", "spectral_s2t_transformer_m")
def medium(args: Namespace) -> None:
    """The size of fairseq's s2t_transformer_m, about 70 M parameters: 12L-6L of width 512, pre-LN."""
    _sized(args, width=512, ffn=2048, heads=8, dropout=0.15)


@register_model_architecture("spectral_s2t_transformer", "spectral_s2t_transformer_l")
def large(args: Namespace) -> None:
    """The size of fairseq's s2t_transformer_l, about 270 M parameters: 12L-6L of width 1024, pre-LN."""
    _sized(args, width=1024, ffn=4096, heads=16, dropout=0.2)


def _sized(args: Namespace, width: int, ffn: int, heads: int, dropout: float) -> None:
    set_defaults(
        args,
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=ffn,
        encoder_attention_heads=heads,
        encoder_layers=12,
        decoder_layers=6,
        conv_channels=1024,
        dropout=dropout,
        norm_placement="pre",
    )
    set_defaults(args, attention_dropout=args.dropout, activation_dropout=args.dropout)  # as fairseq does
