"""The recipes: what they would run is what their configs say, and mistakes are named before anything starts."""

import gzip
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from speech_mt.errors import InputError

ROOT = Path(__file__).parents[2]
WMT, MULTI30K = ROOT / "examples" / "wmt_en_de", ROOT / "examples" / "multi30k"
LIBRISPEECH = ROOT / "examples" / "librispeech"
METHODS = sorted(path.stem for path in (WMT / "config" / "method").glob("*.yaml"))


def load(example, name):
    """A script of an example as a module; the name is its own, as other examples have scripts of that name."""
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", ROOT / "examples" / example / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare, results, demo = load("multi30k", "prepare"), load("multi30k", "results"), load("numbers", "demo")


def shell(script, *options):
    return subprocess.run(["bash", str(script), *options], capture_output=True, text=True, check=False)


def printed_options(*arguments):
    """The fairseq-train line of run.sh --print, as option -> value."""
    done = shell(WMT / "run.sh", *arguments, "--print")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    options = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            options[word[2:].replace("-", "_")] = True if following.startswith("--") else following
    return options


@pytest.mark.parametrize("depth", [6, 18, 50, 100])
@pytest.mark.parametrize("method", METHODS)
def test_the_configs_are_the_command_line(depth, method):
    """Every value of the YAML files, but folders, is on the printed line, and no other."""
    parts = ("base", f"depth/{depth}l", f"method/{method}")
    config = OmegaConf.to_container(OmegaConf.merge(*(OmegaConf.load(WMT / "config" / f"{p}.yaml") for p in parts)))
    config.pop("defaults")
    flat = {key: value for group in config.values() for key, value in group.items()}
    names = {group: config[group].pop("_name") for group in ("task", "model", "criterion", "optimizer", "lr_scheduler")}
    options = printed_options(str(depth), method)
    assert options.pop("arch") == f"spectral_transformer_{depth}l"  # the widths and the depth
    assert names == {
        "task": options.pop("task"),
        "model": "spectral_transformer",
        "criterion": options.pop("criterion"),
        "optimizer": options.pop("optimizer"),
        "lr_scheduler": options.pop("lr_scheduler"),
    }
    for folder in ("user_dir", "save_dir", "tensorboard_logdir"):
        options.pop(folder), flat.pop(folder)
    for key in ("_name", "data", "source_lang", "target_lang", "encoder_layers", "decoder_layers", "encoder_embed_dim"):
        flat.pop(key)
    for key in ("encoder_ffn_embed_dim", "encoder_attention_heads"):
        flat.pop(key)
    defaults = {"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0, "weight_decay": 0.0}
    defaults |= {"norm_placement": "post", "reparam": "none", "reparam_gamma_init": "one"}
    defaults |= {"checkpoint_activations": False}
    for key in flat.keys() | options.keys():
        there, here = flat.get(key, defaults.get(key)), options.get(key, defaults.get(key))
        there = there[0] if isinstance(there, list) else there
        same = there == here or float(there) == float(here)
        assert same, (key, there, here)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("depth", "total"), [(6, 32_768), (100, 524_288)])
def test_fewer_gpus_accumulate_more(gpus, depth, total):
    tokens = "1024" if gpus == 32 else "4096"
    if gpus == 16 and depth == 6:
        tokens = "2048"
    options = printed_options(str(depth), "deepnorm", "--gpus", str(gpus), "--tokens", tokens)
    assert gpus * int(tokens) * int(options["update_freq"]) == total
    assert options["distributed_world_size"] == str(gpus)


