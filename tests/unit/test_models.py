"""The models: stock fairseq's where no option of ours is set, and one function in training and decoding."""

import pytest
import torch

from speech_mt.errors import InputError
from speech_mt.reparam import states

PLACEMENTS = ["post", "pre", "deepnorm", "admin", "subln", "sandwich", "none"]


def scores(model, batch):
    return model(**batch["net_input"])[0]


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_same_initialisation_and_function_as_stock(text_model, stock_model, text_batch, pre_norm, share):
    ours = text_model(norm_placement="pre" if pre_norm else "post", share_all_embeddings=share)
    stock = stock_model(pre_norm, share)
    state, stock_state = ours.state_dict(), stock.state_dict()
    assert set(stock_state) - set(state) == {"encoder.version", "decoder.version"}
    assert set(state) <= set(stock_state)
    assert all(torch.equal(state[key], stock_state[key]) for key in state)
    real = text_batch["target"] != 1
    torch.testing.assert_close(scores(ours, text_batch)[real], scores(stock, text_batch)[real], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("reparam", ["none", "sigma"])
def test_decoding_step_by_step_equals_the_full_pass(text_model, text_batch, placement, reparam):
    model = text_model(norm_placement=placement, reparam=reparam).eval()
    previous = text_batch["net_input"]["prev_output_tokens"]
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"])
    full = model.decoder(previous, encoder_out)[0]
    state = {}
    steps = [model.decoder(previous[:, : t + 1], encoder_out, state)[0] for t in range(previous.shape[1])]
    real = previous != 1
    torch.testing.assert_close(torch.cat(steps, 1)[real], full[real], rtol=1e-5, atol=1e-5)


def test_decoding_follows_reordered_beams(text_model, text_batch):
    model = text_model().eval()
    previous = text_batch["net_input"]["prev_output_tokens"][:2]
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"][:2])
    order = torch.tensor([1, 1, 0])
    state = {}
    for t in range(3):
        model.decoder(previous[:, : t + 1], encoder_out, state)
    model.decoder.reorder_incremental_state_scripting(state, order)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
    step = model.decoder(previous[order, :4], encoder_out, state)[0]
    full = model.decoder(previous[order, :4], encoder_out)[0][:, 3:]
    torch.testing.assert_close(step, full, rtol=1e-5, atol=1e-5)


def test_left_padded_target_input_is_masked(text_model, text_batch):
    """Prefixes of different lengths may be padded on the left: padding is then visible to causality, so masked."""
    model = text_model().eval()
    encoder_out = model.encoder(text_batch["net_input"]["src_tokens"][:1])
    tokens = torch.tensor([[2, 5, 6]])
    alone = model.decoder(tokens, encoder_out)[0]
    padded = model.decoder(torch.tensor([[1, 2, 5, 6]]), encoder_out)[0]
    # fairseq counts positions from the first real token, so the two are the same sentence
    torch.testing.assert_close(padded[:, 1:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_folding_for_generation_keeps_the_scores(text_model, text_batch, placement):
    model = text_model(norm_placement=placement, reparam="sigma").eval()
    before = scores(model, text_batch)
    model.make_generation_fast_()
    assert not list(states(model))
    assert torch.equal(scores(model, text_batch), before)


def test_reparam_takes_every_linear_of_the_layers_and_nothing_else(text_model):
    model = text_model(reparam="sigma")
    gammas = {name: state.gamma.numel() for name, state in states(model)}
    expected = {f"encoder.layers.{i}": 6 for i in range(3)} | {f"decoder.layers.{i}": 10 for i in range(3)}
    assert gammas == expected


def test_set_num_updates_reaches_every_state(text_model):
    model = text_model(reparam="sigma")
    before = {name: state.u.clone() for name, state in states(model)}
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.set_num_updates(1)
    assert all(not torch.equal(before[name], state.u) for name, state in states(model))


@pytest.mark.parametrize("reparam", ["none", "sigma"])
def test_activation_checkpointing_changes_no_gradient(text_model, text_batch, reparam):
    gradients = []
    for checkpointing in (False, True):
        model = text_model(reparam=reparam, checkpoint_activations=checkpointing)
        for update in (1, 2):
            model.zero_grad()
            model.set_num_updates(update)
            scores(model, text_batch).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert set(gradients[0]) == set(gradients[1])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_attention_over_the_source_is_returned_when_asked(text_model, text_batch):
    model = text_model().eval()
    extra = model(**text_batch["net_input"], alignment_layer=1)[1]
    (attention,) = extra["attn"]
    assert attention.shape == (4, 7, 9)
    torch.testing.assert_close(attention.sum(-1), torch.ones(4, 7))
    assert model(**text_batch["net_input"])[1]["attn"] == [None]


def test_sharing_needs_one_dictionary(text_model, task):
    from fairseq.data import Dictionary

    task.target_dictionary = Dictionary()
    with pytest.raises(InputError, match="--joined-dictionary"):
        text_model(share_all_embeddings=True)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_utterance_scores_the_same_alone_and_in_a_batch(ctc_model, speech_batch, placement):
    model = ctc_model(norm_placement=placement).eval()
    inputs = speech_batch["net_input"]
    together = model(inputs["src_tokens"], inputs["src_lengths"])
    alone = model(inputs["src_tokens"][1:, :41], inputs["src_lengths"][1:])
    frames = alone["encoder_out"].shape[0]
    assert (~together["padding_mask"]).sum(1).tolist() == [15, 11]
    assert frames == 11
    torch.testing.assert_close(together["encoder_out"][:frames, 1], alone["encoder_out"][:, 0], rtol=1e-4, atol=1e-5)


def test_front_end_strides_and_lengths(ctc_model):
    model = ctc_model(conv_kernel_sizes="7", conv_strides="3")
    out = model(torch.randn(2, 31, 80), torch.tensor([31, 30]))
    assert out["encoder_out"].shape[0] == 11
    assert (~out["padding_mask"]).sum(1).tolist() == [11, 10]


def test_speech_encoder_decoder_with_a_ctc_head(s2t_model, speech_batch):
    model = s2t_model(ctc_weight=0.3)
    output = model(**speech_batch["net_input"])
    assert output[0].shape == (2, 6, 44)
    log_probs, frames = model.get_ctc_output(output, speech_batch)
    assert log_probs.shape == (15, 2, 44)
    assert frames.tolist() == [15, 11]
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(15, 2))
    assert s2t_model().encoder.ctc_proj is None


@pytest.mark.parametrize(("layers", "millions"), [(6, 44.1), (18, 132.4), (50, 367.8), (100, 735.6)])
def test_named_depths_have_the_papers_width(task, layers, millions):
    """Parameters without embeddings, in millions, of 512/2048/8 encoder-decoders."""
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY

    from speech_mt.models.config import SpectralTransformerConfig
    from speech_mt.models.text_to_text import SpectralTransformer

    args = Namespace()
    ARCH_CONFIG_REGISTRY[f"spectral_transformer_{layers}l"](args)
    cfg = SpectralTransformerConfig(**vars(args), max_source_positions=20, max_target_positions=20)
    with torch.device("meta"):
        model = SpectralTransformer.build_model(cfg, task)
    in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    assert in_layers / 1e6 == pytest.approx(millions, abs=0.06)


def test_tiny_depths_are_of_width_64_and_the_command_line_wins():
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = Namespace(encoder_layers=7)
    ARCH_CONFIG_REGISTRY["spectral_transformer_18l_tiny"](args)
    assert (args.encoder_layers, args.decoder_layers, args.encoder_embed_dim) == (7, 18, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_strides": "2,2,2"}, r"kernel sizes \[5, 5\] and strides \[2, 2, 2\]"),
        ({"conv_strides": "2,0"}, "all at least 1"),
        ({"conv_kernel_sizes": "5,x"}, "--conv-kernel-sizes '5,x': give whole numbers"),
        ({"conv_channels": 33}, "give an even number"),
        ({"encoder_attention_heads": 3}, "32 is not a multiple of 3 heads"),
        ({"encoder_attention_heads": 0}, "--encoder-attention-heads 0: has to be at least 1"),
        ({"layerdrop": 1.5}, "--layerdrop 1.5: has to be at least 0 and below 1"),
        ({"attention_softcap": -5.0}, "--attention-softcap -5.0"),
        ({"qk_clip": -5.0}, "--qk-clip -5.0"),
    ],
)
def test_options_out_of_range_are_one_message(ctc_model, options, message):
    with pytest.raises(InputError, match=message):
        ctc_model(**options)


# -- the speech models of sigmaReparam's code, and fairseq's sizes ---------------------------------------------------


def architecture(name, **values):
    """A config as fairseq makes it of --arch and what the command line says."""
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    from speech_mt.models import speech_ctc, speech_to_text  # noqa: F401 (registers)

    args = Namespace(**values)
    ARCH_CONFIG_REGISTRY[name](args)
    model = ARCH_MODEL_REGISTRY[name]
    limits = {"max_source_positions": 20} | ({"max_target_positions": 20} if "s2t" in name else {})
    return model, {**vars(args), **limits}


@pytest.fixture
def letters_task():
    from types import SimpleNamespace

    from fairseq.data import Dictionary

    letters = Dictionary()
    for letter in "abcdefghijklmnopqrstuvwxyz'|":
        letters.add_symbol(letter)
    return SimpleNamespace(target_dictionary=letters, cfg=SimpleNamespace(num_mel_bins=80))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def build_36l(letters_task, layers=1, **values):
    from speech_mt.models.config import SpectralCTCTransformerConfig

    model, options = architecture("spectral_ctc_transformer_36l", encoder_layers=layers, **values)
    return model.build_model(SpectralCTCTransformerConfig(**options), letters_task)


def test_the_36_layer_model_has_the_released_codes_parameters(letters_task):
    """Convolution 861,696, block 7,080,966, 36 blocks 255,798,776, by the same count for the code in JAX."""
    _, options = architecture("spectral_ctc_transformer_36l")
    assert options["encoder_layers"] == 36
    model = build_36l(letters_task)
    block = count(model.encoder.layers[0])
    assert count(model.encoder.subsample) == 861_696
    assert block == 7_080_966
    assert count(model.encoder.input_norm) == 2
    assert count(model.encoder.ctc_proj) == 768 * 29 + 29 + 1
    assert count(model) + 35 * block == 255_798_776


def test_it_has_one_gamma_for_queries_and_keys_and_one_for_the_output(letters_task):
    model = build_36l(letters_task, encoder_embed_dim=32, encoder_ffn_embed_dim=64)
    gammas = {name: state.gamma.numel() for name, state in states(model)}
    assert gammas == {"encoder.layers.0": 5, "encoder.ctc_proj": 1}
    assert [name for name, _ in model.named_parameters() if "bias" in name and "norm" not in name] == [
        "encoder.subsample.conv_layers.0.bias",
        "encoder.ctc_proj.bias",
    ]


def test_initial_weights_of_the_released_code(letters_task):
    sizes = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256}
    torch.manual_seed(1)
    sigma = build_36l(letters_task, **sizes)
    raw = sigma.encoder.layers[0].fc1.parametrizations.weight.original
    assert raw.std().item() == pytest.approx(0.1, rel=0.03)
    conv = sigma.encoder.subsample.conv_layers[0]
    bound = (3 / (80 * 7)) ** 0.5
    assert 0.98 * bound < conv.weight.abs().max() <= bound
    assert 0.9 * (80 * 7) ** -0.5 < conv.bias.abs().max() <= (80 * 7) ** -0.5
    plain = build_36l(letters_task, reparam="none", reparam_output=False, **sizes)
    assert 0.98 / 8 < plain.encoder.layers[0].fc1.weight.abs().max() <= 1 / 8  # variance 1 / (3 fan_in)
    assert 0.95 * (3 / 64) ** 0.5 < plain.encoder.ctc_proj.weight.abs().max() <= (3 / 64) ** 0.5
    with pytest.raises(InputError, match="deepnorm has its own initial weights"):
        build_36l(letters_task, norm_placement="deepnorm", **sizes)


