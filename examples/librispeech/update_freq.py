"""The --update-freq that keeps a config's effective batch on another number of GPUs.

    python examples/librispeech/update_freq.py examples/librispeech/config/ctc_36l_100h.yaml --gpus 2

prints 4 for a config for 8 GPUs. The effective batch is GPUs x --max-tokens x --update-freq; frames of 10 ms.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from speech_mt.arguments import positive_int
from speech_mt.errors import InputError, run

FRAMES_PER_SECOND = 100


def update_freq(frames: int, gpus: int, max_tokens: int) -> int:
    """Micro-batches an update, so that an update has ``frames`` or as near as whole numbers come, at least 1."""
    return max(1, round(frames / (gpus * max_tokens)))


def frames_an_update(path: Path) -> tuple[int, int]:
    """The effective batch of a config and what of it one GPU takes at a time, both in frames.

    Raises:
        InputError: the config does not say, or is none.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such config")
    try:
        config = OmegaConf.load(path)
        max_tokens = OmegaConf.select(config, "dataset.max_tokens")
        gpus = OmegaConf.select(config, "distributed_training.distributed_world_size")
        freq = OmegaConf.select(config, "optimization.update_freq", default=1)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise InputError(f"{path}: not a config in YAML ({str(error).partition(chr(10))[0]})") from None
    freq = freq[0] if OmegaConf.is_list(freq) and len(freq) == 1 else freq
    if not all(isinstance(number, int) and number > 0 for number in (max_tokens, gpus, freq)):
        raise InputError(
            f"{path}: dataset.max_tokens {max_tokens}, distributed_training.distributed_world_size {gpus} and "
            f"optimization.update_freq {freq} have to be whole numbers of at least 1"
        )
    return gpus * max_tokens * freq, max_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--gpus", type=positive_int, required=True, help="GPUs in all, over all nodes")
    parser.add_argument("--max-tokens", type=positive_int, help="frames a GPU takes at a time, if not the config's")
    args = parser.parse_args()
    frames, max_tokens = frames_an_update(args.config)
    max_tokens = args.max_tokens or max_tokens
    freq = update_freq(frames, args.gpus, max_tokens)
    got = args.gpus * max_tokens * freq
    if got != frames:
        seconds, wanted = got / FRAMES_PER_SECOND, frames / FRAMES_PER_SECOND
        print(f"note: {seconds:g} seconds of audio an update, {wanted:g} in the config", file=sys.stderr)
    print(freq)


if __name__ == "__main__":
    run(main)
