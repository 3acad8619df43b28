"""examples/stability: the order of the grid, when a run is decided, what survives an interruption, and that a row of
the table is what fairseq-train would have computed."""

import dataclasses
import math
import random
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speech_mt.errors import InputError
from speech_mt.plotting.runs import load_run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "stability"))

import grid  # noqa: E402
import outcome  # noqa: E402
import stability_report  # noqa: E402
import study  # noqa: E402

TRIAL = grid.Trial("post-LN + sigmaReparam", 18, 2e-3, 100, 1, 300)
RESULT = grid.Result(
    "solved", 290, 1.375, 1.5, 87.5, 0.5, -0.125, 0.25, 12.5, 80.0, "abc1234", "a machine", "fairseq-train x"
)


def whole_grid():
    return list(grid.grid(list(grid.METHODS), grid.DEPTHS, grid.LEARNING_RATES, grid.WARMUPS, 1, 300))


def test_the_grid_has_every_cell_once_and_the_first_table_first():
    trials = whole_grid()
    assert len(trials) == len(set(trials)) == len(grid.METHODS) * 4 * 3 * 2
    assert {(t.depth, t.warmup) for t in trials[: len(grid.METHODS) * 6]} == {(18, 100), (6, 100)}
    assert {(t.lr, t.depth) for t in trials[: len(grid.METHODS)]} == {(2e-3, 18)}
    assert len({t.name for t in trials}) == len(trials)


def test_a_depth_that_is_not_in_the_usual_grid_is_run():
    assert [t.depth for t in grid.grid(["post-LN"], [2], [1e-3], [0], 1, 10)] == [2]


def test_only_what_learns_at_50_layers_is_tried_at_100():
    deep, deepest = (dataclasses.replace(TRIAL, depth=depth) for depth in (50, 100))
    assert grid.is_wanted(deep, {})
    assert not grid.is_wanted(deepest, {})
    for name in outcome.OUTCOMES:
        results = {deep: dataclasses.replace(RESULT, outcome=name)}
        assert grid.is_wanted(deepest, results) == (name in ("solved", "learning"))


def test_the_command_has_the_options_of_method_and_schedule():
    command = shlex.join(TRIAL.command("data", "out"))
    assert "--encoder-layers 18 --decoder-layers 18" in command
    assert "--norm-placement post --reparam sigma" in command
    assert "--lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 100" in command
    constant = shlex.join(dataclasses.replace(TRIAL, warmup=0).command("data", "out"))
    assert "--lr 0.002 --lr-scheduler fixed --max-tokens" in constant


def test_the_table_reads_back_as_it_was_written(tmp_path):
    nothing = dataclasses.replace(RESULT, outcome="diverged", valid_loss=math.nan)
    results = {TRIAL: RESULT, dataclasses.replace(TRIAL, method="no LN + sigmaReparam"): nothing}
    grid.write_results(tmp_path / "study.csv", results)
    back = grid.read_results(tmp_path / "study.csv")
    assert list(back) == list(results)
    assert back[TRIAL] == RESULT
    assert math.isnan(list(back.values())[1].valid_loss)


def test_a_table_of_something_else_is_named_with_its_line(tmp_path):
    (tmp_path / "study.csv").write_text("method,depth\npost-LN,six\n")
    with pytest.raises(InputError, match=r"study\.csv, line 2"):
        grid.read_results(tmp_path / "study.csv")


def test_an_unknown_method_is_refused():
    with pytest.raises(InputError, match="post-ln"):
        grid.known(["post-LN", "post-ln"])


def test_of_one_cell_the_longest_run_is_reported():
    longer = dataclasses.replace(TRIAL, max_updates=600)
    assert list(grid.longest({longer: RESULT, TRIAL: RESULT})) == [longer]


# -- outcomes ---------------------------------------------------------------------------------------------------


def test_diverged_is_not_finite_or_a_bit_above_the_start():
    assert outcome.decided([8.0, math.nan], 0.0) == "diverged"
    assert outcome.decided([8.0, 9.1], 0.0) == "diverged"
    assert outcome.decided([8.0, 8.9], 0.0) is None


def test_solved_needs_two_intervals_below_the_threshold():
    assert outcome.decided([8.0, 1.5, 1.3], 0.0) is None
    assert outcome.decided([8.0, 1.3, 1.3], 0.0) == "solved"


def test_a_plateau_stops_a_run_only_with_all_tokens_alike_and_not_before_update_200():
    plateau = [8.0] + [4.9] * 19
    assert outcome.decided(plateau, 0.96) == "stalled"
    assert outcome.decided(plateau, 0.94) is None
    assert outcome.decided(plateau[:-1], 0.96) is None
    assert outcome.final(plateau) == "stalled"


def test_progress_of_a_tenth_of_a_bit_in_100_updates_is_learning():
    slow = [5.0 - 0.02 * i for i in range(30)]  # 0.2 bits in 10 intervals
    assert outcome.decided(slow, 0.99) is None
    assert outcome.final(slow) == "learning"
    assert outcome.final([5.0 - 0.005 * i for i in range(30)]) == "stalled"


def test_a_run_that_lost_what_it_had_learnt_has_diverged_at_the_end():
    assert outcome.final([8.0, 3.0, 4.1]) == "diverged"
    assert outcome.final([8.0, 3.0, 3.9]) == "learning"


# -- the driver -------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """drive(trials, results, minutes): the driver with threads for processes; post-LN fails; -> number of failures."""
    trained = []

    def train(trial, data, out, told):
        trained.append(trial)
        if trial.method == "post-LN":
            raise RuntimeError("boom")
        return RESULT

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "processes", ThreadPoolExecutor)

    def drive(trials, results, minutes=1.0):
        return study.run_trials(trials, results, tmp_path / "study.csv", "data", 2, minutes)

    drive.trained = trained
    return drive


