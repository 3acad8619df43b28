"""examples/digits and examples/robustness: splits, grids, rows from logs, and reports of what was measured alone."""

import csv
import dataclasses
import importlib.util
import math
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speech_mt.data.manifest import read_manifest
from speech_mt.errors import InputError
from speech_mt.experiments.table import read_table, write_table

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples" / "digits"), str(ROOT / "examples" / "robustness")]

import digits  # noqa: E402
import robustness  # noqa: E402
import robustness_report  # noqa: E402

spec = importlib.util.spec_from_file_location("prepare_digits", ROOT / "examples" / "digits" / "prepare.py")
prepare = importlib.util.module_from_spec(spec)  # under a name of its own: each example has a prepare.py
spec.loader.exec_module(prepare)

# -- preparation ------------------------------------------------------------------------------------------------------


def ids(folder, split):
    return set(read_manifest(folder / f"{split}.tsv").column("id"))


def test_takes_decide_the_split(tmp_path):
    source = tmp_path / "fsdd"
    (source / "recordings").mkdir(parents=True)
    rows = []
    for take in (0, 4, 5, 9, 10, 49):
        samples = np.random.default_rng(take).uniform(-0.1, 0.1, 2000)
        soundfile.write(source / "recordings" / f"3_ann_{take}.flac", samples, 8000)
        rows.append({"id": f"3_ann_{take}", "speaker": "ann", "text": "three", "split": "-", "n_samples": 2000})
    with (source / "manifest.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    out = tmp_path / "out"
    assert prepare.write_manifests("fsdd", source, out) == "4 train, 2 test, 2 tuning, 2 valid"
    assert ids(out, "test") == {"3_ann_0", "3_ann_4"}
    assert ids(out, "valid") == {"3_ann_5", "3_ann_9"}
    assert ids(out, "train") == ids(out, "tuning") | ids(out, "valid")
    assert read_manifest(out / "train.tsv").duration.tolist() == [0.25] * 4
    assert "|" in {line.split()[0] for line in (out / "dict.txt").read_text().splitlines()}
    prepare.cache_features("fsdd", out)
    assert read_manifest(out / "test.tsv").numbers("frames").tolist() == [23, 23]  # 4,000 samples at 16 kHz


COLUMNS = "id\tspeaker\ttext\tsplit\tn_samples\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r": no column id, n_samples, split, text: it is not the table of fsdd"),
        (COLUMNS, r": of its 0 utterances none is for train"),
        (f"{COLUMNS}3_ann_x\tann\tthree\t-\t9\n", r" line 2: the id '3_ann_x' is not digit_speaker_take"),
        (f"{COLUMNS}3_ann_7\tann\tthree\t-\n", r" line 2: n_samples is '', not a whole number"),
    ],
)
def test_faults_of_the_table_are_named_by_line(tmp_path, text, message):
    (tmp_path / "manifest.tsv").write_text(text)
    with pytest.raises(InputError, match=rf"manifest\.tsv{message}"):
        prepare.write_manifests("fsdd", tmp_path, tmp_path / "out")


def test_without_data_the_message_says_where_it_is_looked_for(tmp_path):
    with pytest.raises(InputError, match="SPEECH_MT_DATA or --data"):
        prepare.write_manifests("an4", tmp_path / "an4", tmp_path / "out")


@pytest.mark.skipif("SPEECH_MT_DATA" not in os.environ, reason="SPEECH_MT_DATA is not set: no real speech to prepare")
def test_the_official_splits_of_the_real_data(tmp_path):
    data = Path(os.environ["SPEECH_MT_DATA"])
    counts = prepare.write_manifests("fsdd", data / "fsdd", tmp_path / "fsdd")
    assert counts == "2700 train, 300 test, 2400 tuning, 300 valid"
    assert not ids(tmp_path / "fsdd", "train") & ids(tmp_path / "fsdd", "test")
    assert prepare.write_manifests("an4", data / "an4", tmp_path / "an4") == "60 train, 10 test"


# -- digits -----------------------------------------------------------------------------------------------------------

LOG = """$ fairseq-train
x | INFO | train_inner | {"epoch": 1, "loss": "2.5", "entropy_normalised/encoder/00": "0.9", "wall": "30"}
x | INFO | train_inner | {"epoch": 2, "loss": "0.25", "entropy_normalised/encoder/00": "0.75",
"""
LOG = LOG.rstrip("\n") + ' "entropy_normalised/encoder/01": "0.5", "max_logit/encoder/00": "7.5", "wall": "60"}\n'
VALID = 'x | INFO | valid | {"epoch": 2, "valid_loss": "0.3", "valid_wer": "7.5"}\n'
DIGITS = digits.Result(1.0, 3, 300, 0.1, 0.5, 6.0, "abc1234", "a machine", "fairseq-train x")


