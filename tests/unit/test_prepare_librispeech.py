"""The recipe's preparation: killed anywhere, it goes on and gives the same bytes; what changed is made again."""

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speech_mt.data import feature_cache
from speech_mt.data.feature_cache import cached_log_mel
from speech_mt.data.manifest import read_manifest
from speech_mt.data.vocabulary import read_dictionary
from speech_mt.errors import InputError

RECIPE = Path(__file__).parents[2] / "examples" / "librispeech"
KEPT = ("150.json", "151.json", "152.json", "160.json", "dict.txt", "spm.model")
WORDS = {"train-clean-100": ["IT WAS", "A SMALL HOUSE", "BY THE SEA"], "dev-clean": ["THE ZEBRA"]}


def script(name):
    """A script of the recipe as a module; its worker processes are forked, so they find it too."""
    spec = importlib.util.spec_from_file_location(f"librispeech_{name}", RECIPE / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A corpus without a fault."""
    root = tmp_path_factory.mktemp("corpus") / "LibriSpeech"
    generator = np.random.default_rng(0)
    for subset, texts in WORDS.items():
        for speaker, text in enumerate(texts, start=10 * len(subset)):
            chapter = root / subset / str(speaker) / "5"
            chapter.mkdir(parents=True)
            ids = [f"{speaker}-5-{k:04d}" for k in range(2)]
            (chapter / f"{speaker}-5.trans.txt").write_text("".join(f"{i} {text}\n" for i in ids))
            for identifier in ids:
                soundfile.write(chapter / f"{identifier}.flac", generator.uniform(-0.5, 0.5, 4000), 16000)
    return root


@pytest.fixture
def corpus(sound, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sound, tmp_path / "LibriSpeech")


def prepare(root, out, *options):
    """Run the script, with shards of two utterances."""
    module = script("prepare")
    arguments = ["prepare.py", "--root", root, "--subsets", *WORDS, "--out", out, "--workers", "2", *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_cache, "_UTTERANCES_PER_SHARD", 2)
        patch.setattr(sys, "argv", [str(argument) for argument in arguments])
        module.main()


def contents(out):
    """Every file that is a result."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not path.name.endswith(".tmp")
    }


