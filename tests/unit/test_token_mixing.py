"""Token mixing: the papers' formulae, and one function in training, in decoding and under padding on either side."""

from itertools import combinations

import pytest
import torch

from speech_mt.checkpoint.folding import fold_checkpoint
from speech_mt.errors import InputError
from speech_mt.modules.attention import MultiheadAttention
from speech_mt.modules.token_mixing import TOKEN_MIXINGS, AttnScale, FeatScale, masked_mean, running_mean, token_mixings

from .test_folding import checkpoint, trained

COMBINATIONS = [",".join(names) for n in (1, 2, 3) for names in combinations(TOKEN_MIXINGS, n)]
ALL = ",".join(TOKEN_MIXINGS)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def mixed(module):
    """All scales away from 0, where they would do nothing."""
    torch.manual_seed(3)
    for child in module.modules():
        if isinstance(child, AttnScale | FeatScale):
            for parameter in child.parameters():
                parameter.data.normal_(0, 0.5)
    return module.eval()


@pytest.fixture
def model(text_model):
    return lambda mixing=ALL, **options: mixed(text_model(token_mixing=mixing, **options))


def scores(model, batch):
    return model(**batch["net_input"])[0]


# -- the formulae -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attn_scale_is_the_papers_on_the_attention_matrix(causal):
    """A_d + (1 + w_h) (A - A_d), A_d uniform over what is visible, with a padded key."""
    torch.manual_seed(0)
    attention = mixed(MultiheadAttention(16, 4, attn_scale=True))
    x, mask = torch.randn(1, 5, 16), torch.tensor([[False, False, False, False, True]])
    out, weights = attention(x, key_padding_mask=mask, causal=causal, need_weights=True)
    visible = (torch.ones(5, 5).tril() if causal else torch.ones(5, 5)) * ~mask
    uniform = visible / visible.sum(-1, keepdim=True)
    sharpened = uniform + (1 + attention.attn_scale.weight[:, None, None]) * (weights - uniform)
    torch.testing.assert_close(sharpened.sum(-1), torch.ones(1, 4, 5))
    expected = attention.out_proj((sharpened @ attention.values(x)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected)


def test_feat_scale_scales_each_band_once():
    """(1 + s_low) mean + (1 + s_high) rest: the mean of the result is (1 + s_low) mean."""
    feat_scale = mixed(FeatScale(3))
    u = torch.randn(1, 4, 3)
    mean = u.mean(1, keepdim=True)
    out, state = feat_scale(u, None, causal=False)
    torch.testing.assert_close(out, (1 + feat_scale.low) * mean + (1 + feat_scale.high) * (u - mean))
    torch.testing.assert_close(out.mean(1, keepdim=True), (1 + feat_scale.low) * mean)
    assert state is None


def test_the_first_of_causal_tokens_is_its_own_mean():
    feat_scale = mixed(FeatScale(3))
    u = torch.randn(2, 4, 3)
    torch.testing.assert_close(feat_scale(u, None, causal=True)[0][:, 0], (1 + feat_scale.low) * u[:, 0])


def test_neutreno_adds_lambda_times_the_difference_of_the_values_of_the_first_layer():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, neutreno_lambda=0.3)
    plain = MultiheadAttention(16, 4)
    plain.load_state_dict(attention.state_dict())
    x, first = torch.randn(2, 5, 16), torch.randn(2, 4, 5, 4)
    difference = attention(x, first_values=first)[0] - plain(x)[0]
    term = (0.3 * (first - attention.values(x))).transpose(1, 2).flatten(2)
    torch.testing.assert_close(difference, term @ attention.out_proj.weight.T)
    assert torch.equal(attention(x)[0], plain(x)[0])  # the first layer itself


def test_means_over_valid_tokens_by_hand():
    x = torch.tensor([[[1.0], [3.0], [100.0], [8.0]]])
    valid = torch.tensor([[[True], [True], [False], [True]]])
    assert masked_mean(x, valid, 1).flatten().tolist() == [4.0]
    assert masked_mean(x, torch.zeros_like(valid), 1).flatten().tolist() == [0.0]
    mean, (total, count) = running_mean(x, valid, 1)
    assert mean.flatten().tolist() == [1.0, 2.0, 2.0, 4.0]
    assert (total.item(), count.item()) == (12.0, 3.0)
    after = running_mean(torch.tensor([[[4.0]]]), None, 1, past=(total, count))[0]
    assert after.item() == 4.0


def test_a_long_running_mean_in_half_precision_is_summed_in_float32():
    x = torch.full((1, 5000, 1), 50.0, dtype=torch.float16)
    assert torch.equal(running_mean(x, None, 1)[0], x)
    assert masked_mean(x, torch.ones_like(x, dtype=torch.bool), 1).item() == 50.0


