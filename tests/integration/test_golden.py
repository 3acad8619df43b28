"""A checkpoint made by an earlier version still loads, and decodes to what it decoded to then."""

import re
import shutil
from pathlib import Path

import pytest

from .commands import Commands
from .conftest import PLUGIN

GOLDEN = Path(__file__).parents[1] / "golden"


def parsed(text):
    lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", text, re.MULTILINE)
    return {number: (float(score), words) for number, score, words in lines}


def test_the_golden_checkpoint_decodes_as_it_did(command_server, tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    done = Commands(command_server, tmp_path).run(
        f"fairseq-interactive . {PLUGIN} --cpu --path sigma_deepnorm.pt --source-lang de --target-lang en --beam 3 "
        "--input sentences.de"
    )
    assert done.returncode == 0, done.stderr
    expected, found = parsed((GOLDEN / "hypotheses.txt").read_text()), parsed(done.stdout)
    assert len(found) == 12
    assert {n: words for n, (_, words) in found.items()} == {n: words for n, (_, words) in expected.items()}
    scores = {n: score for n, (score, _) in expected.items()}
    assert {n: score for n, (score, _) in found.items()} == pytest.approx(scores, abs=1e-4)


def test_it_is_small():
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 300_000
