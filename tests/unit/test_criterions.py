"""The monitored criterions: stock losses bit for bit, stock logs, and z-loss where asked for."""

import pytest
import torch
from fairseq.criterions.ctc import CtcCriterion as StockCtc
from fairseq.criterions.ctc import CtcCriterionConfig as StockCtcConfig
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_ctc import LabelSmoothedCrossEntropyWithCtcCriterion
from fairseq.logging import metrics

from speech_mt.criterions.monitored import (
    CtcConfig,
    CtcWithEntropy,
    LabelSmoothedConfig,
    LabelSmoothedCrossEntropyWithCtcAndEntropy,
    LabelSmoothedCrossEntropyWithEntropy,
    LabelSmoothedWithCtcConfig,
)
from speech_mt.criterions.z_loss import z_loss
from speech_mt.errors import InputError


def label_smoothed(task, **options):
    cfg = LabelSmoothedConfig(label_smoothing=0.1, sentence_avg=False, **options)
    return LabelSmoothedCrossEntropyWithEntropy.build_criterion(cfg, task)


def ctc(task, **options):
    return CtcWithEntropy.build_criterion(CtcConfig(sentence_avg=False, **options), task)


def test_label_smoothed_loss_and_log_are_stock(task, text_model, text_batch):
    stock = LabelSmoothedCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=0.1)
    ours = label_smoothed(task)
    model = text_model()
    (loss, size, log), (stock_loss, stock_size, stock_log) = ours(model, text_batch), stock(model, text_batch)
    assert torch.equal(loss, stock_loss)
    assert size == stock_size
    assert {key: log[key] for key in stock_log} == stock_log
    assert {key for key in log if key not in stock_log} == {
        "monitor_entropy_encoder",
        "monitor_entropy_decoder",
        "monitor_entropy_cross",
    }


def test_joint_ctc_loss_is_stock(task, s2t_model, speech_batch):
    stock = LabelSmoothedCrossEntropyWithCtcCriterion(task, False, 0.1, 0, False, ctc_weight=0.3)
    cfg = LabelSmoothedWithCtcConfig(label_smoothing=0.1, sentence_avg=False, ctc_weight=0.3)
    ours = LabelSmoothedCrossEntropyWithCtcAndEntropy.build_criterion(cfg, task)
    model = s2t_model(ctc_weight=0.3)
    (loss, _, log), (stock_loss, _, stock_log) = ours(model, speech_batch), stock(model, speech_batch)
    assert torch.equal(loss, stock_loss)
    assert {key: log[key] for key in stock_log} == stock_log


def test_ctc_loss_is_stock_where_stock_knows_the_lengths(task, ctc_model, speech_batch):
    """fairseq's criterion takes the frames of the input for those of the output: equal if nothing is subsampled."""
    stock = StockCtc(StockCtcConfig(sentence_avg=False), task)
    del speech_batch["target_lengths"]
    model = ctc_model(
        conv_kernel_sizes="3", conv_strides="1"
    )  # training mode: stock scores with editdistance in eval
    loss, size, _ = ctc(task)(model, speech_batch)
    stock_loss, stock_size, _ = stock(model, speech_batch)
    assert torch.equal(loss, stock_loss)
    assert size == stock_size


def test_ctc_loss_of_a_subsampling_encoder(task, ctc_model, speech_batch):
    model = ctc_model()
    loss, size, _ = ctc(task)(model, speech_batch)
    output = model(**speech_batch["net_input"])
    expected = torch.nn.functional.ctc_loss(
        output["encoder_out"].log_softmax(-1),
        torch.cat([speech_batch["target"][0, :5], speech_batch["target"][1, :4]]),
        torch.tensor([15, 11]),
        torch.tensor([5, 4]),
        blank=0,
        reduction="sum",
    )
    torch.testing.assert_close(loss, expected)
    assert size == 11


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    expected = torch.tensor([torch.log(torch.tensor(2.0)) ** 2, 0.0])
    torch.testing.assert_close(z_loss(logits, torch.tensor([True, False])), expected)


def test_z_loss_joins_the_loss_over_real_tokens(task, text_model, ctc_model, text_batch, speech_batch):
    model = text_model()
    plain, _, plain_log = label_smoothed(task)(model, text_batch)
    loss, _, log = label_smoothed(task, z_loss=0.01)(model, text_batch)
    log_z = model(**text_batch["net_input"])[0].logsumexp(-1)[text_batch["target"] != 1]
    torch.testing.assert_close(loss - plain, 0.01 * log_z.square().sum(), rtol=1e-3, atol=1e-3)
    assert log["nll_loss"] == plain_log["nll_loss"]

    model = ctc_model()
    plain, loss = (ctc(task, z_loss=w)(model, speech_batch)[0] for w in (0.0, 0.01))
    log_z = model(**speech_batch["net_input"])["encoder_out"].logsumexp(-1)
    expected = 0.01 * (log_z[:, 0].square().sum() + log_z[:11, 1].square().sum())
    torch.testing.assert_close(loss - plain, expected, rtol=1e-3, atol=1e-3)


def test_metrics_hold_a_number_a_layer(task, text_model, text_batch):
    criterion = label_smoothed(task, monitor="entropy,smoothing")
    log = criterion(text_model(), text_batch)[2]
    with metrics.aggregate(new_root=True) as aggregate:
        criterion.reduce_metrics([log, log])
        values = aggregate.get_smoothed_values()
    kinds = {
        "entropy": ("encoder", "decoder", "cross"),
        "entropy_normalised": ("encoder", "decoder", "cross"),
    }
    kinds["cosine"] = ("encoder", "decoder")
    expected = {
        f"{name}/{kind}/{i:02d}" for name, stacks in kinds.items() for kind in stacks for i in range(3)
    }
    assert {key for key in values if "/" in key} == expected
    assert 0 < values["entropy_normalised/encoder/00"] <= 1
    assert "nll_loss" in values


def test_updates_between_intervals_log_nothing_of_the_monitor(task, text_model, text_batch):
    criterion, model = label_smoothed(task, monitor_interval=2), text_model()
    criterion(model, text_batch)
    model.set_num_updates(1)
    log = criterion(model, text_batch)[2]
    assert not [key for key in log if key.startswith("monitor_")]
    with metrics.aggregate(new_root=True):
        criterion.reduce_metrics([log])


def test_class_names_let_a_plain_run_resume_under_the_monitor():
    names = [
        LabelSmoothedCrossEntropyWithEntropy.__name__,
        LabelSmoothedCrossEntropyWithCtcAndEntropy.__name__,
        CtcWithEntropy.__name__,
    ]
    stock = [LabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyWithCtcCriterion, StockCtc]
    assert names == [criterion.__name__ for criterion in stock]


def test_unknown_quantity_is_one_message(task):
    with pytest.raises(InputError, match="--monitor entropi .*known are entropy"):
        label_smoothed(task, monitor="entropi")
