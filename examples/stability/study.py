"""The stability study: methods by depth by learning rate, with and without warm-up, on one task.

Trains what is not in OUT/study.csv yet, in order of interest, one run a process, and adds a row after each. Interrupt
it whenever you like: only the runs of that moment are lost. With --report it trains nothing and writes RESULTS.md, its
figures and a copy of the table.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

from grid import (
    DEPTHS,
    LEARNING_RATES,
    METHODS,
    WARMUPS,
    Result,
    Results,
    Trial,
    grid,
    is_wanted,
    known,
    read_results,
    write_results,
)

from speech_mt.errors import InputError, run
from speech_mt.experiments.pool import processes, run_all
from speech_mt.experiments.provenance import alone_in, commit, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def prepare(data: Path) -> str:
    """The numbers corpus, made unless it is there; returns its binarised folder relative to the repository.

    Raises:
        InputError: it cannot be made.
    """
    command = [sys.executable, "examples/numbers/prepare.py", "--out", str(data), "--only", "mt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"cannot make the corpus in {data}: {done.stderr.strip().splitlines()[-1]}")
    return os.path.relpath(data / "mt" / "bin", ROOT)


def train(trial: Trial, data: str, out: str, told: tuple[str, str]) -> Result:
    """In a worker: import fairseq on the first call, without its many notes, then train."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from fairseq_run import train_and_measure

    return train_and_measure(trial, data, f"{out}/{trial.name}", *told)


def run_trials(trials: list[Trial], results: Results, table: Path, data: str, jobs: int, minutes: float) -> int:
    """Run what is wanted of ``trials``, starting none after ``minutes``; returns how many failed.

    A failed run is reported and has no row: the next study tries it again.
    """

    def keep(trial: Trial, result: Result) -> None:
        results[trial] = result
        write_results(table, results)
        print(
            f"{len(results):4} {trial.depth:3}L {trial.method:24} lr {trial.lr:g} warm-up {trial.warmup}: "
            f"{result.outcome} at {result.updates}, loss {result.loss:.2f}, BLEU {result.bleu:.1f}, "
            f"{result.seconds:.0f} s",
            flush=True,
        )

    out = os.path.relpath(table.parent, ROOT)
    os.chdir(ROOT)
    work = partial(train, data=data, out=out, told=(commit(ROOT), machine()))
    wanted = (trial for trial in trials if is_wanted(trial, results))
    return run_all(wanted, work, keep, jobs, minutes, processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "stability", help="table and curves")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "runs" / "numbers" / "data", help="the corpus; made if absent"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME", help=", ".join(METHODS))
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS, metavar="N")
    parser.add_argument("--lrs", nargs="+", type=float, default=LEARNING_RATES, metavar="LR")
    parser.add_argument("--warmups", nargs="+", type=int, choices=WARMUPS, default=WARMUPS, metavar="N", help="100, 0")
    parser.add_argument("--updates", type=int, default=300, help="at most, a run; a multiple of 10")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="MINUTES", help="start no run after these"
    )
    parser.add_argument("--report", action="store_true", help="write RESULTS.md and its figures from the table")
    parser.add_argument("--results", type=Path, default=HERE, help="folder for RESULTS.md and its figures")
    args = parser.parse_args()
    table = args.out.absolute() / "study.csv"
    if args.report:
        from stability_report import write_report

        return write_report(table, args.results)
    if args.updates < 10 or args.updates % 10 or args.jobs < 1:
        raise InputError(f"--updates {args.updates} --jobs {args.jobs}: a multiple of 10, and at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with alone_in(table.parent):
        data = prepare(args.data.absolute())
        results = read_results(table)
        cells = grid(known(args.methods), args.depths, args.lrs, args.warmups, args.seed, args.updates)
        trials = [trial for trial in cells if trial not in results]
        print(f"{table}: {len(results)} rows; {len(trials)} runs to go", flush=True)
        failed = run_trials(trials, results, table, data, args.jobs, args.budget)
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
