"""The monitor: right numbers for our attention and fairseq's, reduced rightly, and results that it leaves alone."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from speech_mt.diagnostics.monitor import SPECTRA_INTERVAL, Monitor
from tests.unit.encoder_stack import EncoderStack

EVERYTHING = ("entropy", "logits", "gamma", "spectra", "smoothing")


def measure(monitor, model, *args, padding=None, **kwargs):
    with monitor.watch(model, padding):
        model(*args, **kwargs)
    return monitor.reduce([monitor.statistics()])


def by_hand(model, batch):
    """Entropy and logits of each encoder layer by explicit softmax, one sentence without its padding at a time."""
    entropies, largest = [], []
    for tokens in batch["net_input"]["src_tokens"]:
        tokens = tokens[tokens != 1][None]
        x = model.encoder.embed_scale * model.encoder.embed_tokens(tokens) + model.encoder.embed_positions(tokens)
        layers, maxima = [], []
        for layer in model.encoder.layers:
            attention = layer.self_attn
            q, k = attention._heads(attention.q_proj(x)), attention._heads(attention.k_proj(x))
            logits = q @ k.transpose(2, 3) * attention.scale
            layers.append(torch.special.entr(logits.softmax(-1)).sum(-1).flatten())
            maxima.append(logits.amax((0, 2, 3)))
            x = layer(x)
        entropies.append(torch.stack(layers))
        largest.append(torch.stack(maxima))
    return torch.cat(entropies, 1).mean(1), torch.stack(largest).amax(0)


def values(layers):
    return torch.tensor(list(layers.values()))


@torch.no_grad()
def test_entropy_and_largest_logits_equal_explicit_softmax_over_real_tokens(text_model, text_batch):
    model = text_model().eval()
    padding = text_batch["net_input"]["prev_output_tokens"].eq(1)
    found = measure(Monitor(), model, **text_batch["net_input"], padding=padding)
    entropy, largest = by_hand(model, text_batch)
    torch.testing.assert_close(values(found.layers["entropy/encoder"]), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.heads["max_logit/encoder"].float(), largest, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values(found.layers["max_logit/encoder"]), largest.amax(1), rtol=1e-5, atol=1e-5)
    per_head = found.heads["entropy_normalised/encoder"]
    assert per_head.shape == (3, 4)
    assert 0 < per_head.min() < per_head.max() <= 1


@torch.no_grad()
def test_stock_fairseq_is_seen_the_same(text_model, stock_model, text_batch):
    padding = text_batch["net_input"]["prev_output_tokens"].eq(1)
    ours, stock = (
        measure(Monitor(EVERYTHING), build().train(), **text_batch["net_input"], padding=padding)
        for build in (text_model, stock_model)
    )
    kinds, stacks = ("encoder", "decoder", "cross"), ("encoder", "decoder")
    names = ("entropy", "entropy_normalised", "max_logit", "spectral_norm", "query_key_norm", "effective_rank")
    names = {f"{name}/{kind}" for name in (*names, "energy_concentration") for kind in kinds}
    assert (
        set(ours.layers)
        == set(stock.layers)
        == names | {f"{name}/{stack}" for name in ("cosine", "hfc_lfc", "rank_residual") for stack in stacks}
    )
    for name, layers in ours.layers.items():
        torch.testing.assert_close(values(stock.layers[name]), values(layers), rtol=1e-4, atol=1e-4, msg=name)


def test_result_and_gradient_are_bit_equal_with_and_without(text_model, text_batch):
    results = []
    for watched in (False, True):
        model = text_model(dropout=0.1, attention_dropout=0.1, reparam="sigma")
        torch.manual_seed(3)
        if watched:
            with Monitor(EVERYTHING).watch(model):
                loss = model(**text_batch["net_input"])[0].square().mean()
        else:
            loss = model(**text_batch["net_input"])[0].square().mean()
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters()), *model.state_dict().values(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.no_grad()
def test_micro_batches_come_to_the_whole_batch(text_model, text_batch):
    model, monitor = text_model().eval(), Monitor(("entropy", "logits", "smoothing"))

    def statistics(rows):
        inputs = {k: v[rows] for k, v in text_batch["net_input"].items()}
        with monitor.watch(model, inputs["prev_output_tokens"].eq(1)):
            model(**inputs)
        return monitor.statistics()

    whole = monitor.reduce([statistics(slice(None))])
    parts = monitor.reduce([statistics(slice(0, 1)), statistics(slice(1, 4))])
    for name, layers in whole.layers.items():
        torch.testing.assert_close(values(parts.layers[name]), values(layers), rtol=1e-5, atol=1e-5)
    logits = (measured.heads["max_logit/cross"] for measured in (parts, whole))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)  # of float32 products, in batches of other sizes
    assert monitor.reduce([]) is None


def _rank(rank, folder, queue):
    """One of two processes, with sentences of its own; rank 1 has more of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1 + 2 * rank, 5, 16, generator=generator)
    monitor, model = Monitor(), EncoderStack()
    with torch.no_grad(), monitor.watch(model):
        model(x)
    sums = monitor.statistics()
    for value in sums.values():
        dist.all_reduce(value)  # as fairseq does
    found = monitor.reduce([sums])
    queue.put((rank, x.tolist(), found.layers, found.heads["max_logit/encoder"].tolist()))
    dist.destroy_process_group()