def test_a_failed_run_costs_no_other_its_row(driver, tmp_path, capsys):
    trials = [dataclasses.replace(TRIAL, method=method) for method in ("post-LN", "pre-LN", "Admin")]
    assert driver(trials, {}) == 1
    assert {trial.method for trial in grid.read_results(tmp_path / "study.csv")} == {"pre-LN", "Admin"}
    assert "boom" in capsys.readouterr().err


def test_no_run_starts_after_the_budget(driver, tmp_path):
    assert driver([TRIAL], {}, minutes=0) == 0
    assert driver.trained == []
    assert not (tmp_path / "study.csv").exists()


def test_a_second_study_in_the_same_folder_is_refused(tmp_path):
    with study.alone_in(tmp_path), pytest.raises(InputError, match="another study"), study.alone_in(tmp_path):
        pass
    with study.alone_in(tmp_path):  # free again
        pass


def test_the_report_shows_every_row_and_counts_what_was_not_run(tmp_path):
    failed = dataclasses.replace(RESULT, outcome="diverged", updates=37, loss=math.nan, bleu=math.nan)
    alike = dataclasses.replace(RESULT, outcome="stalled", loss=4.9, cosine_encoder=1.0, cosine_decoder=1.0)
    results = {
        TRIAL: RESULT,
        dataclasses.replace(TRIAL, lr=8e-3): failed,
        dataclasses.replace(TRIAL, method="post-LN"): alike,
    }
    grid.write_results(tmp_path / "study.csv", results)
    stability_report.write_report(tmp_path / "study.csv", tmp_path / "report")
    text = (tmp_path / "report" / "RESULTS.md").read_text()
    assert "| post-LN + sigmaReparam | **solved 290, 1.38, BLEU 88** | diverged 37 |" in text
    assert "| post-LN | stalled 290, 4.90, BLEU 88 | not run |" in text
    assert "| post-LN | 1 | 1 | 1 | 0 | 0 | 0 | 12.5 |" in text  # runs, failed, of which with tokens alike
    assert "- 18L-18L, warm-up 100: 30 of 33\n" in text
    assert "nan" not in text
    assert (tmp_path / "report" / "heat_map.png").stat().st_size > 10_000
    assert (tmp_path / "report" / "study.csv").read_text() == (tmp_path / "study.csv").read_text()


def test_a_report_of_nothing_says_what_to_run(tmp_path):
    with pytest.raises(InputError, match=r"no rows yet; run python examples/stability/study\.py"):
        stability_report.write_report(tmp_path / "study.csv", tmp_path)


# -- one run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Binarised reversed sentences, de to en, one dictionary."""
    from fairseq.data import Dictionary, indexed_dataset

    folder, draw, dictionary = tmp_path_factory.mktemp("bin"), random.Random(1), Dictionary()
    for i in range(20):
        dictionary.add_symbol(f"▁w{i}")
    for language in ("de", "en"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    for split, count in (("train", 300), ("valid", 20), ("test", 20)):
        sentences = [[f"▁w{draw.randrange(20)}" for _ in range(draw.randint(2, 9))] for _ in range(count)]
        for language, step in (("de", 1), ("en", -1)):
            path = str(folder / f"{split}.de-en.{language}")
            builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", len(dictionary))
            for sentence in sentences:
                builder.add_item(dictionary.encode_line(" ".join(sentence[::step]), add_if_not_exist=False).long())
            builder.finalize(f"{path}.idx")
    return str(folder)


def run_one(trial, corpus, folder):
    from fairseq_run import train_and_measure

    return train_and_measure(trial, corpus, str(folder), "abc1234", "a machine")


def test_a_row_is_a_fairseq_train_run_to_the_last_bit(corpus, tmp_path, monkeypatch):
    """Over several epochs, with warm-up, for everything that both log; measuring on the way changes nothing."""
    from fairseq_cli.train import cli_main

    monkeypatch.chdir(ROOT)
    trial = grid.Trial("post-LN + sigmaReparam", 2, 2e-3, 5, 1, 30)
    result = run_one(trial, corpus, tmp_path / "ours")
    monkeypatch.setattr(sys, "argv", trial.command(corpus, str(tmp_path / "theirs")))
    cli_main()
    ours, theirs = load_run(tmp_path / "ours"), load_run(tmp_path / "theirs")
    tags = ours.splits["train_inner"].keys() - {"max_logit"}
    assert {"loss", "gnorm", "lr", "cosine/decoder/01", "entropy_normalised/cross/01"} <= tags
    for tag in tags:
        assert ours.scalar(tag).steps.tolist() == theirs.scalar(tag).steps.tolist() == [10, 20, 30]
        assert ours.scalar(tag).values.tolist() == theirs.scalar(tag).values.tolist(), tag
    assert (result.outcome, result.updates) == ("learning", 30)
    assert result.loss == pytest.approx(ours.scalar("loss").values[-1])
    assert result.cosine_decoder == pytest.approx(ours.scalar("cosine/decoder/01").values[-1])
    assert 0 < result.valid_loss < ours.scalar("loss").values[0]
    assert 0 <= result.bleu <= 100
    assert result.max_logit >= ours.scalar("max_logit").values.max() - 1e-5


def test_a_run_that_explodes_is_a_row(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = run_one(grid.Trial("no LN + sigmaReparam", 2, 1e20, 0, 1, 30), corpus, tmp_path / "run")
    assert result.outcome == "diverged"
    assert result.updates < 10
    assert math.isnan(result.loss)
    assert math.isnan(result.bleu)
    assert math.isfinite(result.max_logit)
    assert not (tmp_path / "run" / "crash.pt").exists()
