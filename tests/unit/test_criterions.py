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
        "monitor_attention_encoder",
        "monitor_attention_decoder",
        "monitor_attention_cross",
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
    model = ctc_model(conv_kernel_sizes="3", conv_strides="1")  # training mode: stock scores with editdistance in eval
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


def reduced(criterion, *logs):
    """What fairseq logs."""
    with metrics.aggregate(new_root=True) as aggregate:
        criterion.reduce_metrics(list(logs))
        return aggregate.get_smoothed_values()


def test_metrics_hold_a_number_a_layer(task, text_model, text_batch):
    criterion = label_smoothed(task, monitor="entropy,logits,gamma,spectra,smoothing")
    log = criterion(text_model(reparam="sigma"), text_batch)[2]
    values = reduced(criterion, log, log)
    kinds, stacks = ("encoder", "decoder", "cross"), ("encoder", "decoder")
    of_attention = ("entropy", "entropy_normalised", "max_logit", "gamma", "spectral_norm", "query_key_norm")
    expected = {
        *((name, kind) for name in (*of_attention, "effective_rank", "energy_concentration") for kind in kinds),
        *((name, stack) for name in ("cosine", "hfc_lfc", "rank_residual") for stack in stacks),
    }
    assert {key for key in values if "/" in key} == {f"{n}/{kind}/{i:02d}" for n, kind in expected for i in range(3)}
    assert 0 < values["entropy_normalised/encoder/00"] <= 1
    assert values["gamma/cross/02"] == 1
    assert "nll_loss" in values
    assert values["spike_score"] == 0


def test_updates_between_intervals_log_nothing_of_the_monitor(task, text_model, text_batch):
    criterion, model = label_smoothed(task, monitor_interval=3), text_model()
    reduced(criterion, criterion(model, text_batch)[2])
    model.set_num_updates(1)
    log = criterion(model, text_batch)[2]
    assert not [key for key in log if key.startswith("monitor_")]
    assert not [key for key in reduced(criterion, log) if "/" in key]


def test_sharpness_is_logged_on_its_interval_and_changes_nothing(task, text_model, text_batch):
    results = []
    for monitor in ("", "sharpness"):
        criterion = label_smoothed(task, monitor=monitor, sharpness_interval=2)
        model = text_model(dropout=0.1, reparam="sigma")
        torch.manual_seed(5)
        seen = []
        for updates in range(3):
            criterion.watcher.attach(model)
            model.set_num_updates(updates)
            loss, _, log = criterion(model, text_batch)
            loss.backward()
            seen.append("sharpness" in reduced(criterion, log))
        assert seen == ([True, False, True] if monitor else [False] * 3)
        results.append([loss, *(p.grad for p in model.parameters()), *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_collapse_is_logged_and_kept_for_what_is_to_be_done(task, text_model, text_batch, caplog):
    """Identical tokens everywhere and a loss that does not move."""
    criterion = label_smoothed(task, monitor_interval=1, collapse_patience=5, on_collapse="checkpoint")
    model = text_model(norm_placement="none")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" not in name:
                parameter.zero_()
    model.encoder.embed_scale = model.decoder.embed_scale = 0.0
    for stack in (model.encoder, model.decoder):
        stack.embed_positions.weights = stack.embed_positions.weights * 0
        for layer in stack.layers:  # without biases the zero vectors stay what they are; one constant is added last
            for parameter in layer.parameters():
                parameter.data.zero_()
            layer.fc2.bias.data.fill_(1.0)
    for updates in range(12):
        criterion.watcher.attach(model)
        model.set_num_updates(updates)
        reduced(criterion, criterion(model, text_batch)[2])
    assert [(c.failure, c.kind) for c in criterion.collapses] == [("rank collapse", x) for x in ("encoder", "decoder")]
    assert "rank collapse in encoder layers 0-2" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "entropi"}, "--monitor entropi .*known are entropy"),
        ({"monitor_interval": 0}, "--monitor-interval 0: .*at least 1, not 0"),
        ({"sharpness_interval": 0}, "--sharpness-interval 0: .*at least 1, not 0"),
        ({"collapse_patience": 1}, "--collapse-patience 1: .*at least 2, not 1"),
    ],
)
def test_a_bad_option_is_one_message(task, options, message):
    with pytest.raises(InputError, match=message):
        label_smoothed(task, **options)


def test_checkpoints_keep_the_name_of_the_loss():
    """fairseq compares it when a run resumes: a plain run may go on under the monitor, and back."""
    names = [
        LabelSmoothedCrossEntropyWithEntropy.loss_name,
        LabelSmoothedCrossEntropyWithCtcAndEntropy.loss_name,
        CtcWithEntropy.loss_name,
    ]
    stock = [LabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyWithCtcCriterion, StockCtc]
    assert names == [criterion.__name__ for criterion in stock]


def test_an_utterance_too_short_for_ctc_is_named(task, ctc_model, speech_batch):
    """15 and 11 frames for 9 equal letters, which need 8 blanks between them."""
    speech_batch["id"] = torch.tensor([7, 42])
    speech_batch["target"] = torch.full((2, 9), 5)
    with pytest.raises(InputError, match=r"row 7 .* 15 encoder frames, and CTC needs 17 .*\(2 such"):
        ctc(task)(ctc_model(), speech_batch)
    loss, _, _ = ctc(task, zero_infinity=True)(ctc_model(), speech_batch)
    assert loss == 0


def test_a_speech_model_without_a_ctc_head_says_so(task, s2t_model, speech_batch):
    cfg = LabelSmoothedWithCtcConfig(label_smoothing=0.1, sentence_avg=False, ctc_weight=0.3)
    criterion = LabelSmoothedCrossEntropyWithCtcAndEntropy.build_criterion(cfg, task)
    with pytest.raises(InputError, match="needs a CTC head"):
        criterion(s2t_model(), speech_batch)
