"""Average the weights of several checkpoints into one, for decoding.

python scripts/average_checkpoints.py --inputs checkpoints --num-epoch-checkpoints 5 --output average.pt
python scripts/average_checkpoints.py --inputs a.pt b.pt --output average.pt
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from speech_mt.arguments import positive_int
from speech_mt.checkpoint import average_checkpoints, save_checkpoint
from speech_mt.checkpoint.writing import check_output
from speech_mt.errors import InputError, run

EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")


def last_checkpoints(
    folder: Path, pattern: re.Pattern[str], count: int, upper_bound: int | None
) -> list[Path]:
    """The last ``count`` checkpoints whose epoch or update, the pattern's group, is at most ``upper_bound``.

    Raises:
        InputError: there are fewer.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder; --num-*-checkpoints takes one folder of checkpoints as --inputs"
        )
    matches = [match for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    numbered = sorted((int(match[1]), match[0]) for match in matches)
    within = [name for number, name in numbered if upper_bound is None or number <= upper_bound]
    if len(within) < count:
        kind = "checkpoint<epoch>.pt" if pattern is EPOCH else "checkpoint_<epoch>_<update>.pt"
        bound = "" if upper_bound is None else f" up to {upper_bound}"
        raise InputError(f"{folder}: {len(within)} files {kind}{bound}, but {count} were asked for")
    return [folder / name for name in within[-count:]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--inputs", nargs="+", type=Path, required=True, help="checkpoints, or a folder of them"
    )
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--num-epoch-checkpoints", type=positive_int, metavar="N", help="the last N checkpoint<epoch>.pt"
    )
    which.add_argument(
        "--num-update-checkpoints",
        type=positive_int,
        metavar="N",
        help="the last N checkpoint_<epoch>_<update>.pt",
    )
    parser.add_argument(
        "--checkpoint-upper-bound",
        type=positive_int,
        metavar="N",
        help="the last epoch or update to take into account",
    )
    args = parser.parse_args()

    paths = args.inputs
    count = args.num_epoch_checkpoints or args.num_update_checkpoints
    if count:
        if len(paths) != 1:
            raise InputError(
                f"--inputs: one folder is needed with --num-*-checkpoints, not {len(paths)} paths"
            )
        pattern = EPOCH if args.num_epoch_checkpoints else UPDATE
        paths = last_checkpoints(paths[0], pattern, count, args.checkpoint_upper_bound)
    elif args.checkpoint_upper_bound:
        raise InputError("--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints")
    check_output(args.output, paths)
    for path in paths:
        print(f"averaging {path}")
    save_checkpoint(average_checkpoints(paths), args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run(main)
