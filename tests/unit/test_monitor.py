"""The monitor: right numbers for our attention and fairseq's, sums that add up, and results that it leaves alone."""

import pytest
import torch

from speech_mt.diagnostics.monitor import Monitor, attention_sites, layer_sites


def entropy_by_hand(model, batch):
    """Mean entropy per encoder layer, of explicit softmax over real queries and keys, one sentence at a time."""
    seen = []
    for tokens in batch["net_input"]["src_tokens"]:
        tokens = tokens[tokens != 1][None]
        x = model.encoder.embed_scale * model.encoder.embed_tokens(tokens) + model.encoder.embed_positions(tokens)
        layers = []
        for layer in model.encoder.layers:
            attention = layer.self_attn
            q, k = attention._heads(attention.q_proj(x)), attention._heads(attention.k_proj(x))
            p = (q @ k.transpose(2, 3) * attention.scale).softmax(-1)
            layers.append(torch.special.entr(p).sum(-1).flatten())
            x = layer(x)
        seen.append(torch.stack(layers))
    return torch.cat(seen, 1).mean(1)


def layer_means(statistics, key):
    total, rows = statistics[key].sum(-1).unbind(1)[:2]
    return total / rows


@torch.no_grad()
def test_entropy_equals_explicit_softmax_over_real_tokens(text_model, text_batch):
    model, monitor = text_model().eval(), Monitor(("entropy",))
    with monitor.watch(model, text_batch["net_input"]["prev_output_tokens"].eq(1)):
        model(**text_batch["net_input"])
    found = layer_means(monitor.statistics(), "monitor_entropy_encoder")
    torch.testing.assert_close(found, entropy_by_hand(model, text_batch), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_stock_fairseq_is_seen_the_same(text_model, stock_model, text_batch):
    padding = text_batch["net_input"]["prev_output_tokens"].eq(1)
    seen = []
    for model in (text_model().eval(), stock_model().eval()):
        monitor = Monitor(("entropy", "smoothing"))
        with monitor.watch(model, padding):
            model(**text_batch["net_input"])
        seen.append(monitor.statistics())
    assert (
        set(seen[0])
        == set(seen[1])
        == {
            f"monitor_{key}"
            for key in ("entropy_encoder", "entropy_decoder", "entropy_cross", "cosine_encoder", "cosine_decoder")
        }
    )
    for key, value in seen[0].items():
        torch.testing.assert_close(seen[1][key], value, rtol=1e-4, atol=1e-3, msg=key)


def test_result_and_gradient_are_bit_equal_with_and_without(text_model, text_batch):
    results = []
    for watched in (False, True):
        model = text_model(dropout=0.1, attention_dropout=0.1)
        torch.manual_seed(3)
        if watched:
            with Monitor(("entropy", "smoothing")).watch(model):
                loss = model(**text_batch["net_input"])[0].square().mean()
        else:
            loss = model(**text_batch["net_input"])[0].square().mean()
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.no_grad()
def test_sums_over_sentences_add_up_to_the_batch(text_model, text_batch):
    model, monitor = text_model().eval(), Monitor(("entropy", "smoothing"))

    def measure(rows):
        inputs = {k: v[rows] for k, v in text_batch["net_input"].items()}
        with monitor.watch(model, inputs["prev_output_tokens"].eq(1)):
            model(**inputs)
        return monitor.statistics()

    whole, parts = measure(slice(None)), [measure(slice(0, 1)), measure(slice(1, 4))]
    for key, value in whole.items():
        torch.testing.assert_close(parts[0][key] + parts[1][key], value, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_interval_counts_updates_and_validation_is_always_seen(text_model, text_batch):
    model, monitor = text_model(), Monitor(interval=3)

    def seen(update):
        with monitor.watch(model):  # attaches the clock
            pass
        model.set_num_updates(update)
        with monitor.watch(model):
            model(**text_batch["net_input"])
        return bool(monitor.statistics())

    assert [seen(update) for update in range(5)] == [True, False, False, True, False]
    model.eval()
    assert seen(4)


@torch.no_grad()
def test_identical_tokens_have_cosine_one_and_uniform_attention(ctc_model):
    model, monitor = ctc_model(norm_placement="none").eval(), Monitor(("entropy", "smoothing"))
    for layer in model.encoder.layers:  # attention to identical tokens, nothing added that differs
        layer.self_attn.q_proj.weight.zero_()
        layer.self_attn.q_proj.bias.zero_()
    with monitor.watch(model):
        model.encoder.encode(torch.ones(1, 5, 32), None)
    statistics = monitor.statistics()
    cosine = statistics["monitor_cosine_encoder"]
    torch.testing.assert_close(cosine[:, 0] / cosine[:, 1], torch.ones(3))
    total, rows, normalised, normalised_rows = statistics["monitor_entropy_encoder"].sum(-1).unbind(1)[:4]
    torch.testing.assert_close(total / rows, torch.full((3,), 5.0).log())
    torch.testing.assert_close(normalised / normalised_rows, torch.ones(3))


def test_sites_are_found_by_name(text_model, ctc_model):
    assert [(s.kind, s.layer) for s in attention_sites(text_model())] == [
        *(("encoder", i) for i in range(3)),
        *((kind, i) for i in range(3) for kind in ("decoder", "cross")),
    ]
    assert [(s.kind, s.layer) for s in layer_sites(ctc_model())] == [("encoder", i) for i in range(3)]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="cannot monitor entropi; known are entropy"):
        Monitor(("entropi",))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Monitor(interval=0)
