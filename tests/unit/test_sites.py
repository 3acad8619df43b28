"""Attentions, layers and weights are found by name, and seen as they are, in our models and in fairseq's."""

from argparse import Namespace

import pytest
import torch

from speech_mt.diagnostics.monitor import Monitor
from speech_mt.diagnostics.sites import Site, attention_sites, layer_sites, watch_attention, weight_sites
from speech_mt.modules.attention import MultiheadAttention

S2T = {"input_feat_per_channel": 80, "input_channels": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32,
       "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
       "conv_channels": 16, "dropout": 0.0, "max_source_positions": 200, "max_target_positions": 50,
       "fp16": False}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("s2t_transformer", {}),
        ("s2t_conformer", {}),
        ("s2t_conformer", {"attn_type": "espnet", "pos_enc_type": "abs"}),
        ("s2t_conformer", {"attn_type": "espnet", "pos_enc_type": "rel_pos"}),
        ("s2t_conformer", {"attn_type": "espnet", "pos_enc_type": "rope"}),
    ],
)
@torch.no_grad()
def test_stock_speech_models_are_seen(task, speech_batch, arch, options):
    """What hooks see of the encoder equals the entropy of the attention maps that the model itself makes."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    torch.manual_seed(0)
    args = Namespace(**S2T, **options)
    ARCH_CONFIG_REGISTRY[arch](args)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()
    attentions = [site.module for site in attention_sites(model) if site.kind == "encoder"]
    maps = []

    def keep(module, args, kwargs, output):
        maps.append(module.attn if hasattr(module, "forward_attention") else None)

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in attentions]
    padding = speech_batch["net_input"]["prev_output_tokens"].eq(1)
    monitor = Monitor(("entropy", "logits", "smoothing"))
    with monitor.watch(model, padding):
        model(**speech_batch["net_input"])
    found = monitor.reduce([monitor.statistics()])
    for handle in handles:
        handle.remove()
    kinds = ("encoder", "decoder", "cross")
    assert {name for name in found.layers if name.startswith("entropy/")} == {f"entropy/{kind}" for kind in kinds}
    assert list(found.layers["cosine/encoder"]) == [0, 1]
    for layer, weights in enumerate(maps):
        if weights is not None:
            entropy = torch.special.entr(weights).sum(-1)
            frames = [weights.shape[-1], -(-41 // 4)]  # two convolutions of stride 2
            expected = torch.cat([entropy[i, :, :n].flatten() for i, n in enumerate(frames)]).mean()
            torch.testing.assert_close(found.layers["entropy/encoder"][layer], expected.item(), rtol=1e-4, atol=1e-4)
    assert not any("forward_attention" in vars(module) for module in attentions)  # nothing stays behind


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_softcapped_attention_is_seen_as_softmax_sees_it(causal):
    torch.manual_seed(0)
    attention, x, seen = MultiheadAttention(16, 4, softcap=2.0).eval(), 5 * torch.randn(2, 6, 16), []
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    remove = watch_attention(Site("encoder", 0, attention), seen.append)
    weights = attention(x, key_padding_mask=padding, causal=causal, need_weights=True)[1]
    remove()
    attention(x)
    (only,) = seen
    torch.testing.assert_close(only.rows.entropy, torch.special.entr(weights).sum(-1), rtol=1e-5, atol=1e-5)
    assert 1 < only.rows.max_logit.max() <= 2


def test_sites_are_found_by_name(text_model, ctc_model):
    assert [(s.kind, s.layer) for s in attention_sites(text_model())] == [
        *(("encoder", i) for i in range(3)),
        *((kind, i) for i in range(3) for kind in ("decoder", "cross")),
    ]
    assert [(s.kind, s.layer) for s in layer_sites(ctc_model())] == [("encoder", i) for i in range(3)]
    assert {(name, site.kind) for name, site in weight_sites(text_model())} == {
        *(("fc1", stack) for stack in ("encoder", "decoder")),
        *(("fc2", stack) for stack in ("encoder", "decoder")),
        *((f"{x}_proj", kind) for x in ("q", "k", "v", "out") for kind in ("encoder", "decoder", "cross")),
    }