def test_what_is_prepared(sound, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(sound, out)
    train, held_out = read_manifest(out / "train.tsv"), read_manifest(out / "dev-clean.tsv")
    assert train.column("id") == [f"{speaker}-5-{k:04d}" for speaker in (150, 151, 152) for k in range(2)]
    assert train.column("text") == [text for text in WORDS["train-clean-100"] for _ in range(2)]
    assert train.column("speaker") == ["150", "150", "151", "151", "152", "152"]
    assert set(train.column("duration")) == {"0.25"}
    assert all(held_out.audio_path(row).is_file() for row in range(2))
    # the vocabulary knows nothing of dev-clean: Z and R are only there
    assert set(read_dictionary(out / "dict.txt")) == {"<s>", "<pad>", "</s>", "<unk>", "|"} | set("ABEHILMOSTUWY")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["train"] == {
        "utterances": 6,
        "hours": round(1.5 / 3600, 4),
        "speakers": 3,
        "shortest": 0.25,
        "longest": 0.25,
        "dropped": 0,
        "faults": {},
    }
    before = contents(out)
    capsys.readouterr()
    prepare(sound, out)
    assert capsys.readouterr().out.count("done already") == 3
    assert contents(out) == before


@pytest.fixture(scope="module")
def uninterrupted(sound, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    prepare(sound, out, "--features")
    return contents(out)


def killed(root, out, name):
    """Run the preparation; the process that first is about to put the file ``name`` in place is killed."""
    replace = os.replace

    def kill(source, target):
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def run():
        os.replace = kill  # in this process and those that it starts
        prepare(root, out, "--features")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode != 0


@pytest.mark.parametrize(
    "name",
    [
        "151.json",
        "train.tsv",
        "summary.json",
        ".manifest-train.completed",
        "dict.txt",
        "shard-00001.npy",
        ".features-train.completed",
    ],
)
def test_a_killed_preparation_goes_on_to_the_same_bytes(sound, uninterrupted, tmp_path, name):
    killed(sound, tmp_path, name)
    done = {name: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if (name := path.name) in KEPT}
    prepare(sound, tmp_path, "--features")
    assert contents(tmp_path) == uninterrupted
    after = {name: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if (name := path.name) in done}
    assert after == done  # it was not made again


def test_a_damaged_part_is_made_again_and_a_damaged_summary_named(sound, tmp_path):
    out = tmp_path / "out"
    prepare(sound, out)
    before = contents(out)
    for part, text in zip(sorted((out / "parts").rglob("*.json")), ("", '{"fing', "[1]"), strict=False):
        part.write_text(text)
    prepare(sound, out)
    assert contents(out) == before
    (out / "summary.json").write_text("{")
    with pytest.raises(InputError, match=rf"summary\.json is damaged: delete {out}, and prepare again"):
        prepare(sound, out)


def test_cached_features_are_those_of_the_audio(sound, tmp_path):
    out = tmp_path / "out"
    prepare(sound, out, "--features", "--dtype", "float32", "--num-mel-bins", "40")
    manifest = read_manifest(out / "train.tsv")
    assert manifest.numbers("frames").tolist() == [23] * 6
    assert cached_log_mel(manifest, 3, 40, 16000).shape == (23, 40)


def test_bad_utterances_are_left_out_and_a_mended_one_comes_back(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    bad = corpus / "train-clean-100" / "151" / "5" / "151-5-0001.flac"
    good = bad.read_bytes()
    bad.write_bytes(good[:1000])
    prepare(corpus, out)
    assert len(read_manifest(out / "train.tsv")) == 5
    assert "train: left out for 1 cannot be decoded" in capsys.readouterr().out
    (fault,) = map(json.loads, (out / "train.dropped.jsonl").read_text().splitlines())
    assert (fault["kind"], fault["subject"]) == ("cannot be decoded", "151-5-0001")
    untouched = (out / "parts" / "train-clean-100" / "150.json").stat().st_mtime_ns
    bad.write_bytes(good)
    prepare(corpus, out)
    assert "manifest-train: what it was made from has changed, so it is made again" in capsys.readouterr().out
    assert len(read_manifest(out / "train.tsv")) == 6
    assert (out / "parts" / "train-clean-100" / "150.json").stat().st_mtime_ns == untouched


def test_a_chapter_in_two_subsets_is_used_once(corpus, tmp_path, capsys):
    (corpus / "dev-clean" / "150").mkdir()
    (corpus / "train-clean-100" / "150" / "5").rename(corpus / "dev-clean" / "150" / "5")
    (corpus / "train-clean-100" / "150" / "5").symlink_to(corpus / "dev-clean" / "150" / "5")
    prepare(corpus, tmp_path / "out")
    assert len(read_manifest(tmp_path / "out" / "train.tsv")) == 6
    assert len(read_manifest(tmp_path / "out" / "dev-clean.tsv")) == 2
    assert "dev-clean: left out for 2 duplicate id" in capsys.readouterr().out


def test_nothing_is_left(corpus, tmp_path):
    for path in (corpus / "dev-clean").rglob("*.flac"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"dev-clean: no utterance without a fault; see .*dev-clean\.dropped\.jsonl"):
        prepare(corpus, tmp_path / "out")


def test_other_settings_are_refused(sound, tmp_path):
    prepare(sound, tmp_path / "out")
    with pytest.raises(InputError, match="vocab_type was char, is now sentencepiece"):
        prepare(sound, tmp_path / "out", "--vocab-type", "sentencepiece", "--vocab-size", "20")


def test_sentencepiece_pieces_are_learned_from_train(sound, tmp_path):
    prepare(sound, tmp_path / "out", "--vocab-type", "sentencepiece", "--vocab-size", "20", "--model-type", "bpe")
    symbols = read_dictionary(tmp_path / "out" / "dict.txt")
    assert len(symbols) == 20 + 1  # <pad> is fairseq's alone
    assert "Z" not in symbols


def run_sh(*options):
    """The recipe's shell script, where ``python`` is this one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(RECIPE.parents[1]), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(RECIPE / "run.sh"), *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_recipe_stops_at_faults_before_it_trains(corpus, tmp_path):
    (corpus / "dev-clean" / "90" / "5" / "90-5-0001.flac").unlink()
    options = ["--root", corpus, "--subsets", " ".join(WORDS), "--data", tmp_path / "data", "--out", tmp_path / "model"]
    options += ["--subsampling", "1"]  # the words are long for a quarter of a second
    done = run_sh(*options)
    assert done.returncode == 1
    assert "90-5-0001.flac: no such audio file" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: 2 utterances or files have a fault, --max-bad allows 0")
    assert "utterance '90-5-0000': holds 'R', 'Z', which the vocabulary lacks" in done.stdout
    assert "== train" not in done.stdout
    assert (tmp_path / "data" / "dict.txt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "trian"], "there is no stage trian"),
        (["--updates", "-5"], "-5 is not a whole number"),
        (["--config", "none"], "there is no examples/librispeech/config/none.yaml"),
        (["--rooot", "x"], "--rooot is no option"),
        (["--root"], "--root needs a value"),
    ],
)
def test_wrong_options_of_the_recipe(options, message):
    done = run_sh(*options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"error: {message}"


def test_the_real_corpus(monkeypatch, tmp_path):
    if "SPEECH_MT_DATA" not in os.environ:
        pytest.skip("SPEECH_MT_DATA is not set: it names the folder with LibriSpeech")
    root = Path(os.environ["SPEECH_MT_DATA"]) / "LibriSpeech"
    arguments = ["prepare.py", "--root", root, "--subsets", "train-clean-100", "dev-clean", "test-clean", "test-other"]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments), "--out", str(tmp_path / "out")])
    script("prepare").main()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    counts = {split: (entry["utterances"], entry["speakers"], entry["dropped"]) for split, entry in summary.items()}
    assert counts == {"train": (87, 87, 0), "dev-clean": (5, 2, 0), "test-clean": (1, 1, 0), "test-other": (100, 10, 0)}
    assert summary["train"]["hours"] == pytest.approx(12.25 / 60, abs=1e-3)
    assert summary["test-other"]["hours"] == pytest.approx(12.78 / 60, abs=1e-3)
    texts = read_manifest(tmp_path / "out" / "test-other.tsv").column("text")
    assert sum(len(text.split()) for text in texts) == 1892
    validate = script("validate")
    monkeypatch.setattr(sys, "argv", ["validate.py", str(tmp_path / "out"), "--ctc-subsampling", "4"])
    validate.main()  # would raise