def test_what_is_no_letter_gets_no_probability(letters_task):
    model = build_36l(letters_task, encoder_embed_dim=32, encoder_ffn_embed_dim=64).eval()
    output = model(torch.randn(2, 40, 80), torch.tensor([40, 31]))
    assert output["encoder_out"].shape == (14, 2, 32)
    probabilities = model.get_normalized_probs(output, log_probs=False)
    assert not probabilities[..., 1:4].any()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(14, 2))


def test_positions_of_the_36_layer_model_are_relative_in_evaluation(letters_task):
    """The same utterance alone and padded; shifted in training only."""
    torch.manual_seed(0)
    model = build_36l(letters_task, encoder_embed_dim=32, encoder_ffn_embed_dim=64, layers=2).eval()
    features = torch.randn(2, 60, 80)
    together = model(features, torch.tensor([60, 41]))
    alone = model(features[1:, :41], torch.tensor([41]))
    frames = len(alone["encoder_out"])
    torch.testing.assert_close(together["encoder_out"][:frames, 1], alone["encoder_out"][:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", ["s", "m", "l"])
def test_speech_encoder_decoders_have_fairseqs_sizes(size, letters_task):
    """Parameter for parameter those of s2t_transformer_{s,m,l}."""
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq.models.speech_to_text import S2TTransformerModel

    from speech_mt.models.config import SpectralS2TTransformerConfig

    model, options = architecture(f"spectral_s2t_transformer_{size}")
    args = Namespace(input_feat_per_channel=80, input_channels=1, max_source_positions=20, max_target_positions=20)
    ARCH_CONFIG_REGISTRY[f"s2t_transformer_{size}"](args)
    with torch.device("meta"):
        ours = model.build_model(SpectralS2TTransformerConfig(**options), letters_task)
        stock = S2TTransformerModel.build_model(args, letters_task)

    def shapes(module):
        return sorted(tuple(parameter.shape) for parameter in module.parameters())

    assert shapes(ours) == shapes(stock)
    assert ours.encoder.layers[0].cfg.dropout == args.dropout


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("reparam", ["none", "sigma"])
@pytest.mark.parametrize("kind", ["ctc", "s2t"])
def test_speech_models_train_a_step_in_every_placement(ctc_model, s2t_model, speech_batch, kind, placement, reparam):
    """Finite, and a gradient reaches every parameter."""
    options = {"norm_placement": placement, "reparam": reparam, "positions": "cape", "fuse_qk": True}
    options |= {"input_norm": True, "no_scale_embedding": True, "attention_shift": True}
    options["no_bias"] = placement not in ("deepnorm", "subln")
    torch.manual_seed(0)
    if kind == "ctc":
        model = ctc_model(reparam_output=reparam == "sigma", ctc_letters_only=True, **options)
    else:
        model = s2t_model(ctc_weight=0.3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.set_num_updates(0)
    loss = joint_loss(model, speech_batch)
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # keys' biases shift all logits of a query alike: their gradient is 0 but for rounding
        assert parameter.grad.any() or "k_proj.bias" in name, name
    optimizer.step()
    model.set_num_updates(1)
    assert joint_loss(model, speech_batch).isfinite()


def joint_loss(model, batch):
    """CTC, and cross-entropy where there is a decoder."""
    import torch.nn.functional as F

    output = model(**batch["net_input"])
    if hasattr(model, "decoder"):
        log_probs, frames = model.get_ctc_output(output, batch)
        attention = F.cross_entropy(output[0].flatten(0, 1), batch["target"].flatten(), ignore_index=1)
    else:
        log_probs = model.get_normalized_probs(output, log_probs=True)
        frames = (~output["padding_mask"]).sum(1)
        attention = 0
    lengths = batch["target_lengths"]
    return attention + F.ctc_loss(log_probs, batch["target"], frames, lengths)


def test_a_checkpoint_of_an_architecture_gets_the_defaults_of_options_younger_than_it(task):
    from fairseq.models import build_model
    from omegaconf import OmegaConf

    import speech_mt.models.text_to_text  # noqa: F401 (registers the architecture)

    set_then = {"encoder_layers": 3, "qk_norm": True, "max_source_positions": 99, "max_target_positions": 99}
    old = OmegaConf.create({"_name": "spectral_transformer_tiny", **set_then})
    model = build_model(old, task, from_checkpoint=True)
    assert len(model.encoder.layers) == 3
    assert len(model.decoder.layers) == 2
    assert model.encoder.layers[0].self_attn.q_norm is not None
    assert old.token_mixing == ""
