"""A command is run once, and again if what says that it was completed is damaged."""

import sys

import pytest

from speech_mt.experiments.commands import Progress, run_command


@pytest.mark.parametrize("damage", [b"", b'["cut', b"\xff"])
def test_a_command_is_run_until_it_is_known_to_be_completed(tmp_path, damage):
    marker, witness = tmp_path / "run" / "train.completed", tmp_path / "witness"
    command = [sys.executable, "-S", "-c", f"open({str(witness)!r}, 'a').write('x')"]
    for runs in (1, 1, 2):
        if runs == 2:
            marker.write_bytes(damage)
        run_command(tmp_path / "run", "train", command, root=tmp_path, progress=Progress())
        assert witness.read_text() == "x" * runs
    assert sorted(path.name for path in marker.parent.iterdir()) == ["train.completed", "train.log"]