def test_seeds_of_all_methods_come_before_more_seeds_of_one():
    trials = list(digits.grid(["fsdd"], list(digits.METHODS), 2, None))
    assert [(t.method, t.seed) for t in trials] == [(m, s) for s in (1, 2) for m in digits.METHODS]
    assert {t.updates for t in trials} == {digits.CORPORA["fsdd"].updates}
    assert len({t.name for t in trials}) == 4


def test_a_training_sees_no_test_clip_and_chooses_no_checkpoint():
    command = shlex.join(digits.Trial("fsdd", "post-LN + sigmaReparam", 2, 100).train("data", "out"))
    assert "--reparam sigma" in command
    assert "--disable-validation" in command
    assert "--seed 2" in command
    assert "test" not in command


def test_the_last_statistics_of_a_log():
    assert digits.last_statistics(LOG)["loss"] == 0.25


def test_the_report_is_of_the_rows_there_are(tmp_path):
    with pytest.raises(InputError, match="no rows yet"):
        digits.write_report(tmp_path / "digits.csv", tmp_path)
    rows = {
        digits.Trial("fsdd", "post-LN", 1, 500): DIGITS,
        digits.Trial("fsdd", "post-LN", 2, 500): dataclasses.replace(DIGITS, wer=2.0, errors=6),
    }
    write_table(tmp_path / "digits.csv", rows, digits.Trial, digits.Result)
    (tmp_path / "report").mkdir()
    digits.write_report(tmp_path / "digits.csv", tmp_path / "report")
    text = (tmp_path / "report" / "RESULTS.md").read_text()
    assert "| post-LN | 500 | 2 | 1.50 | 1.00 to 2.00 | 3, 6 of 300 | 6.0 | 0.500 |" in text
    assert "sigmaReparam |" not in text
    assert "AN4" not in text


# -- robustness -------------------------------------------------------------------------------------------------------

TRIAL = robustness.Trial("post-LN", "Adam", 2e-3, 150, 1, 100)


def test_the_grid_has_every_cell_once_and_a_rate_of_all_before_more_rates():
    trials = list(robustness.grid(list(robustness.METHODS), list(robustness.OPTIMIZERS), robustness.WARMUPS, 1, 100))
    assert len(trials) == len(set(trials)) == len({t.name for t in trials}) == 3 * 4 * 4 * 2
    assert {(t.optimizer, t.lr) for t in trials[:24]} == {(o, r[0]) for o, r in robustness.LEARNING_RATES.items()}


def test_the_command_has_the_options_of_method_optimizer_and_warm_up():
    command = shlex.join(dataclasses.replace(TRIAL, optimizer="LARS", lr=2.0, warmup=0).command("data", "out"))
    assert "--optimizer lars --momentum 0.9 --trust-coefficient 0.001 --lr 2 " in command
    assert "--warmup-updates 0 --total-num-update 100" in command
    assert "--norm-placement post --dropout" in command
    assert "--train-subset tuning --valid-subset valid" in command


@pytest.mark.parametrize(
    ("log", "trained", "expected", "wer"),
    [
        (LOG + VALID, True, "solved", 7.5),
        (LOG + VALID.replace("7.5", "42"), True, "learning", 42.0),
        (LOG + VALID.replace("7.5", "90"), True, "stalled", 90.0),
        ((LOG + VALID).replace('"0.25"', '"nan"'), True, "diverged", 7.5),
        (LOG, False, "diverged", math.nan),
        ("", False, "diverged", math.nan),
    ],
)
def test_a_row_from_a_log(log, trained, expected, wer):
    result = robustness.result_of(log, trained, ("abc", "a machine"), "fairseq-train x")
    assert result.outcome == expected
    assert result.wer == pytest.approx(wer, nan_ok=True)
    if trained:
        assert (result.entropy, result.max_logit, result.minutes) == (0.5, 7.5, 1.0)


def test_the_robustness_report_counts_the_rates_that_train(tmp_path):
    learned = robustness.result_of(LOG + VALID, True, ("abc", "a machine"), "x")
    failed = robustness.result_of(LOG, False, ("abc", "a machine"), "x")
    rows = {
        TRIAL: learned,
        dataclasses.replace(TRIAL, lr=8e-3): failed,
        dataclasses.replace(TRIAL, method="pre-LN", warmup=0): learned,
    }
    write_table(tmp_path / "robustness.csv", rows, robustness.Trial, robustness.Result)
    back = read_table(tmp_path / "robustness.csv", robustness.Trial, robustness.Result)
    assert list(back) == list(rows)
    robustness_report.write_report(tmp_path / "robustness.csv", tmp_path / "report")
    text = (tmp_path / "report" / "RESULTS.md").read_text()
    assert "| post-LN, warm-up 150 | **7.5** | diverged |" in text
    assert "| post-LN, warm-up 150 | 1 of 2 |" in text
    assert "| pre-LN, no warm-up | 1 of 1 |" in text
    assert (tmp_path / "report" / "heat_map.png").stat().st_size > 1000
