"""examples/oversmoothing: the grid, shares of corpora, one run of a task, what survives, and the report."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.data.vocabulary import character_counts, write_dictionary
from speech_mt.errors import InputError
from speech_mt.experiments.table import read_table, write_table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "oversmoothing"))

import oversmoothing  # noqa: E402
import oversmoothing_report  # noqa: E402
import shares  # noqa: E402
import training  # noqa: E402
import trials  # noqa: E402
from controls import CONTROLS, Control  # noqa: E402

TRIAL = trials.Trial("images", "sharpen", 12, 1.0, 1, 300)
RESULT = trials.Result(91.5, 0.25, 0.5, 0.75, 3.0, "abc1234", "a machine", "python images.py")


def test_the_grid_has_every_cell_once_and_depths_first():
    cells = list(trials.grid(list(trials.TASKS), list(CONTROLS), trials.DEPTHS, trials.SHARES, 1, 0))
    assert len(cells) == len(set(cells)) == len({cell.name for cell in cells}) == 3 * 13 * (3 + 3)
    assert {cell.share for cell in cells[: 3 * 13 * 3]} == {1.0}
    assert {cell.layers for cell in cells if cell.share < 1} == {12}
    assert {cell.updates for cell in cells} == {task.updates for task in trials.TASKS.values()}


def test_options_of_a_control_are_those_that_are_not_the_default():
    assert CONTROLS["stock"].options == "--norm-placement pre"
    control = Control("smooth", "general", "neutreno", "sigma", "deepnorm")
    assert control.options == (
        "--norm-placement deepnorm --reparam sigma --value-spectrum smooth --value-basis general "
        "--token-mixing neutreno"
    )
    with pytest.raises(InputError, match="no control Stock; there are stock, smooth"):
        trials.known(["stock", "Stock"])


def test_a_share_is_a_part_chosen_by_the_seed():
    kept = shares.chosen(100, 0.25, 1)
    assert len(set(kept)) == 25
    assert kept == shares.chosen(100, 0.25, 1) != shares.chosen(100, 0.25, 2)
    assert shares.chosen(3, 0.01, 1) != []
    with pytest.raises(InputError, match="a share of 0"):
        shares.chosen(3, 0.0, 1)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Tones of two pitches that say two words."""
    folder = tmp_path_factory.mktemp("spoken")
    for split, count in (("train", 40), ("test", 10)):
        rows = []
        for i in range(count):
            tone = 0.3 * np.sin(np.arange(8000) / 16000 * 2 * np.pi * (500, 2000)[i % 2])
            soundfile.write(folder / f"{split}{i}.flac", tone, 16000)
            row = {"id": f"{split}{i}", "audio": f"{split}{i}.flac", "duration": 0.5, "text": ("low", "high")[i % 2]}
            rows.append(row | {"speaker": "tone"})
        write_manifest(folder / f"{split}.tsv", rows)
    write_dictionary(folder / "dict.txt", character_counts(["low high"]))
    return folder


def test_a_part_of_a_manifest_has_the_whole_test_set(spoken, tmp_path):
    part = shares.part_of_manifest(spoken, tmp_path / "part", 0.1, 1)
    train, test = read_manifest(part / "train.tsv"), read_manifest(part / "test.tsv")
    assert (len(train), len(test)) == (4, 10)
    assert all(manifest.audio_path(i).exists() for manifest in (train, test) for i in range(len(manifest)))
    assert (part / "dict.txt").read_text() == (spoken / "dict.txt").read_text()


def test_a_part_of_pairs_keeps_pairs_together(tmp_path):
    from fairseq.data import Dictionary, data_utils, indexed_dataset

    whole, dictionary = tmp_path / "mt" / "bin", Dictionary()
    whole.mkdir(parents=True)
    for i in range(30):
        dictionary.add_symbol(f"w{i}")
    for language in ("de", "en"):
        dictionary.save(str(whole / f"dict.{language}.txt"))
        path = str(whole / f"train.de-en.{language}")
        builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", len(dictionary))
        for i in range(20):
            builder.add_item(dictionary.encode_line(f"w{i} " * (1 + (language == "en"))).long())
        builder.finalize(f"{path}.idx")
    (tmp_path / "mt" / "raw").mkdir()
    part = shares.part_of_pairs(whole, tmp_path / "part", 0.5, 1)
    source, target = (data_utils.load_indexed_dataset(str(part / f"train.de-en.{x}"), dictionary) for x in ("de", "en"))
    assert len(source) == len(target) == 10
    assert all(int(s[0]) == int(t[0]) == int(t[1]) for s, t in zip(source, target, strict=True))
    assert (tmp_path / "part" / "raw").is_dir()


