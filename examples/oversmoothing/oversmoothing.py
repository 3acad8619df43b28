"""The study of oversmoothing: each control and its rivals by depth, by share of the data, and on spoilt test sets.

Trains what is not in OUT/study.csv yet, one run a process, and adds rows to study.csv and spoilt.csv after each; how
alike tokens are, by layer and update, is in layers.csv of each run's folder. Interrupt it whenever you like: only the
runs of that moment are lost. With --report it trains nothing and writes RESULTS.md, its figures and the tables.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from controls import CONTROLS
from shares import part_of_manifest, part_of_pairs
from trials import DEPTHS, SHARES, TASKS, Result, Score, Spoilt, Trial, grid, known

from speech_mt.errors import InputError, run
from speech_mt.experiments.pool import processes, run_all
from speech_mt.experiments.provenance import alone_in, commit, machine
from speech_mt.experiments.table import read_table, write_table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORPORA = {
    "numbers": ("examples/numbers/prepare.py", "--only mt"),
    "digits": ("examples/digits/prepare.py", "--corpora fsdd"),
}
FOLDERS = {"numbers": "mt/bin", "digits": "fsdd"}


def prepare(task: str, folder: Path, smoke: bool) -> Path:
    """The corpus of a task, made unless it is there.

    Raises:
        InputError: it cannot be made.
    """
    script, options = CORPORA[task]
    data = folder / FOLDERS[task]
    if data.is_dir():
        return data
    command = [sys.executable, script, "--out", str(folder), *options.split()]
    command += ["--smoke"] if smoke and task == "numbers" else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"cannot make the corpus in {folder}: {done.stderr.strip().splitlines()[-1]}")
    return data


def data_of(trial: Trial, corpora: dict[str, Path], out: Path) -> str:
    """The training data of a trial, relative to the repository; a share of a corpus is made unless it is there."""
    if trial.task == "images":
        return ""
    whole = corpora[trial.task]
    if trial.share < 1:
        make = part_of_pairs if trial.task == "numbers" else part_of_manifest
        whole = make(whole, out / "data" / f"{trial.task}-{trial.share:g}-{trial.seed}", trial.share, trial.seed)
    return os.path.relpath(whole, ROOT)


def train(trial: Trial, data: dict[Trial, str], out: str, told: tuple[str, str]) -> tuple[Result, dict[Spoilt, Score]]:
    """In a worker: import fairseq on the first call, without its many notes, then train."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from training import train_and_measure

    return train_and_measure(trial, data[trial], f"{out}/{trial.name}", *told)


def run_trials(trials: Sequence[Trial], corpora: dict[str, Path], out: Path, jobs: int, minutes: float) -> int:
    """Run ``trials``, starting none after ``minutes``; returns how many failed, which the next study tries again."""
    results = read_table(out / "study.csv", Trial, Result)
    spoilt = read_table(out / "spoilt.csv", Spoilt, Score)

    def keep(trial: Trial, found: tuple[Result, dict[Spoilt, Score]]) -> None:
        results[trial], of_trial = found
        spoilt.update(of_trial)
        write_table(out / "spoilt.csv", spoilt, Spoilt, Score)  # before its trial counts as done
        write_table(out / "study.csv", results, Trial, Result)
        result = results[trial]
        print(
            f"{len(results):4} {trial.name}: {TASKS[trial.task].score} {result.score:.1f}, loss {result.loss:.2f}, "
            f"cosine {result.cosine:.2f}",
            flush=True,
        )

    missing = [trial for trial in trials if trial not in results]
    print(f"{out / 'study.csv'}: {len(results)} rows; {len(missing)} runs to go", flush=True)
    os.chdir(ROOT)
    data = {trial: data_of(trial, corpora, out) for trial in missing}
    work = partial(train, data=data, out=os.path.relpath(out, ROOT), told=(commit(ROOT), machine()))
    return run_all(missing, work, keep, jobs, minutes, processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "oversmoothing", help="tables and runs")
    for task in CORPORA:
        default = ROOT / "runs" / task / "data"
        parser.add_argument(f"--{task}", type=Path, default=default, help="the corpus; made if absent")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="default: all that there is data for")
    parser.add_argument("--controls", nargs="+", default=list(CONTROLS), metavar="NAME", help=", ".join(CONTROLS))
    parser.add_argument("--depths", nargs="*", type=int, default=DEPTHS, metavar="N", help="on all of the data")
    parser.add_argument(
        "--shares", nargs="*", type=float, default=SHARES, metavar="X", help="of the data, at 12 layers"
    )
    parser.add_argument("--updates", type=int, default=0, help="of every run, a multiple of 10; 0: the task's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="MINUTES", help="start no run after these"
    )
    parser.add_argument("--smoke", action="store_true", help="of what is made, a small corpus")
    parser.add_argument("--report", action="store_true", help="write RESULTS.md and its figures from the tables")
    parser.add_argument("--results", type=Path, default=HERE, help="folder for RESULTS.md and its figures")
    args = parser.parse_args()
    out = args.out.absolute()
    if args.report:
        from oversmoothing_report import write_report

        return write_report(out, args.results)
    if args.updates < 0 or args.updates % 10 or args.jobs < 1:
        raise InputError(f"--updates {args.updates} --jobs {args.jobs}: a multiple of 10, and at least 1")
    if bad := [share for share in args.shares if not 0 < share < 1]:
        raise InputError(f"--shares {bad[0]:g}: above 0 and below 1")
    if args.tasks is None:
        args.tasks = list(TASKS)
        if not ((args.digits / FOLDERS["digits"]).is_dir() or os.environ.get("SPEECH_MT_DATA")):
            args.tasks.remove("digits")
            print("digits: left out, SPEECH_MT_DATA is not set")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with alone_in(out):
        trials = list(grid(args.tasks, known(args.controls), args.depths, args.shares, args.seed, args.updates))
        corpora = {
            task: prepare(task, vars(args)[task].absolute(), args.smoke) for task in args.tasks if task in CORPORA
        }
        return 1 if run_trials(trials, corpora, out, args.jobs, args.budget) else 0


if __name__ == "__main__":
    run(main)
