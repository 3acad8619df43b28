"""Small models of each kind, built as fairseq builds them."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def dictionary():
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for i in range(40):
        dictionary.add_symbol(f"w{i}")
    return dictionary


@pytest.fixture
def task(dictionary):
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        cfg=SimpleNamespace(source_lang="de", target_lang="en", num_mel_bins=80),
    )


SIZES = {
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 64,
    "encoder_attention_heads": 4,
    "encoder_layers": 3,
    "dropout": 0.0,
    "max_source_positions": 200,
}


@pytest.fixture
def text_model(task):
    """build(**options): a 3L-3L ``spectral_transformer`` from seed 1."""
    from speech_mt.models.config import SpectralTransformerConfig
    from speech_mt.models.text_to_text import SpectralTransformer

    def build(**options):
        torch.manual_seed(1)
        cfg = SpectralTransformerConfig(**(SIZES | {"decoder_layers": 3, "max_target_positions": 200} | options))
        return SpectralTransformer.build_model(cfg, task)

    return build


@pytest.fixture
def stock_model(task):
    """build(**options): fairseq's own ``transformer`` of the same shape from the same seed."""
    from fairseq.models.transformer import TransformerConfig, TransformerModelBase

    def build(pre_norm=False, share_all_embeddings=False):
        torch.manual_seed(1)
        flat = SIZES | {
            "encoder_normalize_before": pre_norm,
            "decoder_normalize_before": pre_norm,
            "decoder_embed_dim": 32,
            "decoder_input_dim": 32,
            "decoder_output_dim": 32,
            "decoder_ffn_embed_dim": 64,
            "decoder_attention_heads": 4,
            "decoder_layers": 3,
            "max_target_positions": 200,
            "share_all_embeddings": share_all_embeddings,
        }
        return TransformerModelBase.build_model(TransformerConfig.from_namespace(SimpleNamespace(**flat)), task)

    return build


@pytest.fixture
def ctc_model(task):
    """build(**options): a 3-layer ``spectral_ctc_transformer`` from seed 1."""
    from speech_mt.models.config import SpectralCTCTransformerConfig
    from speech_mt.models.speech_ctc import SpectralCTCTransformer

    def build(**options):
        torch.manual_seed(1)
        cfg = SpectralCTCTransformerConfig(**(SIZES | {"conv_channels": 32} | options))
        return SpectralCTCTransformer.build_model(cfg, task)

    return build


@pytest.fixture
def s2t_model(task):
    """build(**options): a 3L-3L ``spectral_s2t_transformer`` from seed 1."""
    from speech_mt.models.config import SpectralS2TTransformerConfig
    from speech_mt.models.speech_to_text import SpectralS2TTransformer

    def build(**options):
        torch.manual_seed(1)
        sizes = SIZES | {"conv_channels": 32, "decoder_layers": 3, "max_target_positions": 200, "ctc_weight": 0.0}
        return SpectralS2TTransformer.build_model(SpectralS2TTransformerConfig(**(sizes | options)), task)

    return build


@pytest.fixture
def text_batch():
    """Left-padded sources and right-padded targets, as fairseq's translation task makes them."""
    torch.manual_seed(0)
    source, target = torch.randint(4, 44, (4, 9)), torch.randint(4, 44, (4, 7))
    source[1, :4] = source[3, :2] = 1
    previous = torch.cat([torch.full((4, 1), 2), target[:, :-1]], 1)
    target[2, 4:] = 1
    previous[2, 4:] = 1
    return {
        "id": torch.arange(4),
        "nsentences": 4,
        "ntokens": int((target != 1).sum()),
        "target": target,
        "net_input": {
            "src_tokens": source,
            "src_lengths": (source != 1).sum(1),
            "prev_output_tokens": previous,
        },
    }


@pytest.fixture
def speech_batch():
    """Two utterances of 60 and 41 frames."""
    torch.manual_seed(0)
    features = torch.randn(2, 60, 80)
    features[1, 41:] = 0
    target = torch.randint(4, 44, (2, 6))
    target[:, 5] = 2
    target[1, 4:] = torch.tensor([2, 1])
    previous = torch.cat([torch.full((2, 1), 2), target[:, :-1]], 1)
    previous[1, 5] = 1
    return {
        "id": torch.arange(2),
        "nsentences": 2,
        "ntokens": 11,
        "target": target,
        "target_lengths": torch.tensor([5, 4]),  # as the speech task counts: without the end of sentence
        "net_input": {
            "src_tokens": features,
            "src_lengths": torch.tensor([60, 41]),
            "prev_output_tokens": previous,
        },
    }