def test_ranks_with_uneven_batches_come_to_the_whole_batch(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, tmp_path, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = sorted(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    (_, x0, layers, largest), (_, x1, other_layers, other_largest) = results
    assert (layers, largest) == (other_layers, other_largest)  # both ranks know the same
    with torch.no_grad():
        whole = measure(Monitor(), EncoderStack(), torch.tensor(x0 + x1))
    torch.testing.assert_close(torch.tensor(largest), whole.heads["max_logit/encoder"].float())
    for name in ("entropy/encoder", "entropy_normalised/encoder", "max_logit/encoder"):
        torch.testing.assert_close(values(layers[name]), values(whole.layers[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", ["text_model", "stock_model"])
def test_recomputed_activations_count_once(request, text_batch, make):
    from fairseq.modules.checkpoint_activations import checkpoint_wrapper

    found = []
    for recompute in (False, True):
        model = request.getfixturevalue(make)()
        if recompute:
            for layers in (model.encoder.layers, model.decoder.layers):
                for layer in layers:
                    checkpoint_wrapper(layer)
        monitor = Monitor(("entropy", "logits", "smoothing"))
        with monitor.watch(model):
            output = model(**text_batch["net_input"])[0]
        output.sum().backward()
        found.append(monitor.reduce([monitor.statistics()]))
    assert found[0].layers == found[1].layers
    assert found[0].counts == found[1].counts


@torch.no_grad()
def test_first_update_every_interval_and_validation_are_measured(text_model, text_batch):
    model, monitor = text_model(), Monitor(interval=3)

    def seen(updates_done):
        monitor.attach(model)
        model.set_num_updates(updates_done)
        with monitor.watch(model):
            model(**text_batch["net_input"])
        return bool(monitor.statistics())

    assert [seen(updates) for updates in range(7)] == [True, False, True, False, False, True, False]
    model.eval()
    assert seen(6)


@torch.no_grad()
def test_spectra_are_measured_on_every_tenth_measured_update():
    model, monitor = EncoderStack(), Monitor(("spectra",), interval=2)
    monitor.attach(model)
    measured = []
    for updates in range(4 * SPECTRA_INTERVAL):
        monitor.clock.set_num_updates(updates)
        for _ in range(2):  # micro-batches
            with monitor.watch(model):
                model(torch.randn(1, 3, 16))
        measured.append(monitor.reduce([]) is not None)
    assert [update for update, seen in enumerate(measured, 1) if seen] == [
        1,
        2 * SPECTRA_INTERVAL,
        4 * SPECTRA_INTERVAL,
    ]


@torch.no_grad()
def test_identical_tokens_have_cosine_one_and_uniform_attention(ctc_model):
    model = ctc_model(norm_placement="none").eval()
    for layer in model.encoder.layers:  # attention to identical tokens, nothing added that differs
        layer.self_attn.q_proj.weight.zero_()
        layer.self_attn.q_proj.bias.zero_()
    monitor = Monitor(("entropy", "smoothing"))
    with monitor.watch(model):
        model.encoder.encode(torch.ones(1, 5, 32), None)
    found = monitor.reduce([monitor.statistics()]).layers
    torch.testing.assert_close(values(found["cosine/encoder"]), torch.ones(3))
    torch.testing.assert_close(values(found["rank_residual/encoder"]), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(values(found["entropy/encoder"]), torch.full((3,), 5.0).log())
    torch.testing.assert_close(values(found["entropy_normalised/encoder"]), torch.ones(3))


@torch.no_grad()
def test_cosine_alone_is_measured_when_it_is_wanted():
    monitor = Monitor(("entropy",))
    monitor.wants_cosine = True
    found = measure(monitor, EncoderStack(), torch.randn(1, 3, 16))
    assert {name.partition("/")[0] for name in found.layers} == {"entropy", "entropy_normalised", "cosine"}


@torch.no_grad()
def test_a_layer_that_was_skipped_is_missing_and_shifts_no_other():
    model, x, monitor = EncoderStack(), torch.randn(2, 4, 16), Monitor(("entropy", "logits", "smoothing"))
    with monitor.watch(model):
        model.encoder.layers[2](x)
    found = monitor.reduce([monitor.statistics()])
    for name in ("entropy/encoder", "max_logit/encoder", "cosine/encoder"):
        assert list(found.layers[name]) == [2]
    assert found.heads["max_logit/encoder"][:2].isnan().all()


@torch.no_grad()
def test_a_rank_that_skips_every_layer_has_the_keys_of_the_others():
    model, x, monitor = EncoderStack(), torch.randn(2, 4, 16), Monitor(("entropy", "logits", "smoothing"))
    keys = []
    for layers in ([], model.encoder.layers):
        with monitor.watch(model):
            for layer in layers:
                layer(x)
        keys.append(set(monitor.statistics()))
    assert keys[0] == keys[1] != set()
    with monitor.watch(model):
        pass
    monitor.reduce([])
    assert monitor.reduce([monitor.statistics()]) is None


@torch.no_grad()
def test_rows_that_are_not_finite_are_counted_not_averaged():
    model, x = EncoderStack(), torch.randn(2, 4, 16)
    x[1, 2] = torch.nan
    found = measure(Monitor(), model, x)
    clean = measure(Monitor(), model, x[:1])
    assert found.layers["entropy/encoder"] == pytest.approx(clean.layers["entropy/encoder"], rel=1e-5)
    assert found.nonfinite == {"encoder": 3 * 4 * 4}
    assert values(found.layers["max_logit/encoder"]).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_models_are_measured_in_float32(dtype):
    model, x = EncoderStack(), torch.randn(2, 5, 16)
    full = measure(Monitor(EVERYTHING), model, x)
    half = measure(Monitor(EVERYTHING), model.to(dtype), x.to(dtype))
    for name in ("entropy/encoder", "max_logit/encoder", "cosine/encoder", "query_key_norm/encoder"):
        torch.testing.assert_close(values(half.layers[name]), values(full.layers[name]), rtol=0.05, atol=0.02)


def test_a_model_without_known_attention_is_warned_about(caplog):
    with Monitor().watch(nn.Linear(2, 2)):
        pass
    assert "Linear: found no attention to watch" in caplog.text


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="cannot monitor entropi; known are entropy"):
        Monitor(("entropi",))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Monitor(interval=0)