def test_further_options_reach_fairseq_and_the_batch_carries_its_rate():
    assert printed_options("18", "post_ln", "--precision", "fp16")["fp16"] is True
    assert printed_options("18", "post_ln", "--batch", "huge")["lr"] == "1.5e-3"
    done = shell(WMT / "run.sh", "18", "post_ln", "--print", "--", "--seed", "7")
    assert done.stdout.rstrip().endswith("--seed 7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("6", "post_ln", "--gpus", "3"), "32768 tokens an update are no multiple of 4096 on each of 3 GPUs"),
        (("6", "post_ln", "--gpus", "0"), "--gpus 0 is not a whole number of at least 1"),
        (("6", "post_ln", "--gpus", "x"), "--gpus x is not a whole number"),
        (("6", "post_ln", "--tokens", "-4096"), "--tokens -4096 is not a whole number"),
        (("6", "post_ln", "--updates", "x", "--print"), "--updates x is not a whole number"),
        (("6", "bogus", "--print"), "method 'bogus' is none of post_ln"),
        (("7", "post_ln"), "usage: run.sh DEPTH METHOD"),
        (("6", "post_ln", "--gpu", "3"), "usage: run.sh DEPTH METHOD"),
    ],
)
def test_mistakes_are_named(arguments, message):
    done = shell(WMT / "run.sh", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stdout == ""


def test_multi30k_names_an_unknown_method_and_option():
    assert "method 'bogus' is none of" in shell(MULTI30K / "run.sh", "--methods", "bogus").stderr
    assert shell(MULTI30K / "run.sh", "--layer", "3").stderr.startswith("options: --out")


@pytest.mark.parametrize("jobs", ["0", "x", "08"])
def test_multi30k_takes_whole_numbers(jobs):
    done = shell(MULTI30K / "run.sh", "--jobs", jobs)
    assert (done.returncode, done.stderr) == (2, f"error: --jobs {jobs} is not a whole number of at least 1\n")


MODEL = "en-de-3l-256-lr1e-3-2400-seed1/post_ln"
OPTIONS = (
    "--source en --target de --layers 3 --width 256 --ffn 512 --heads 4 "
    "--updates 2400 --lr 1e-3 --warmup 400 --dropout 0.2 --max-tokens 2400 --seed 1\n"
)


@pytest.mark.parametrize("stage", ["all", "train", "decode", "report"])
def test_multi30k_takes_no_model_of_other_options_for_its_own(tmp_path, stage):
    (tmp_path / MODEL).mkdir(parents=True)
    (tmp_path / MODEL / "options").write_text(OPTIONS)
    done = shell(MULTI30K / "run.sh", "--out", tmp_path, "--methods", "post_ln", "--stage", stage, "--dropout", "0.3")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / MODEL} is of other options ({OPTIONS[:-1]}): give those or ")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["options"]


def test_multi30k_decodes_again_what_is_older_than_the_last_checkpoint(tmp_path):
    folder = tmp_path / MODEL
    made = ["checkpoints/checkpoint_1_100.pt", "checkpoints/checkpoint_last.pt", "average.pt"]
    for split in ("valid-0.6", "valid-1.0", "valid-1.4", "valid-1.8", "test-0.6", "test1-0.6", "test2-0.6"):
        made += [f"{split}/generate-{split.partition('-')[0]}.txt.completed", f"{split}/bleu.json"]
    for second, name in enumerate(["options", *made]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"scores": [{"name": "BLEU", "score": 20.0}]}))
        os.utime(folder / name, (second, second))
    (folder / "options").write_text(OPTIONS)
    decode = (MULTI30K / "run.sh", "--out", tmp_path, "--methods", "post_ln", "--stage", "decode")
    assert shell(*decode).returncode == 0
    os.utime(folder / "checkpoints" / "checkpoint_last.pt")  # trained on
    assert "average.pt is not a checkpoint that may be replaced" in shell(*decode).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stage", "score", "--stop-stage", "prepare"), "--stop-stage prepare comes before --stage score"),
        (("--stage", "validate", "--stop-stage", "prepare"), "--stop-stage prepare comes before --stage validate"),
        (("--stage", "decode", "--subsets", "train-clean-100"), "--subsets names no dev-* and no test-* to decode"),
        (("--updates", "x"), "x is not a whole number"),
    ],
)
def test_librispeech_names_mistakes_before_any_stage(tmp_path, options, message):
    done = shell(LIBRISPEECH / "run.sh", "--root", tmp_path, "--out", tmp_path / "out", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}\n")


