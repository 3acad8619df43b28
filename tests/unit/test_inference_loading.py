"""What is refused, with the reason, before or after a checkpoint is opened; and that the library stays light."""

import os
import subprocess
import sys

import pytest
import torch

import speech_mt
from speech_mt.errors import InputError


class Malicious:
    def __reduce__(self):
        return os.system, ("touch witness",)


def test_importing_the_library_imports_neither_fairseq_nor_torch():
    program = "import sys, speech_mt; sys.exit(any(name in sys.modules for name in ('fairseq', 'torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_missing_or_unsafe_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.pt: no such checkpoint"):
        speech_mt.load(tmp_path / "none.pt")
    torch.save({"model": {}, "cfg": Malicious()}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil\.pt: refused, nothing was run"):
        speech_mt.load(tmp_path / "evil.pt")
    assert not (tmp_path / "witness").exists()


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """saved(task's options, model=...): a checkpoint in a folder of its own, without weights."""
    monkeypatch.chdir(tmp_path)

    def save(task, model="spectral_transformer"):
        path = tmp_path / "runs" / "model" / "c.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"task": task, "model": {"_name": model}, "bpe": None}
        history = [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}]
        torch.save(
            {"model": {}, "args": None, "cfg": options, "optimizer_history": history}
            | {"extra_state": {"train_iterator": None}},
            path,
        )
        return path

    return save


TRANSLATION = {"_name": "translation", "data": "bin", "source_lang": "de", "target_lang": "en"}


def test_a_missing_vocabulary_is_named_with_the_places_looked_in(saved, tmp_path):
    with pytest.raises(InputError) as error:
        speech_mt.load(saved(TRANSLATION))
    places = ["bin", "", "runs/model", "runs", "runs/bin"]
    listed = ", ".join(str((tmp_path / place).resolve()) for place in places)
    assert f"dict.de.txt and dict.en.txt not found in {listed}; copy" in str(error.value)


def test_a_named_folder_is_the_place_to_look_in(saved, tmp_path):
    """The checkpoint's own vocabulary would be another one, unnoticed."""
    (tmp_path / "bin").mkdir()
    for name in ("dict.de.txt", "dict.en.txt"):
        (tmp_path / "bin" / name).write_text("a 1\n")
    with pytest.raises(InputError, match=rf"not found in {tmp_path}/data/mine, {tmp_path}/data; copy"):
        speech_mt.load(saved(TRANSLATION), data=tmp_path / "data" / "mine")


def test_languages_that_no_file_tells_are_asked_for(saved):
    with pytest.raises(InputError, match="does not say its languages, .* add source_lang and target_lang"):
        speech_mt.load(saved(TRANSLATION | {"source_lang": None, "target_lang": None}))


def test_another_task_or_model_is_named(saved):
    with pytest.raises(InputError, match=r"a model of the task language_modeling; translation and"):
        speech_mt.load(saved(TRANSLATION | {"_name": "language_modeling"}))
    with pytest.raises(InputError, match=r"a model some_arch, which neither fairseq nor speech_mt knows"):
        speech_mt.load(saved(TRANSLATION, "some_arch"))
    with pytest.raises(InputError, match=r"the task translation has no option ctc_beam; it has .*source_lang"):
        speech_mt.load(saved(TRANSLATION), ctc_beam=3)


@pytest.mark.parametrize("device", ["gpu", "meta:x"])
def test_an_unusable_device_is_named(saved, device):
    with pytest.raises(InputError, match=f"device '{device}' cannot be used"):
        speech_mt.load(saved(TRANSLATION), device)


def test_a_file_without_options_or_history_is_no_training_s(tmp_path):
    torch.save({"model": {}}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"weights\.pt: not saved by fairseq-train: it has no optimizer_history"):
        speech_mt.load(tmp_path / "weights.pt")
    torch.save({"model": {}, "optimizer_history": [], "extra_state": {}}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"weights\.pt: holds no options"):
        speech_mt.load(tmp_path / "weights.pt")
