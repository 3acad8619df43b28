"""Checkpoints: nothing of theirs runs, none is half-written, their mean is right, a misfit is explained."""

import argparse
import os
import pickle
import re
import resource
import runpy
import signal
import subprocess
import sys
import types
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speech_mt.checkpoint import (
    average_checkpoints,
    copy_checkpoint,
    explain_mismatch,
    load_checkpoint,
    save_checkpoint,
)
from speech_mt.errors import InputError

SCRIPTS = Path(__file__).parents[2] / "scripts"


def checkpoint(**model: torch.Tensor) -> dict:
    """What fairseq writes, in small."""
    return {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="transformer"), "optimization": {"lr": [0.1]}},
        "model": model,
        "optimizer_history": [{"num_updates": 3, "criterion_name": "C"}],
        "extra_state": {
            "best": np.float64(2.5),
            "ema": {"w": torch.zeros(1)},
            "train_iterator": {"epoch": 1},
        },
        "last_optimizer_state": {"state": {}, "loss_scale": 128.0},
    }


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "checkpoint1.pt"
    save_checkpoint(checkpoint(weight=torch.arange(6.0).view(2, 3)), path)
    return path


# -- loading


def test_what_fairseq_saves_loads(saved):
    state = load_checkpoint(saved)
    torch.testing.assert_close(state["model"]["weight"], torch.arange(6.0).view(2, 3))
    assert state["cfg"]["model"].arch == "transformer"
    assert state["extra_state"]["best"] == 2.5


@pytest.mark.parametrize(
    "value", [np.float32(1.5), np.int64(3), np.bool_(True), np.arange(4), np.str_("wer")]
)
@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"], ids=["numpy 1", "numpy 2"])
def test_numpy_values_load_under_either_numpys_names(tmp_path, value, core):
    save_checkpoint({"model": {}, "value": value}, tmp_path / "new.pt")
    with (
        zipfile.ZipFile(tmp_path / "new.pt") as new,
        zipfile.ZipFile(tmp_path / "renamed.pt", "w") as renamed,
    ):
        for name in new.namelist():
            renamed.writestr(name, re.sub(rb"numpy\._?core", core, new.read(name)))
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "renamed.pt")["value"], value)


def test_loading_leaves_the_allow_list_as_it_was(saved):
    mine = (argparse.Namespace, "argparse.Namespace")
    with torch.serialization.safe_globals([mine]):
        before = set(torch.serialization.get_safe_globals())
        load_checkpoint(saved)
        assert set(torch.serialization.get_safe_globals()) == before


class Malicious:
    """Unpickled, it leaves a file behind."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch '{self.witness}'",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "the format before torch 1.6"])
def test_a_malicious_pickle_is_refused_by_name_and_does_not_run(tmp_path, zipped):
    path, witness = tmp_path / "evil.pt", tmp_path / "witness"
    state = checkpoint() | {"args": Malicious(witness)}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        InputError, match=r"evil\.pt: refused, .* call (posix|nt)\.system.*SPEECH_MT_TRUST_CHECKPOINTS"
    ):
        load_checkpoint(path)
    assert not witness.exists()


def test_a_trusted_file_loads_whatever_it_holds(tmp_path, monkeypatch):
    path = tmp_path / "old.pt"
    torch.save(checkpoint() | {"args": types.SimpleNamespace(arch="x")}, path)
    with pytest.raises(InputError, match=r"call types\.SimpleNamespace"):
        load_checkpoint(path)
    monkeypatch.setenv("SPEECH_MT_TRUST_CHECKPOINTS", "1")
    assert load_checkpoint(path)["args"].arch == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"hello\n", "not a checkpoint at all"),
        (pickle.dumps([1]), "not a checkpoint at all"),
    ],
)
def test_other_files_are_no_checkpoints(tmp_path, content, message):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"x\.pt: .*{message}"):
        load_checkpoint(path)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(InputError, match=r"no\.pt: no such checkpoint"):
        load_checkpoint(tmp_path / "no.pt")
    with pytest.raises(InputError, match="a folder, not a checkpoint"):
        load_checkpoint(tmp_path)


def test_weights_alone_are_no_fairseq_checkpoint(tmp_path):
    save_checkpoint({"encoder.weight": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"it has no `model` \(found: encoder\.weight\)"):
        load_checkpoint(tmp_path / "weights.pt")


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.99))
def test_a_file_cut_anywhere_is_refused(saved, share):
    cut = saved.with_name("cut.pt")
    content = saved.read_bytes()
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match=r"cut\.pt"):
        load_checkpoint(cut)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_gives_a_checkpoint_or_a_message(saved, data):
    damaged = saved.with_name("damaged.pt")
    content = bytearray(saved.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged.write_bytes(content)
    try:
        load_checkpoint(damaged)
    except InputError as error:
        assert "damaged.pt" in str(error)  # noqa: PT017


# -- writing


def test_a_failed_write_leaves_the_file_that_was_there(saved):
    class Unpicklable:
        def __reduce__(self):
            raise RuntimeError("no")

    before = saved.read_bytes()
    with pytest.raises(RuntimeError):
        save_checkpoint({"model": {"w": torch.zeros(100)}, "x": Unpicklable()}, saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@contextmanager
def small_disk():
    """Files may not grow beyond 4 kB: writing more fails like a full disk. That goes for pytest's own output too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("write", [save_checkpoint, lambda state, path: copy_checkpoint(state["copy"], path)])