def test_the_demo_takes_a_folder_with_a_space_in_its_name(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(demo, "run_command", lambda folder, step, arguments, **rest: commands.append(arguments))
    out = tmp_path / "my runs"
    demo.train_and_decode(demo.EXPERIMENTS[0], out, 10, demo.Progress())
    folder = out / "sigma_reparam"
    assert [command[1] for command in commands] == [str(out / "data/mt/bin")] * 2
    train, generate = (dict(zip(command, command[1:], strict=False)) for command in commands)
    assert train["--save-dir"] == f"{folder}/checkpoints"
    assert train["--tensorboard-logdir"] == f"{folder}/tensorboard"
    assert generate["--path"] == f"{folder}/checkpoints/checkpoint_last.pt"
    assert generate["--results-path"] == f"{folder}/test"


def test_another_file_in_place_of_the_published_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEECH_MT_DATA", str(tmp_path))
    (tmp_path / "multi30k").mkdir()
    with gzip.open(tmp_path / "multi30k" / "train.de.gz", "wb") as file:
        file.write(b"Ein Satz\n")
    with pytest.raises(InputError, match=r"train\.de\.gz is not Multi30k's: its SHA-256 is"):
        prepare.archive("train.de", tmp_path)


@pytest.fixture
def trained(tmp_path):
    """trained(name, bleu): the folder of a model whose sets were decoded with two length penalties on valid."""

    def make(name, bleu, signature="nrefs:1"):
        folder = tmp_path / "en-de-3l" / name
        for split, penalty, score in [
            ("valid", "0.6", bleu),
            ("valid", "1.0", bleu + 1),
            ("valid", "1.4", bleu + 1),
            *((test, "1.0", bleu + 0.04) for test in results.TEST_SETS),
        ]:
            scores = [{"name": n, "score": score, "signature": signature} for n in ("BLEU", "chrF")]
            (folder / f"{split}-{penalty}").mkdir(parents=True)
            (folder / f"{split}-{penalty}" / "bleu.json").write_text(json.dumps({"scores": scores}))
        (folder / "train.log").write_text(
            "x | INFO | valid | epoch 001 | valid on 'valid' subset | loss 5.5 | num_updates 100 | best_loss 5.5\n"
            "x | INFO | fairseq_cli.train | done training in 60.0 seconds\n"
            "x | INFO | valid | epoch 002 | valid on 'valid' subset | loss 4.5 | num_updates 200 | best_loss 4.5\n"
            "x | INFO | fairseq_cli.train | done training in 90.0 seconds\n"
        )
        return folder

    return make


def test_the_table_is_what_was_measured(trained, tmp_path):
    folders = [trained("post_ln", 20.0), trained("sigma_reparam", 30.0), tmp_path]
    assert results.best_penalty(folders[0]) == "1.0"  # the smaller of equals
    lines = results.table(folders).splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells == ["en-de-3l", "post_ln", "200", "2", "4.5", "1.0", "21.0", "20.0", "20.0", "20.0", "20.0"]
    assert len(lines[0].split("|")) == len(lines[3].split("|"))


def test_scores_of_other_signatures_are_not_put_side_by_side(trained):
    with pytest.raises(InputError, match="scored in different ways"):
        results.table([trained("post_ln", 20.0), trained("sigma_reparam", 30.0, "nrefs:2")])


def test_nothing_decoded_is_said(tmp_path):
    with pytest.raises(InputError, match="no scores of the validation set"):
        results.best_penalty(tmp_path)
    with pytest.raises(InputError, match="no model of 1 folders is decoded"):
        results.table([tmp_path])