# -- off, or started ----------------------------------------------------------------------------------------------


def test_scales_start_at_0_as_the_same_function_from_the_same_weights(text_model, text_batch):
    plain, started = text_model(), text_model(token_mixing="attn_scale,feat_scale")
    extra = started.state_dict().keys() - plain.state_dict().keys()
    assert {name.rpartition("self_attn.")[2] for name in extra} == {
        "attn_scale.weight",
        "feat_scale.low",
        "feat_scale.high",
    }
    assert all(torch.equal(value, started.state_dict()[name]) for name, value in plain.state_dict().items())
    assert torch.equal(scores(plain, text_batch), scores(started, text_batch))
    neutreno = text_model(token_mixing="neutreno")
    assert neutreno.state_dict().keys() == plain.state_dict().keys()
    assert not torch.allclose(scores(plain, text_batch), scores(neutreno, text_batch), atol=1e-3)


def test_cross_attention_is_left_alone(text_model):
    cross = text_model(token_mixing=ALL).decoder.layers[1].encoder_attn
    assert (cross.attn_scale, cross.feat_scale, cross.neutreno_lambda) == (None, None, 0.0)


@pytest.mark.parametrize("mixing", TOKEN_MIXINGS)
def test_every_parameter_is_trained(text_model, text_batch, mixing):
    model = trained(text_model(token_mixing=mixing), text_batch)
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for n, p in model.named_parameters() if "k_proj.b" not in n
    )
    scales = [p for m in model.modules() if isinstance(m, AttnScale | FeatScale) for p in m.parameters()]
    assert all(p.abs().max() > 0 for p in scales)


def test_the_values_of_the_first_layer_are_those_it_uses_itself(text_model, text_batch):
    """Changing its W_V changes what the other layers add."""
    model = text_model(token_mixing="neutreno", neutreno_lambda=0.7).eval()
    seen = []
    for layer in model.encoder.layers:
        layer.register_forward_hook(
            lambda module, args, output: seen.append((args[2], module.self_attn.values(args[0])))
        )
    model.encoder(text_batch["net_input"]["src_tokens"])
    assert seen[0][0] is None
    assert all(torch.equal(first, seen[0][1]) for first, _ in seen[1:])


# -- decoding, padding, the future ---------------------------------------------------------------------------------


def step_by_step(model, previous, encoder_out):
    state = {}
    return torch.cat([model.decoder(previous[:, : t + 1], encoder_out, state)[0] for t in range(previous.shape[1])], 1)


@pytest.mark.parametrize("mixing", COMBINATIONS)
@pytest.mark.parametrize("options", [{}, {"value_spectrum": "sharpen"}, {"reparam": "sigma", "norm_placement": "pre"}])
def test_decoding_step_by_step_equals_the_full_pass(model, text_batch, mixing, options):
    """Sources padded on the left, targets on the right."""
    model = model(mixing, **options)
    previous = text_batch["net_input"]["prev_output_tokens"]
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"])
    full, steps = model.decoder(previous, encoder_out)[0], step_by_step(model, previous, encoder_out)
    real = previous != 1
    torch.testing.assert_close(steps[real], full[real], **CLOSE)


@pytest.mark.parametrize("mixing", COMBINATIONS)
@pytest.mark.parametrize("placement", ["post", "subln", "sandwich"])
def test_targets_padded_on_the_left_decode_as_alone(model, text_batch, mixing, placement):
    model = model(mixing, norm_placement=placement)
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"][:2])
    previous = torch.tensor([[1, 1, 2, 5, 6], [2, 7, 8, 9, 4]])
    full, steps = model.decoder(previous, encoder_out)[0], step_by_step(model, previous, encoder_out)
    alone = model.decoder(previous[:1, 2:], model.encoder.reorder_encoder_out(encoder_out, torch.tensor([0])))[0]
    for found in (full, steps):
        torch.testing.assert_close(found[:1, 2:], alone, **CLOSE)
    torch.testing.assert_close(steps[1], full[1], **CLOSE)


@pytest.mark.parametrize("mixing", COMBINATIONS)
def test_a_beam_search_may_reorder_and_drop_sentences(model, text_batch, mixing):
    """Beams of 2 swapped and doubled, then the first sentence finished: the batch shrinks."""
    model = model(mixing)
    previous = text_batch["net_input"]["prev_output_tokens"][:2].repeat_interleave(2, 0)
    previous[1, 1:] = previous[3, 1:].flip(0)
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"][:2].repeat_interleave(2, 0))
    state = {}
    for t in range(2):
        model.decoder(previous[:, : t + 1], encoder_out, state)
    for length, order in ((3, [1, 0, 2, 2]), (4, [2, 3])):
        order = torch.tensor(order)
        model.decoder.reorder_incremental_state_scripting(state, order)
        encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
        previous = previous[order]
        step = model.decoder(previous[:, :length], encoder_out, state)[0]
        full = model.decoder(previous[:, :length], encoder_out)[0][:, -1:]
        torch.testing.assert_close(step, full, **CLOSE)


