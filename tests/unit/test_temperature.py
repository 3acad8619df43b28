"""Temperature intervention: the logits of the given layers are scaled, from the given update on, and no others."""

import math

import pytest
import torch

from speech_mt.criterions.monitored import LabelSmoothedConfig, LabelSmoothedCrossEntropyWithEntropy
from speech_mt.diagnostics.sites import attention_sites
from speech_mt.diagnostics.temperature import TemperatureIntervention
from speech_mt.errors import InputError


def criterion(task, **options):
    cfg = LabelSmoothedConfig(label_smoothing=0.1, sentence_avg=False, monitor_interval=1, **options)
    return LabelSmoothedCrossEntropyWithEntropy.build_criterion(cfg, task)


def largest_logits(task, model, batch, updates, **options):
    ours = criterion(task, **options)
    ours.watcher.attach(model)
    model.set_num_updates(updates)
    with torch.no_grad():
        ours(model, batch)
    heads = ours.watcher.reduce([ours.watcher.statistics()]).heads
    return {kind: heads[f"max_logit/{kind}"] for kind in ("encoder", "decoder", "cross")}


def test_the_layers_that_are_meant_and_no_others(task, text_model, text_batch):
    model = text_model().eval()
    before = largest_logits(task, model, text_batch, 7)
    early = largest_logits(task, model, text_batch, 6, temperature_intervention="7:4:encoder.0,cross.1-2")
    assert all(torch.equal(before[kind], early[kind]) for kind in before)
    after = largest_logits(task, model, text_batch, 7, temperature_intervention="7:4:encoder.0,cross.1-2")
    torch.testing.assert_close(after["encoder"][0], 4 * before["encoder"][0])
    scales = {(site.kind, site.layer): site.module.scale * math.sqrt(8) for site in attention_sites(model)}
    expected = {key: 4.0 if key in {("encoder", 0), ("cross", 1), ("cross", 2)} else 1.0 for key in scales}
    assert scales == pytest.approx(expected)


def test_it_is_the_same_as_larger_queries(task, text_model, text_batch):
    warm, cold = text_model(), text_model()
    TemperatureIntervention.parse("0:3:all").apply(attention_sites(warm), 0)
    with torch.no_grad():
        for site in attention_sites(cold):
            site.module.q_proj.weight *= 3
            site.module.q_proj.bias *= 3
    outputs = [model(**text_batch["net_input"])[0] for model in (warm, cold)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_is_hot_from_its_first_batch(task, text_model, text_batch):
    """The model's clock is new, but fairseq has logged the number of updates."""
    from fairseq.logging import metrics

    model = text_model()
    metrics.reset()
    metrics.log_scalar("num_updates", 100)
    criterion(task, temperature_intervention="100:2:encoder")(model, text_batch)
    metrics.reset()
    assert model.encoder.layers[0].self_attn.scale == pytest.approx(2 * 8**-0.5)
    assert model.decoder.layers[0].self_attn.scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize(
    "text", ["5:2", "5:2:encode", "x:2:all", "5:0:all", "5:nan:all", "-1:2:all", "5:2:encoder.", "5:2:encoder.a"]
)
def test_what_is_no_intervention_is_one_message(task, text):
    with pytest.raises(InputError, match="--temperature-intervention .*want UPDATE:FACTOR:LAYERS, such as 500:4:all"):
        criterion(task, temperature_intervention=text)


def test_layers_that_are_not_there_and_stock_models_are_refused(text_model, stock_model):
    with pytest.raises(InputError, match="has none of these layers"):
        TemperatureIntervention.parse("0:2:encoder.7").apply(attention_sites(text_model()), 0)
    with pytest.raises(InputError, match="fairseq.modules.multihead_attention has no scale"):
        TemperatureIntervention.parse("0:2:all").apply(attention_sites(stock_model()), 0)