def test_a_full_disk_costs_nothing_and_names_the_file(saved, write):
    state = {"model": {"w": torch.zeros(4000)}, "copy": str(sys.executable)}
    before = saved.read_bytes()
    with pytest.raises(OSError, match="File too large") as info, small_disk():
        write(state, saved)
    assert info.value.filename == str(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_passing_failure_is_tried_again(saved, monkeypatch):
    failures = iter([OSError(5, "Input/output error"), None])
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if error := next(failures):
            raise error
        real(descriptor)

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(os, "fsync", fsync)
    save_checkpoint(checkpoint(weight=torch.ones(2)), saved)
    assert load_checkpoint(saved)["model"]["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "error"),
    [("none/a.pt", FileNotFoundError), ("file/a.pt", NotADirectoryError), ("folder", IsADirectoryError)],
)
def test_a_folder_that_is_not_there_is_not_waited_for(tmp_path, monkeypatch, name, error):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits"))
    with pytest.raises(error) as info:
        save_checkpoint(checkpoint(), tmp_path / name)
    assert info.value.filename == str(tmp_path / name)


def test_a_writer_killed_midway_leaves_the_old_checkpoint(saved):
    program = """
import os, sys, torch
from speech_mt.checkpoint import save_checkpoint
class Kill:
    def __reduce__(self):
        os.kill(os.getpid(), 9)
save_checkpoint({"model": {"w": torch.zeros(9)}, "x": Kill()}, sys.argv[1])
"""
    assert subprocess.run([sys.executable, "-c", program, saved]).returncode == -signal.SIGKILL
    assert saved.with_name("checkpoint1.pt.tmp").exists()  # what was being written
    assert load_checkpoint(saved)["model"]["weight"].sum() == 15
    save_checkpoint(checkpoint(), saved)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]  # and the next save clears it away


# -- averaging


def save(folder: Path, name: str, **model: torch.Tensor) -> Path:
    save_checkpoint(checkpoint(**model), folder / name)
    return folder / name


def test_the_mean_is_the_mean(tmp_path):
    paths = [save(tmp_path, f"{i}.pt", w=torch.tensor([1.0, i]), n=torch.tensor(i)) for i in (1, 2, 6)]
    state = average_checkpoints(paths)
    torch.testing.assert_close(state["model"]["w"], torch.tensor([1.0, 3.0]))
    assert state["model"]["n"] == 6  # a counter: the last one's
    assert "last_optimizer_state" not in state
    assert "ema" not in state["extra_state"]


def test_half_precision_is_summed_in_float32(tmp_path):
    """1 and 1 + 2^-7, neighbours in bfloat16: their mean is no bfloat16."""
    values = [1.0, 1.0 + 2**-7]
    paths = [save(tmp_path, f"{i}.pt", w=torch.tensor([v]).bfloat16()) for i, v in enumerate(values)]
    mean = average_checkpoints(paths)["model"]["w"]
    assert (mean.dtype, mean.item()) == (torch.float32, 1.0 + 2**-8)


