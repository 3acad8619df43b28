"""Gamma and spectra of the layers' weights, against what torch computes from the matrices."""

import pytest
import torch
from torch import nn

from speech_mt.diagnostics.sites import attention_sites, weight_sites
from speech_mt.diagnostics.weights import gammas, largest_gammas, spectra
from speech_mt.reparam import sigma_reparam, states
from speech_mt.reparam.baselines import spectral_norm
from tests.unit.encoder_stack import EncoderStack


@torch.no_grad()
def test_gamma_of_every_weight_and_the_largest_of_a_layer():
    model = EncoderStack()
    sigma_reparam(model)
    for i, (_, state) in enumerate(states(model)):
        state.gamma.copy_(torch.tensor([1.0, 2.0, -3.0, 0.5, 1.5, 2.5]) + 10 * i)
    found = gammas(weight_sites(model))
    assert list(found["encoder"]) == ["k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]
    assert found["encoder"]["q_proj"] == {0: -3.0, 1: 7.0, 2: 17.0}
    assert largest_gammas(found) == {"gamma/encoder": {0: -3.0, 1: 12.5, 2: 22.5}}


def test_weights_without_a_learned_gamma_have_none():
    model = EncoderStack()
    assert gammas(weight_sites(model)) == {}
    spectral_norm(model)  # gamma stays 1: nothing to see
    assert gammas(weight_sites(model)) == {}


@torch.no_grad()
def test_spectra_of_plain_and_of_reparametrised_weights():
    model = EncoderStack()
    plain = spectra(weight_sites(model), attention_sites(model))
    layer = model.encoder.layers[1]
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    expected = max(torch.linalg.matrix_norm(linear.weight, 2).item() for linear in linears)
    assert plain["spectral_norm/encoder"][1] == pytest.approx(expected, rel=0.02)
    q, k = (getattr(layer.self_attn, name).weight.view(4, 4, 16) for name in ("q_proj", "k_proj"))
    bias = layer.self_attn.q_proj.bias.view(4, 4)
    products = [torch.cat([q[h].T, bias[h][None]]) @ k[h] for h in range(4)]
    singular_values = torch.linalg.svdvals(torch.stack(products))
    p = singular_values / singular_values.sum(1, keepdim=True)
    energy = singular_values.square()
    for name, value in {
        "query_key_norm": singular_values.max(),
        "effective_rank": torch.special.entr(p).sum(1).exp().min(),
        "energy_concentration": (energy[:, :2].sum(1) / energy.sum(1)).max(),
    }.items():
        assert plain[f"{name}/encoder"][1] == pytest.approx(value.item(), rel=1e-3), name

    sigma_reparam(model)
    for _, state in states(model):
        state.gamma.fill_(-2.0)
    exact = spectra(weight_sites(model), attention_sites(model))
    assert exact["spectral_norm/encoder"] == {0: 2.0, 1: 2.0, 2: 2.0}
