"""Norm placement, DeepNorm's constants and layerdrop."""

import math

import pytest
import torch
import torch.nn.functional as F

from speech_mt.modules.layers import DecoderLayer, EncoderLayer, LayerConfig
from speech_mt.modules.residual import (
    NORM_PLACEMENTS,
    ResidualNorm,
    admin_omega,
    deepnorm_alpha_beta,
    subln_gain,
)


def config(**options):
    return LayerConfig(**{"embed_dim": 8, "ffn_embed_dim": 16, "attention_heads": 2, "encoder_layers": 6} | options)


@pytest.mark.parametrize(
    ("layers", "encoder", "decoder"),
    [
        (6, (1.418, 0.497), (2.060, 0.343)),
        (18, (1.999, 0.353), (2.711, 0.261)),
        (50, (2.751, 0.256), (3.500, 0.202)),
        (100, (3.416, 0.206), (4.162, 0.170)),
    ],
)
def test_deepnorm_constants(layers, encoder, decoder):
    assert deepnorm_alpha_beta(layers, layers, decoder=False) == pytest.approx(encoder, abs=1e-3)
    assert deepnorm_alpha_beta(layers, layers, decoder=True) == pytest.approx(decoder, abs=1e-3)


def test_deepnorm_constants_of_an_encoder_alone():
    assert deepnorm_alpha_beta(18, 0, decoder=False) == pytest.approx((36**0.25, 144**-0.25))


def test_deepnorm_scales_initial_values_outputs_and_feed_forward_only():
    torch.manual_seed(0)
    shape = {"embed_dim": 256, "ffn_embed_dim": 256, "encoder_layers": 18, "decoder_layers": 18}
    layer = DecoderLayer(config(**shape, norm_placement="deepnorm"))
    xavier_std = (2 / 512) ** 0.5
    for name, parameter in layer.named_parameters():
        if "proj.weight" in name or "fc" in name and "weight" in name:
            gain = 1.0 if "q_proj" in name or "k_proj" in name else 0.261
            assert parameter.std().item() == pytest.approx(gain * xavier_std, rel=0.02), name
        elif "bias" in name:
            assert not parameter.any()


@pytest.mark.parametrize(
    ("layers", "encoder", "decoder"),
    [(6, 2.017, 2.335), (18, 3.041, 3.567), (50, 4.570, 5.394), (100, 6.075, 7.193)],
)
def test_admin_omega(layers, encoder, decoder):
    assert admin_omega(layers, layers, decoder=False) == pytest.approx(encoder, abs=1e-3)
    assert admin_omega(layers, layers, decoder=True) == pytest.approx(decoder, abs=1e-3)


def test_subln_multiplies_initial_weights_and_normalises_within_the_branches():
    torch.manual_seed(0)
    plain = DecoderLayer(config(decoder_layers=6))
    torch.manual_seed(0)
    subln = DecoderLayer(config(decoder_layers=6, norm_placement="subln"))
    gain = math.log(18) ** 0.5
    assert subln_gain(6, 6, decoder=True) == pytest.approx(gain)
    assert subln_gain(6, 6, decoder=False) == pytest.approx((math.log(18) * math.log(12) / 3) ** 0.5)
    for name, parameter in plain.named_parameters():
        scaled = name in ("fc1.weight", "fc2.weight", "self_attn.v_proj.weight", "self_attn.out_proj.weight")
        torch.testing.assert_close(subln.get_parameter(name), parameter * gain if scaled else parameter)
    extra = {name.rpartition(".")[0] for name, _ in subln.named_parameters()} - {
        name.rpartition(".")[0] for name, _ in plain.named_parameters()
    }
    assert extra == {"self_attn.inner_attn_ln", "ffn_layernorm"}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("post", lambda x, f: F.layer_norm(x + f(x), (8,))),
        ("pre", lambda x, f: x + f(F.layer_norm(x, (8,)))),
        ("deepnorm", lambda x, f: F.layer_norm(1.5 * x + f(x), (8,))),
        ("admin", lambda x, f: F.layer_norm(1.5 * x + f(x), (8,))),
        ("subln", lambda x, f: x + f(F.layer_norm(x, (8,)))),
        ("sandwich", lambda x, f: x + F.layer_norm(f(F.layer_norm(x, (8,))), (8,))),
        ("none", lambda x, f: x + f(x)),
    ],
)
def test_placement(placement, expected):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 8), torch.randn(8, 8)
    residual = ResidualNorm(8, placement, scale=1.5 if placement in ("deepnorm", "admin") else 1.0)

    def branch(x):
        return x @ weight

    torch.testing.assert_close(residual.after(x, branch(residual.before(x))), expected(x, branch))
    assert len(list(residual.parameters())) == {"none": 0, "sandwich": 4}.get(placement, 2)


def test_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="'side' is not one of post, pre, deepnorm, admin, subln, sandwich, none"):
        ResidualNorm(8, "side")


@pytest.mark.parametrize("placement", NORM_PLACEMENTS)
def test_padding_does_not_change_an_utterance(placement):
    torch.manual_seed(0)
    layer = EncoderLayer(config(norm_placement=placement)).eval()
    x = torch.randn(1, 5, 8)
    padded = torch.cat([x, torch.randn(1, 2, 8)], 1)
    mask = torch.tensor([[False] * 5 + [True] * 2])
    torch.testing.assert_close(layer(padded, mask)[:, :5], layer(x))


def test_layerdrop_zeroes_both_branches_and_keeps_every_parameter_in_the_graph():
    torch.manual_seed(0)
    layer = EncoderLayer(config(norm_placement="pre", layerdrop=1.0))
    x = torch.randn(2, 3, 8)
    out = layer(x)
    assert torch.equal(out, x)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert not torch.equal(layer.eval()(x), x)


def test_layerdrop_draws_with_its_probability():
    torch.manual_seed(0)
    layer = EncoderLayer(config(layerdrop=0.3))
    kept = sum(layer._layerdrop() for _ in range(2000)) / 2000
    assert kept == pytest.approx(0.7, abs=0.04)