def test_one_checkpoint_is_its_own_mean(saved):
    before = load_checkpoint(saved)["model"]["weight"]
    torch.testing.assert_close(average_checkpoints([saved])["model"]["weight"], before, rtol=0, atol=0)


def test_tied_weights_stay_tied(tmp_path):
    paths = []
    for i in (1.0, 3.0):
        tied = torch.full((1000,), i)
        paths.append(save(tmp_path, f"{i}.pt", embed=tied, output=tied))
    state = average_checkpoints(paths)
    assert state["model"]["embed"].data_ptr() == state["model"]["output"].data_ptr()
    assert state["model"]["output"].tolist() == [2.0] * 1000
    save_checkpoint(state, tmp_path / "mean.pt")
    assert (tmp_path / "mean.pt").stat().st_size < 7000  # one copy of 4000 bytes, not two


def test_different_names_and_shapes_are_refused_by_name(tmp_path):
    a = save(tmp_path, "a.pt", w=torch.zeros(2, 3), x=torch.zeros(1))
    b = save(tmp_path, "b.pt", w=torch.zeros(2, 4), y=torch.zeros(1))
    with pytest.raises(
        InputError, match=r"b\.pt with .*a\.pt: the former lacks x; the latter lacks y; w is \(2, 4\)"
    ):
        average_checkpoints([a, b])


def test_nothing_cannot_be_averaged():
    with pytest.raises(InputError, match="no checkpoints"):
        average_checkpoints([])


