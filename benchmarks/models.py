"""Models and batches that the benchmarks share: fairseq's own Transformer and ours, same shape, same weights."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerConfig, TransformerModelBase

from speech_mt.models.config import SpectralTransformerConfig
from speech_mt.models.text_to_text import SpectralTransformer

PAD = 1


def keep_memory() -> None:
    """Have glibc keep what a step frees for the next step: fresh pages are the kernel's time, and noise."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for parameter, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
            libc.mallopt(parameter, value)


def task(vocabulary: int) -> SimpleNamespace:
    """What building a model asks of a translation task."""
    dictionary = Dictionary()
    for i in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        cfg=SimpleNamespace(source_lang="de", target_lang="en"),
    )


def sizes(layers: int, dim: int, ffn: int, heads: int) -> dict[str, object]:
    """Options of a model with shared embeddings and no dropout."""
    return {
        "encoder_embed_dim": dim,
        "encoder_ffn_embed_dim": ffn,
        "encoder_attention_heads": heads,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "share_all_embeddings": True,
        "dropout": 0.0,
        "max_source_positions": 1024,
        "max_target_positions": 1024,
    }


def stock_options(layers: int, dim: int, ffn: int, heads: int) -> dict[str, object]:
    """The same for fairseq's ``transformer``."""
    return sizes(layers, dim, ffn, heads) | {
        "decoder_embed_dim": dim,
        "decoder_input_dim": dim,
        "decoder_output_dim": dim,
        "decoder_ffn_embed_dim": ffn,
        "decoder_attention_heads": heads,
        "encoder_normalize_before": False,
        "decoder_normalize_before": False,
    }


def build(
    kind: str, layers: int, dim: int, ffn: int, heads: int, vocabulary: int, **options: object
) -> BaseFairseqModel:
    """``stock`` or ``ours``, from seed 1, embeddings shared, no dropout."""
    torch.manual_seed(1)
    shape = layers, dim, ffn, heads
    if kind == "ours":
        return SpectralTransformer.build_model(SpectralTransformerConfig(**sizes(*shape), **options), task(vocabulary))
    cfg = TransformerConfig.from_namespace(SimpleNamespace(**stock_options(*shape)))
    return TransformerModelBase.build_model(cfg, task(vocabulary))


def batch(sentences: int, length: int, vocabulary: int, ragged: bool = True) -> dict:
    """A batch of sentences of ``length`` tokens; ragged: a quarter of them shorter, padded as fairseq pads."""
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(4, vocabulary, (sentences, length), generator=generator) for _ in range(2))
    if ragged:
        for i in range(0, sentences, 4):
            source[i, : length // 4] = PAD
            target[i, length - length // 4 :] = PAD
    previous = torch.cat([torch.full((sentences, 1), 2), target[:, :-1]], dim=1)
    return {
        "id": torch.arange(sentences),
        "nsentences": sentences,
        "ntokens": int((target != PAD).sum()),
        "target": target,
        "net_input": {
            "src_tokens": source,
            "src_lengths": (source != PAD).sum(1),
            "prev_output_tokens": previous,
        },
    }