@pytest.mark.parametrize("mixing", COMBINATIONS)
def test_later_tokens_do_not_reach_earlier_ones(model, text_batch, mixing):
    model = model(mixing)
    previous = text_batch["net_input"]["prev_output_tokens"][:1].repeat(2, 1)
    previous[1, 4:] = (previous[1, 4:] + 7) % 40 + 4
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"][:1].repeat(2, 1))
    first, second = model.decoder(previous, encoder_out)[0]
    torch.testing.assert_close(first[:4], second[:4], rtol=0, atol=1e-6)
    assert (first[4:] - second[4:]).abs().amax(-1).min() > 1e-2


@pytest.mark.parametrize("mixing", COMBINATIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sentence_scores_the_same_alone_and_padded(model, mixing, side):
    model = model(mixing)
    tokens = torch.randint(4, 44, (1, 5))
    padding = torch.full((1, 3), 1)
    padded = torch.cat([padding, tokens] if side == "left" else [tokens, padding], 1)
    other = torch.randint(4, 44, (1, 8))
    together = model.encoder(torch.cat([padded, other]))["encoder_out"][0][:, 0]
    alone = model.encoder(tokens)["encoder_out"][0][:, 0]
    torch.testing.assert_close(together[3:] if side == "left" else together[:5], alone, **CLOSE)


@pytest.mark.parametrize("mixing", COMBINATIONS)
def test_an_utterance_scores_the_same_alone_and_in_a_batch(ctc_model, speech_batch, mixing):
    model = mixed(ctc_model(token_mixing=mixing, value_spectrum="smooth"))
    inputs = speech_batch["net_input"]
    together = model(inputs["src_tokens"], inputs["src_lengths"])["encoder_out"][:, 1]
    alone = model(inputs["src_tokens"][1:, :41], inputs["src_lengths"][1:])["encoder_out"][:, 0]
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-4, atol=1e-5)


def test_speech_to_text_decodes_step_by_step(s2t_model, speech_batch):
    model = mixed(s2t_model(token_mixing=ALL, value_spectrum="sharpen-first-half"))
    inputs = speech_batch["net_input"]
    encoder_out = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
    previous = inputs["prev_output_tokens"]
    full, steps = model.decoder(previous, encoder_out)[0], step_by_step(model, previous, encoder_out)
    torch.testing.assert_close(steps[previous != 1], full[previous != 1], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite(text_model, text_batch, dtype):
    model = mixed(text_model(token_mixing=ALL, value_spectrum="sharpen").to(dtype)).train()
    out = scores(model, text_batch)
    assert out.dtype == dtype
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# -- what is refused ------------------------------------------------------------------------------------------------


def test_names():
    assert token_mixings("") == ()
    assert token_mixings("neutreno, attn_scale,neutreno") == ("neutreno", "attn_scale")
    with pytest.raises(InputError, match="--token-mixing featscale: there are attn_scale, feat_scale, neutreno"):
        token_mixings("attn_scale,featscale")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neutreno_lambda": 0.5}, "--neutreno-lambda 0.5 belongs to --token-mixing neutreno"),
        ({"token_mixing": "neutreno", "neutreno_lambda": -0.5}, "--neutreno-lambda -0.5: has to be above 0"),
        ({"token_mixing": "x"}, "--token-mixing x"),
    ],
)
def test_options_without_meaning_are_refused(text_model, options, message):
    with pytest.raises(InputError, match=message):
        text_model(**options)


@pytest.mark.parametrize("mixing", TOKEN_MIXINGS)
def test_it_does_not_fold_and_the_reason_is_given(text_model, text_batch, mixing):
    options = {"token_mixing": mixing, "value_spectrum": "sharpen"}
    model = trained(text_model(**options), text_batch)
    folded, reasons = fold_checkpoint(checkpoint(model, **options))
    assert len(reasons) == 1
    assert f"--token-mixing {mixing}" in reasons[0]
    assert (folded["cfg"]["model"]["token_mixing"], folded["cfg"]["model"]["value_spectrum"]) == (mixing, "free")
    plain = text_model(token_mixing=mixing).eval()
    plain.load_state_dict(folded["model"])
    torch.testing.assert_close(scores(plain, text_batch), scores(model, text_batch), rtol=1e-4, atol=1e-5)
