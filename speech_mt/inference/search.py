"""Options of the search from Python, named and checked as those of fairseq-generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.dataclass.configs import GenerationConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speech_mt.compat.options import RANGES, nearest
from speech_mt.errors import InputError
from speech_mt.ranges import check_ranges


def search_options(options: Mapping[str, Any]) -> DictConfig:
    """fairseq's options of generation, with ``options`` in place of their defaults.

    Raises:
        InputError: an option that there is not, or a value that it cannot have.
    """
    config = OmegaConf.structured(GenerationConfig)
    for name, value in options.items():
        if name not in config:
            raise InputError(f"no option {name} of the search: {nearest(name, config)}")
        try:
            config[name] = value
        except OmegaConfBaseException as error:
            raise InputError(f"{name} {value!r}: {str(error).partition(chr(10))[0]}") from None
    check_ranges(config, RANGES)
    return config