def test_a_run_on_speech_measures_layers_and_spoilt_test_sets(spoken, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = dataclasses.replace(trials.TASKS["digits"], corruptions={"noise": (20, 0), "speed": (1.25,)})
    monkeypatch.setitem(trials.TASKS, "digits", small)
    trial = trials.Trial("digits", "FeatScale + NeuTRENO", 2, 1.0, 1, 20)
    result, spoilt = training.train_and_measure(trial, str(spoken), str(tmp_path / "run"), "abc", "a machine")
    assert math.isfinite(result.loss)
    assert result.score >= 0
    assert [(row.corruption, row.level) for row in spoilt] == [("noise", 20), ("noise", 0), ("speed", 1.25)]
    rows = read_table(tmp_path / "run" / "layers.csv", trials.Layer, trials.Value)
    assert {key.update for key in rows if key.measure == "hfc_lfc"} == {0, 10, 20}
    assert {key.update for key in rows if key.measure == "predicted_smoothing"} == {0, 20}
    assert {key.layer for key in rows} == {0, 1}
    assert result.cosine == pytest.approx(rows[trials.Layer(20, "cosine", "encoder", 1)].value, rel=1e-4)


def test_rows_survive_and_are_not_run_again(tmp_path, monkeypatch, capsys):
    from concurrent.futures import ThreadPoolExecutor

    ran = []

    def train(trial, **arguments):
        ran.append(trial)
        if trial.control == "smooth":
            raise RuntimeError("boom")
        return RESULT, {trials.Spoilt(**vars(trial), corruption="pixels", level=0.5): trials.Score(50.0)}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(oversmoothing, "train", train)
    monkeypatch.setattr(oversmoothing, "processes", ThreadPoolExecutor)
    wanted = [dataclasses.replace(TRIAL, control=control) for control in ("smooth", "sharpen", "stock")]
    assert oversmoothing.run_trials(wanted, {}, tmp_path, 1, minutes=1) == 1
    assert "boom" in capsys.readouterr().err
    assert oversmoothing.run_trials(wanted, {}, tmp_path, 1, minutes=1) == 1
    assert [trial.control for trial in ran] == ["smooth", "sharpen", "stock", "smooth"]
    assert oversmoothing.run_trials(wanted, {}, tmp_path, 1, minutes=0) == 0
    assert len(read_table(tmp_path / "spoilt.csv", trials.Spoilt, trials.Score)) == 2


def test_the_report_shows_every_row(tmp_path, capsys):
    stock = dataclasses.replace(TRIAL, control="stock")
    results = {
        TRIAL: RESULT,
        dataclasses.replace(TRIAL, share=0.1): dataclasses.replace(RESULT, score=40.25),
        stock: dataclasses.replace(RESULT, score=math.nan),
    }
    write_table(tmp_path / "study.csv", results, trials.Trial, trials.Result)
    spoilt = {trials.Spoilt(**vars(TRIAL), corruption="pixels", level=0.5): trials.Score(60.0)}
    write_table(tmp_path / "spoilt.csv", spoilt, trials.Spoilt, trials.Score)
    layers = {trials.Layer(300, m, "encoder", i): trials.Value(0.5) for m in ("hfc_lfc", "cosine") for i in range(12)}
    (tmp_path / TRIAL.name).mkdir()
    write_table(tmp_path / TRIAL.name / "layers.csv", layers, trials.Layer, trials.Value)
    oversmoothing_report.write_report(tmp_path, tmp_path / "report")
    assert "left as they are" not in capsys.readouterr().out
    text = (tmp_path / "report" / "RESULTS.md").read_text()
    assert "| sharpen | 91.5 (0.50) |" in text
    assert "| sharpen | 40.2 (0.50) | 91.5 (0.50) |" in text
    assert "| stock | diverged |" in text
    assert "- numbers: stock, smooth, sharpen" in text
    for name in ("by_layer.png", "over_training.png", "spoilt.png"):
        assert (tmp_path / "report" / name).stat().st_size > 10_000
    assert "| | pixels |" not in text, "one level of four was run"
    with pytest.raises(InputError, match="no rows yet"):
        oversmoothing_report.write_report(tmp_path / "nothing", tmp_path)


def test_seeds_of_a_cell_are_a_mean_and_a_deviation(tmp_path, capsys):
    results, spoilt = {}, {}
    for seed, score in ((1, 90.0), (2, 94.0)):
        trial = dataclasses.replace(TRIAL, seed=seed)
        results[trial] = dataclasses.replace(RESULT, score=score)
        for place, level in enumerate(trials.TASKS["images"].corruptions["pixels"]):
            row = trials.Spoilt(**vars(trial), corruption="pixels", level=level)
            spoilt[row] = trials.Score(score - 10 * place)
    results[dataclasses.replace(TRIAL, control="stock")] = dataclasses.replace(RESULT, score=math.nan)
    text = oversmoothing_report.report(results, spoilt)
    assert "3 runs, seed 1, 2" in text
    assert "| sharpen | 92.0 ± 2.8 (0.50) |" in text
    assert "| | pixels |\n|---|---|\n| sharpen | 77.0 ± 2.8 |\n" in text  # 15 below the clean score
    results[dataclasses.replace(TRIAL, seed=3)] = dataclasses.replace(RESULT, score=math.nan)
    assert "| sharpen | 1 of 3 diverged |" in oversmoothing_report.report(results, spoilt)
    write_table(tmp_path / "study.csv", results, trials.Trial, trials.Result)
    oversmoothing_report.write_report(tmp_path, tmp_path)
    assert "by_layer.png, over_training.png: left as they are" in capsys.readouterr().out
    assert not (tmp_path / "by_layer.png").exists()
