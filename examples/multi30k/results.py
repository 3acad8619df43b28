"""The table of what examples/multi30k/run.sh measured, as Markdown: one row a trained model, nothing from memory.

python examples/multi30k/results.py runs/multi30k/*/*/ > RESULTS.md
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from speech_mt.errors import InputError, run

TEST_SETS = {"test": "test_2016_flickr", "test1": "test_2017_flickr", "test2": "test_2017_mscoco"}
BEST_LOSS = re.compile(r"valid on 'valid' subset.*num_updates (\d+).*best_loss ([\d.]+)")
_WALL = re.compile(r"done training in ([\d.]+) seconds")


def scores(folder: Path, split: str) -> dict[str, dict[str, dict]]:
    """Length penalty -> metric -> its row of scripts/score_bleu.py, for what was decoded of ``split``."""
    reports = {path.parent.name.partition("-")[2]: path for path in folder.glob(f"{split}-*/bleu.json")}
    return {
        penalty: {score["name"]: score for score in json.loads(path.read_text())["scores"]}
        for penalty, path in sorted(reports.items())
    }


def best_penalty(folder: Path) -> str:
    """The length penalty with the highest BLEU on the validation set; of equal ones the smaller.

    Raises:
        InputError: nothing was decoded yet.
    """
    valid = scores(folder, "valid")
    if not valid:
        raise InputError(f"{folder}: no scores of the validation set: run run.sh --stage decode")
    return max(valid, key=lambda penalty: (valid[penalty]["BLEU"]["score"], -float(penalty)))


def row(folder: Path) -> list[str]:
    """The cells of one trained model."""
    log = (folder / "train.log").read_text(errors="replace")
    updates, loss = BEST_LOSS.findall(log)[-1]
    minutes = sum(map(float, _WALL.findall(log))) / 60
    penalty = best_penalty(folder)
    bleu = [scores(folder, split)[penalty]["BLEU"]["score"] for split in TEST_SETS]
    chrf = scores(folder, "test")[penalty]["chrF"]["score"]
    valid = scores(folder, "valid")[penalty]["BLEU"]["score"]
    cells = [folder.parent.name, folder.name, updates, f"{minutes:.0f}", loss, penalty]
    return cells + [f"{score:.1f}" for score in (valid, *bleu, chrf)]


def table(folders: list[Path]) -> str:
    """Markdown: a row for each folder whose test sets are decoded and scored.

    Raises:
        InputError: there is none, or they were scored in different ways.
    """
    done = [folder for folder in folders if all(scores(folder, split) for split in TEST_SETS)]
    if not done:
        raise InputError(f"no model of {len(folders)} folders is decoded and scored: run run.sh --stage decode")
    signatures = {scores(folder, "test")[best_penalty(folder)]["BLEU"]["signature"] for folder in done}
    if len(signatures) > 1:
        raise InputError(f"scored in different ways: {'; '.join(sorted(signatures))}")
    header = ["model", "method", "updates", "minutes", "valid loss", "lenpen", "BLEU valid"]
    header += [f"BLEU {name}" for name in TEST_SETS.values()] + ["chrF test_2016_flickr"]
    lines = [header, ["---"] * len(header), *map(row, done)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return (
        f"{text}\n\nBLEU: sacreBLEU `{signatures.pop()}`, against the text as published.\n"
        "Beam 5, average of the last five checkpoints at most (100 updates apart), length penalty chosen on the\n"
        "validation set. Loss: best of the validation set, bits a token with label smoothing. Minutes: training and\n"
        "validation.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a trained model")
    parser.add_argument("--best-penalty", action="store_true", help="print the length penalty to use, only")
    args = parser.parse_args()
    if args.best_penalty:
        print(best_penalty(args.folders[0]))
    else:
        print(table([folder for folder in args.folders if (folder / "train.log").exists()]), end="")


if __name__ == "__main__":
    run(main)
