"""``spectral_transformer``: text to text, a Transformer whose weights and depth are under control."""

from __future__ import annotations

from argparse import Namespace

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.models.transformer import Embedding
from fairseq.tasks import FairseqTask
from torch import Tensor

from speech_mt.errors import InputError
from speech_mt.models.config import SpectralTransformerConfig, decoder_dim
from speech_mt.models.decoder import TransformerDecoder
from speech_mt.models.encoder import TextEncoder
from speech_mt.models.spectral import SpectralModel, check_config, reparametrize, set_defaults


@register_model("spectral_transformer", dataclass=SpectralTransformerConfig)
class SpectralTransformer(SpectralModel, FairseqEncoderDecoderModel):
    """With no option of ours set, the same function as fairseq's ``transformer``, from the same initialisation."""

    supports_align_args = True

    @classmethod
    def build_model(cls, cfg: SpectralTransformerConfig, task: FairseqTask) -> SpectralTransformer:
        """A new model for the task's dictionaries.

        Raises:
            InputError: an option out of range; ``--share-all-embeddings`` without a joined dictionary or with different
                widths.
        """
        check_config(cfg)
        source, target = task.source_dictionary, task.target_dictionary
        if cfg.share_all_embeddings:
            if source != target:
                raise InputError(
                    f"--share-all-embeddings: the dictionaries of {task.cfg.source_lang} ({len(source)}) and "
                    f"{task.cfg.target_lang} ({len(target)}) differ; run fairseq-preprocess --joined-dictionary"
                )
            if decoder_dim(cfg) != cfg.encoder_embed_dim:
                raise InputError("--share-all-embeddings needs --decoder-embed-dim equal to --encoder-embed-dim")
            cfg.share_decoder_input_output_embed = True
        encoder_embedding = _embedding(source, cfg.encoder_embed_dim)
        decoder_embedding = encoder_embedding if cfg.share_all_embeddings else _embedding(target, decoder_dim(cfg))
        encoder = TextEncoder(cfg, source, encoder_embedding)
        decoder = TransformerDecoder(cfg, target, decoder_embedding)
        model = cls(encoder, decoder)
        reparametrize(model, cfg)
        return model

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor, **kwargs: object
    ) -> tuple[Tensor, dict]:
        """(B, S) source ids, (B, T) target ids so far -> (B, T, V) scores and extras."""
        encoder_out = self.encoder(src_tokens, src_lengths)
        return self.decoder(prev_output_tokens, encoder_out=encoder_out, **kwargs)


def _embedding(dictionary: Dictionary, dim: int) -> Embedding:
    return Embedding(len(dictionary), dim, dictionary.pad())


# The widths of the sigmaReparam paper's translation models (base), and of a laptop.
_WIDTHS = {
    "": {"encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048, "encoder_attention_heads": 8},
    "_tiny": {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256, "encoder_attention_heads": 4},
}


def _register_architecture(name: str, layers: int, width: str) -> None:
    @register_model_architecture("spectral_transformer", name)
    def architecture(args: Namespace) -> None:
        set_defaults(args, encoder_layers=layers, decoder_layers=layers, **_WIDTHS[width])


_register_architecture("spectral_transformer_tiny", 2, "_tiny")
for _layers in (6, 18, 50, 100):
    for _width in _WIDTHS:
        _register_architecture(f"spectral_transformer_{_layers}l{_width}", _layers, _width)
