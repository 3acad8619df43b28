"""A stage is done once, again if it was interrupted, and never passed off as one with other settings."""

import shutil

import pytest

from speech_mt.data.stage import atomic_path, run_stage
from speech_mt.errors import InputError


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deeper" / "a.txt"

    def interrupted():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(path.parent.iterdir())
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert [found.name for found in path.parent.iterdir()] == ["a.txt"]
    assert path.read_text() == "whole"


def test_a_stage_runs_until_it_completes_and_then_never_again(tmp_path, capsys):
    runs = []

    def work():
        runs.append(1)
        if len(runs) == 1:
            raise KeyboardInterrupt
        return "12 lines"

    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path, "raw", {"seed": 1}, work)
    run_stage(tmp_path, "raw", {"seed": 1}, work)
    run_stage(tmp_path, "raw", {"seed": 1}, work)
    assert len(runs) == 2
    assert capsys.readouterr().out == "raw: 12 lines\nraw: done already (12 lines)\n"
    assert (tmp_path / ".raw.completed").exists()


def test_other_settings_are_refused_by_name(tmp_path):
    run_stage(tmp_path, "raw", {"seed": 1, "limits": [1, 2]}, lambda: "done")
    with pytest.raises(InputError, match=r"limits was \[1, 2\], is now None; seed was 1, is now 2"):
        run_stage(tmp_path, "raw", {"seed": 2}, lambda: pytest.fail("must not run"))


@pytest.mark.parametrize("damage", [b"", b'{"cut', b"\xff"])
def test_a_damaged_marker_is_named(tmp_path, damage):
    (tmp_path / ".raw.completed").write_bytes(damage)
    with pytest.raises(InputError, match=r"\.raw\.completed is damaged: delete it"):
        run_stage(tmp_path, "raw", {}, lambda: pytest.fail("must not run"))


def test_changed_inputs_are_worked_on_again(tmp_path, capsys):
    runs = []

    def work():
        runs.append(1)
        return f"{len(runs)} lines"

    for digest in ("a", "a", "b", "b"):
        run_stage(tmp_path, "raw", {"seed": 1}, work, {"text": digest})
    assert len(runs) == 2
    assert capsys.readouterr().out.splitlines() == [
        "raw: 1 lines",
        "raw: done already (1 lines)",
        "raw: what it was made from has changed, so it is made again",
        "raw: 2 lines",
        "raw: done already (2 lines)",
    ]


def test_a_result_that_was_deleted_is_made_again(tmp_path, capsys):
    """Also that of a marker from before stages named what they make."""
    path = tmp_path / "bin" / "a"

    def work():
        with atomic_path(path) as temporary:
            temporary.write_text("whole")
        return "1 file"

    run_stage(tmp_path, "raw", {}, work)
    capsys.readouterr()
    run_stage(tmp_path, "raw", {}, work, outputs=[path])
    shutil.rmtree(path.parent)
    run_stage(tmp_path, "raw", {}, work, outputs=[path])
    assert path.read_text() == "whole"
    assert capsys.readouterr().out.splitlines() == [
        "raw: done already (1 file)",
        f"raw: {path} is missing, so it is made again",
        "raw: 1 file",
    ]


def test_work_on_changed_inputs_that_is_interrupted_leaves_no_stage_completed(tmp_path):
    run_stage(tmp_path, "raw", {}, lambda: "done", {"text": "a"})

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path, "raw", {}, interrupted, {"text": "b"})
    assert not (tmp_path / ".raw.completed").exists()
