"""What TensorBoard shows beyond scalars, read back from the files that were written."""

import numpy as np
import pytest
import torch
from fairseq.logging import metrics, progress_bar
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util.tensor_util import make_ndarray

from speech_mt.diagnostics import tensorboard
from speech_mt.diagnostics.collapse import Collapse
from speech_mt.diagnostics.monitor import Measured
from speech_mt.diagnostics.tensorboard import CELL, Board, heat_map, layout, log_now
from speech_mt.plotting.runs import load_run

MEASURED = Measured(
    layers={"entropy_normalised/encoder": {0: 0.5, 1: 0.7}, "entropy/encoder": {0: 1.0, 1: 1.2}},
    heads={"entropy_normalised/encoder": torch.tensor([[0.0, 1.0, 0.5], [0.2, float("nan"), 0.8]])},
    gammas={"encoder": {"fc1": {0: 1.5, 1: -2.0}, "fc2": {0: 0.5, 1: 0.25}}},
)
COLLAPSE = Collapse("rank collapse", "encoder", (1, 2), None, 7, "tokens are alike")


@pytest.fixture(autouse=True)
def fairseq_writers(monkeypatch):
    """fairseq as in a new process."""
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})
    wrapper = progress_bar.TensorboardProgressBarWrapper
    monkeypatch.setattr(wrapper, "_log_to_tensorboard", wrapper._log_to_tensorboard)
    monkeypatch.setattr(wrapper, "board", None, raising=False)


@pytest.fixture
def log(tmp_path):
    """log(board, stats, step, tag): what fairseq-train does at a log interval."""

    def log(board, stats, step, tag="train_inner"):
        tensorboard.install(board)
        progress_bar.TensorboardProgressBarWrapper(None, str(tmp_path))._log_to_tensorboard(stats, tag, step)

    return log


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    events.Reload()
    return events


def test_everything_goes_through_one_file_with_fairseqs_scalars(log, tmp_path):
    board = Board(("entropy", "gamma"))
    log(board, {"loss": 3.0}, 5)
    board.note(6, MEASURED)
    board.warn(COLLAPSE)
    log(board, {"loss": 2.0, "entropy/encoder/00": 1.0}, 10)
    assert len(list((tmp_path / "train_inner").iterdir())) == 1
    events = read(tmp_path / "train_inner")
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(5, 3.0), (10, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("gamma/encoder/fc1/01")] == [(6, -2.0)]
    (image,) = events.Images("layer_by_head/entropy_normalised/encoder")
    assert (image.step, image.height, image.width) == (6, 2 * CELL, 3 * CELL)
    (histogram,) = events.Histograms("gamma/encoder")
    assert (histogram.step, histogram.histogram_value.num) == (6, 4)
    assert (histogram.histogram_value.min, histogram.histogram_value.max) == (-2.0, 1.5)
    (card,) = events.Tensors("collapse/text_summary")
    assert card.step == 7
    assert b"rank collapse in encoder layers 1-2: tokens are alike" in make_ndarray(card.tensor_proto)[0]


def test_what_was_written_is_not_written_again(log, tmp_path):
    board = Board(("entropy",))
    board.note(6, MEASURED)
    board.warn(COLLAPSE)
    for step in (10, 20):
        log(board, {"loss": 2.0}, step)
    events = read(tmp_path / "train_inner")
    for tag in ("collapse/text_summary", "custom_scalars__config__"):
        assert len(events.Tensors(tag)) == 1, tag
    assert len(events.Images("layer_by_head/entropy_normalised/encoder")) == 1


def test_validation_and_epochs_write_scalars_alone(log, tmp_path):
    board = Board(("entropy",))
    board.note(6, MEASURED)
    log(board, {"loss": 2.0}, 10, tag="train")
    tags = read(tmp_path / "train").Tags()
    assert tags["scalars"] == ["loss"]
    assert tags["images"] == []


def test_all_layers_of_a_kind_share_a_chart(log, tmp_path):
    board = Board(("entropy", "gamma"))
    board.note(6, MEASURED)
    log(board, {"loss": 2.0}, 10)
    (config,) = read(tmp_path / "train_inner").Tensors("custom_scalars__config__")
    found = layout_pb2.Layout.FromString(make_ndarray(config.tensor_proto).item())
    charts = {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in found.category
    }
    assert charts["Attention entropy, nats"] == {"encoder": [r"entropy/encoder/\d+$"]}
    assert charts["Gamma of each weight"] == {
        "encoder fc1": [r"gamma/encoder/fc1/\d+$"],
        "encoder fc2": [r"gamma/encoder/fc2/\d+$"],
    }
    assert "Largest attention logit" not in charts


def test_cross_attention_has_no_tokens_of_its_own():
    measured = Measured(
        layers={f"{name}/{kind}": {0: 1.0} for name, kind in [("entropy", "cross"), ("cosine", "decoder")]}
    )
    charts = layout(("entropy", "smoothing"), measured)
    assert set(charts["Attention entropy, nats"]) == {"decoder", "cross"}
    assert set(charts["Cosine between tokens; 1: all alike"]) == {"decoder"}


def test_a_resumed_run_hides_what_it_repeats(log, tmp_path, monkeypatch):
    for step in (10, 20, 30):
        log(Board(()), {"loss": float(step)}, step)
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})  # a new process goes on from update 15
    for step in (20, 30, 40):
        log(Board(()), {"loss": step + 0.5}, step)
    expected = [(10, 10.0), (20, 20.5), (30, 30.5), (40, 40.5)]
    assert [(e.step, e.value) for e in read(tmp_path / "train_inner").Scalars("loss")] == expected
    run = load_run(tmp_path)
    assert list(zip(*run.scalar("loss"), strict=True)) == expected


def test_heat_map_has_layers_downwards_and_grey_for_unknown():
    picture = heat_map(np.array([[0.0, 1.0], [np.nan, 0.5], [1.0, 0.0]]))
    assert picture.shape == (3 * CELL, 2 * CELL, 3)
    assert picture.dtype == np.uint8
    assert (picture[CELL + 1, 1] == 0xCC).all()
    assert (picture[0, 0] == picture[-1, -1]).all()
    assert (picture[0, -1] == picture[-1, 0]).all()
    assert picture[0, -1].sum() > picture[0, 0].sum()  # more is brighter


def test_before_an_end_the_updates_since_the_last_interval_are_logged(log, tmp_path):
    board = Board(())
    tensorboard.install(board)
    with metrics.aggregate("train_inner"):
        metrics.log_scalar("loss", 4.0)
    board.warn(COLLAPSE)
    log_now(str(tmp_path), 13)
    metrics.reset_meters("train_inner")
    board.warn(COLLAPSE._replace(update=14))
    log_now(str(tmp_path), 14)  # nothing but the card
    events = read(tmp_path / "train_inner")
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(13, 4.0)]
    assert [card.step for card in events.Tensors("collapse/text_summary")] == [7, 14]