def test_power_iteration_vectors_are_estimated_anew(tmp_path, monkeypatch):
    calls = []

    def reestimate_state_dict(state: dict) -> dict:
        calls.append(set(state))
        return state | {"fc.parametrizations.weight.0.u": torch.ones(2)}

    monkeypatch.setitem(
        sys.modules, "speech_mt.reparam", types.SimpleNamespace(reestimate_state_dict=reestimate_state_dict)
    )
    names = {
        "fc.parametrizations.weight.original": torch.zeros(2, 2),
        "fc.parametrizations.weight.0.u": torch.zeros(2),
    }
    save_checkpoint(checkpoint(**names), tmp_path / "a.pt")
    state = average_checkpoints([tmp_path / "a.pt"])
    assert calls == [set(names)]
    assert state["model"]["fc.parametrizations.weight.0.u"].tolist() == [1, 1]
    save_checkpoint(checkpoint(w=torch.zeros(1)), tmp_path / "b.pt")
    average_checkpoints([tmp_path / "b.pt"])
    assert len(calls) == 1  # plain weights need no estimate


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script; its exit code and what it wrote to stderr."""

    def run(name: str, *arguments: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return exit.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def average(script):
    return partial(script, "average_checkpoints.py")


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        (["--num-epoch-checkpoints", 2], 3.5),  # epochs 2 and 5
        (["--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 4], 1.5),  # 1 and 2
        (["--num-update-checkpoints", 2], 150.0),  # updates 100 and 200, in the order of numbers
    ],
)
def test_the_script_picks_the_last_checkpoints(tmp_path, average, options, mean):
    for epoch in (1, 2, 5):
        save(tmp_path, f"checkpoint{epoch}.pt", w=torch.tensor([float(epoch)]))
    for update in (20, 100, 200):
        save(tmp_path, f"checkpoint_1_{update}.pt", w=torch.tensor([float(update)]))
    save(tmp_path, "checkpoint_best.pt", w=torch.tensor([1e6]))
    assert average("--inputs", tmp_path, "--output", tmp_path / "mean.pt", *options) == (0, "")
    assert load_checkpoint(tmp_path / "mean.pt")["model"]["w"].tolist() == [mean]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], r"\.: 1 files checkpoint<epoch>\.pt, but 3 were asked for"),
        ([".", "checkpoint1.pt"], "--inputs: one folder is needed with --num-.*, not 2 paths"),
        (["nowhere"], "nowhere: no such folder"),
    ],
)
def test_the_scripts_mistakes_are_one_line(tmp_path, monkeypatch, average, arguments, message):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "checkpoint1.pt", w=torch.zeros(1))
    error, _ = average("--inputs", *arguments, "--num-epoch-checkpoints", 3, "--output", "mean.pt")
    assert re.fullmatch(f"error: {message}.*", error)
    assert not (tmp_path / "mean.pt").exists()


@pytest.mark.parametrize("name", ["average_checkpoints.py", "fold_checkpoint.py"])
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("in.pt", "is also an input"),
        ("link.pt", "is also an input"),
        ("checkpoint_last.pt", "has an optimizer's state, without which"),
        ("notes.txt", "is not a checkpoint that may be replaced"),
        ("folder", "is no file that can be replaced"),
    ],
)
def test_a_result_replaces_no_training_and_no_input(tmp_path, script, name, output, message):
    state = checkpoint(weight=torch.ones(1))
    save_checkpoint(state, tmp_path / "checkpoint_last.pt")
    del state["last_optimizer_state"]
    save_checkpoint(state, tmp_path / "in.pt")
    (tmp_path / "link.pt").symlink_to("in.pt")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    options = ["--inputs", tmp_path / "in.pt", "--output"] if name.startswith("average") else [tmp_path / "in.pt"]
    error, _ = script(name, *options, tmp_path / output)
    assert re.fullmatch(f"error: {tmp_path / output} .*{message}.*: choose another output", error)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_an_average_replaces_an_earlier_one_and_its_folder_is_made(tmp_path, average):
    for value in (1.0, 3.0):
        path = save(tmp_path, "checkpoint1.pt", w=torch.tensor([value]))
        assert average("--inputs", path, "--output", tmp_path / "new" / "mean.pt") == (0, "")
        assert load_checkpoint(tmp_path / "new" / "mean.pt")["model"]["w"].tolist() == [value]


# -- explaining


def layers(depth: int, width: int = 4, name: str = "weight") -> dict[str, torch.Tensor]:
    shapes = {f"encoder.layers.{i}.fc1.{name}": (width, width) for i in range(depth)}
    return {
        key: torch.zeros(shape) for key, shape in (shapes | {"decoder.layers.0.fc1.weight": (4, 4)}).items()
    }


def test_depth_is_explained_without_a_list_of_keys():
    assert explain_mismatch(layers(3), layers(2)) == (
        "the checkpoint does not fit the model: "
        "encoder.layers: the model has 3, the checkpoint 2 (the checkpoint lacks 2)"
    )
    assert "the model has 1, the checkpoint 3 (the model lacks 1, 2)" in explain_mismatch(
        layers(1), layers(3)
    )


def test_width_is_explained_by_the_first_shapes():
    message = explain_mismatch(layers(9, width=8), layers(9))
    assert "encoder.layers.0.fc1.weight is (8, 8) in the model, (4, 4) in the file" in message
    assert message.count(" in the model") == 3


def test_parametrization_is_explained_once():
    message = explain_mismatch(layers(2, name="parametrizations.weight.original"), layers(2))
    assert message == (
        "the checkpoint does not fit the model: only the model has reparametrised weights "
        "(encoder.layers.0.fc1.parametrizations.weight.original): use the same --reparam"
    )


def test_other_names_are_listed_on_both_sides():
    message = explain_mismatch({"a": torch.zeros(1)}, {f"b{i}": torch.zeros(1) for i in range(5)})
    assert message.endswith("not in the checkpoint: a; not in the model: b0, b1, b2 and 2 more")


def test_damage_to_the_directory_of_a_zip_is_named(tmp_path):
    """An end record that claims several disks: zipfile itself raises on it."""
    path = tmp_path / "damaged.pt"
    torch.save({"model": {}}, path)
    locator = b"PK\x06\x07" + (0).to_bytes(4, "little") + (0).to_bytes(8, "little") + (9).to_bytes(4, "little")
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    path.write_bytes(content[:end].rpartition(b"PK\x06\x07")[0] + locator + content[end:])
    with pytest.raises(InputError, match=r"damaged\.pt"):
        load_checkpoint(path)
