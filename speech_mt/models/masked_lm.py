"""``spectral_masked_lm``: a bidirectional text encoder, for fairseq's ``masked_lm`` task (BERT, arXiv 1810.04805).

The encoder is that of ``spectral_transformer``. Its mean over tokens is a sentence's vector; its tokens, with two
scores each, are the answer spans of a text.
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F
from fairseq.models import FairseqEncoderModel, register_model, register_model_architecture
from fairseq.models.transformer import Embedding
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from speech_mt.models.config import SpectralMaskedLMConfig
from speech_mt.models.encoder import TextEncoder
from speech_mt.models.spectral import SpectralModel, reparametrize, set_defaults
from speech_mt.modules.token_mixing import masked_mean


class MaskedLMHead(nn.Module):
    """A dense layer, GELU, LayerNorm and the embedding's transpose, as BERT has it."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(embedding.embedding_dim, embedding.embedding_dim)
        self.layer_norm = nn.LayerNorm(embedding.embedding_dim)
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V) scores."""
        return F.linear(self.layer_norm(F.gelu(self.dense(x))), self.weight, self.bias)


@register_model("spectral_masked_lm", dataclass=SpectralMaskedLMConfig)
class SpectralMaskedLM(SpectralModel, FairseqEncoderModel):
    """An encoder and the head that guesses masked tokens."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__(encoder)
        self.lm_head = MaskedLMHead(encoder.embed_tokens)

    @classmethod
    def build_model(cls, cfg: SpectralMaskedLMConfig, task: FairseqTask) -> SpectralMaskedLM:
        """A new model for the task's dictionary, which has ``<mask>``."""
        dictionary = task.source_dictionary
        embedding = Embedding(len(dictionary), cfg.encoder_embed_dim, dictionary.pad())
        model = cls(TextEncoder(cfg, dictionary, embedding))
        reparametrize(model, cfg)
        return model

    def features(self, src_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) token ids -> the encoder's output (B, S, C), and which tokens are no padding (B, S)."""
        return self.encoder(src_tokens)["encoder_out"][0].transpose(0, 1), src_tokens.ne(self.encoder.padding_idx)

    def sentence_vectors(self, src_tokens: Tensor) -> Tensor:
        """(B, S) token ids -> (B, C), the mean over the tokens."""
        x, valid = self.features(src_tokens)
        return masked_mean(x, valid.unsqueeze(-1), dim=1).squeeze(1)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, masked_tokens: Tensor | None = None, **_: object
    ) -> tuple[Tensor, dict]:
        """(B, S) token ids -> scores (N, V) of the N ``masked_tokens`` (B, S), of all if there is no such mask."""
        x, _ = self.features(src_tokens)
        return self.lm_head(x if masked_tokens is None else x[masked_tokens]), {}

    def get_normalized_probs(
        self, net_output: tuple[Tensor, dict], log_probs: bool, sample: dict | None = None
    ) -> Tensor:
        """Probabilities or their logarithms, float32."""
        scores = net_output[0].float()
        return scores.log_softmax(-1) if log_probs else scores.softmax(-1)


@register_model_architecture("spectral_masked_lm", "spectral_masked_lm_tiny")
def tiny(args: Namespace) -> None:
    """4 layers of width 128: for tests and a laptop."""
    set_defaults(args, encoder_embed_dim=128, encoder_ffn_embed_dim=512, encoder_attention_heads=4, encoder_layers=4)
