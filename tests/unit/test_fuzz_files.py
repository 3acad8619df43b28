"""Some damaged files of every kind; ``python -m tests.stress.fuzz_files`` tries many."""

import random

import pytest
import yaml

from tests.stress.fuzz_files import KINDS, fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_taken_or_refused_by_name(kind):
    counts, faults = fuzz(kind, cases=40, seconds=20, draw=random.Random(7))
    assert faults == []
    assert counts["refused"] > 0 or kind == "checkpoint of another model"


def test_hydra_reads_yaml_as_data(tmp_path):
    """Ours are read by hydra alone; a tag that would call something is refused."""
    from omegaconf import OmegaConf

    path = tmp_path / "config.yaml"
    path.write_text(f"model: !!python/object/apply:os.system ['touch {tmp_path}/witness']\n")
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        OmegaConf.load(path)
    assert not (tmp_path / "witness").exists()
