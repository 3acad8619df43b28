"""What the theory predicts of each layer, in models where it is known."""

import math

import pytest
import torch

from speech_mt.diagnostics.oversmoothing import high_to_low_frequency, token_cosine
from speech_mt.diagnostics.smoothing_theory import smoothing_by_layer


def padding(batch):
    return batch["net_input"]["prev_output_tokens"].eq(1)


@pytest.mark.parametrize(("spectrum", "smoothing"), [("smooth", 1.0), ("sharpen", 0.0)])
def test_the_shares_are_those_that_the_spectrum_allows(text_model, text_batch, spectrum, smoothing):
    rows = smoothing_by_layer(text_model(value_spectrum=spectrum), text_batch["net_input"], padding(text_batch))
    assert [(row.stack, row.layer) for row in rows] == [(s, i) for s in ("encoder", "decoder") for i in range(3)]
    for row in rows:
        assert row.predicted_smoothing == pytest.approx(smoothing, abs=0.02)
        assert row.predicted_sharpening == pytest.approx(1 - smoothing, abs=0.02)


def test_a_model_of_the_theory_is_predicted_exactly(text_model, text_batch):
    """No LayerNorm, no feed-forward, no biases: the encoder is the simplified model."""
    model = text_model(norm_placement="none")
    for layer in model.encoder.layers:
        for linear in (layer.fc2, layer.self_attn.v_proj, layer.self_attn.out_proj):
            linear.bias.data.zero_()
        layer.fc2.weight.data.zero_()
    rows = [r for r in smoothing_by_layer(model, text_batch["net_input"], padding(text_batch)) if r.stack == "encoder"]
    assert all(row.predicted_hfc_lfc == pytest.approx(row.hfc_lfc, rel=1e-4) for row in rows)


def test_the_condition_number_is_that_of_the_map_with_the_gain_in_front(text_model, text_batch):
    model = text_model(value_spectrum="smooth", norm_placement="pre")
    layer = model.encoder.layers[1]
    eigenvalues = layer.self_attn.value_spectrum.eigenvalues()

    def found():
        rows = smoothing_by_layer(model, text_batch["net_input"], padding(text_batch))
        return rows[1].condition_number

    assert found() == pytest.approx((eigenvalues.max() / eigenvalues.min()).item(), rel=1e-3)
    layer.self_attn_layer_norm.weight.data[0] = 0.0
    assert found() > 1e6


def test_measures_are_of_the_layers_outputs_and_nothing_is_left_behind(text_model, text_batch):
    model = text_model()
    rows = smoothing_by_layer(model, text_batch["net_input"], padding(text_batch))
    encoder_out = model.eval().encoder(text_batch["net_input"]["src_tokens"])
    x, mask = encoder_out["encoder_out"][0].transpose(0, 1), encoder_out["encoder_padding_mask"][0]
    assert rows[2].cosine == pytest.approx(token_cosine(x, mask).mean().item(), abs=1e-6)
    assert rows[2].hfc_lfc == pytest.approx(high_to_low_frequency(x, mask, True).mean().item(), rel=1e-5)
    assert all(math.isfinite(value) for row in rows for value in (row.rank_residual, row.predicted_hfc_lfc))
    assert not any(module._forward_hooks for module in model.modules())
    assert all(layer.self_attn.observer is None for layer in model.encoder.layers)
    torch.testing.assert_close(rows[0].predicted_smoothing + rows[0].predicted_sharpening, 1.0, atol=1e-3, rtol=0)
