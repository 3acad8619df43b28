"""Runs of a study, a few at a time, a row each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from speech_mt.errors import InputError
from speech_mt.experiments.commands import Progress
from speech_mt.experiments.table import read_table, write_table

Trial = TypeVar("Trial")
Result = TypeVar("Result")


def run_missing(
    table: Path,
    trials: Iterable[Trial],
    kinds: tuple[type[Trial], type[Result]],
    work: Callable[[Trial], Result],
    tell: Callable[[Trial, Result], str],
    progress: Progress,
    jobs: int,
    minutes: float,
) -> int:
    """Run those of ``trials`` that have no row in ``table`` yet, and write each row as it comes; see :func:`run_all`.

    Args:
        kinds: the two dataclasses of a row.
        tell: what to say of a new row.
    """
    results = read_table(table, *kinds)

    def keep(trial: Trial, result: Result) -> None:
        results[trial] = result
        write_table(table, results, *kinds)
        progress.say(tell(trial, result))

    missing = [trial for trial in trials if trial not in results]
    progress.say(f"{table}: {len(results)} rows; {len(missing)} runs to go")
    return run_all(missing, work, keep, jobs, minutes)


def run_all(
    trials: Iterable[Trial],
    work: Callable[[Trial], Result],
    keep: Callable[[Trial, Result], None],
    jobs: int = 1,
    minutes: float = float("inf"),
) -> int:
    """Run ``trials`` in order, ``jobs`` at a time, starting none after ``minutes``; returns how many failed.

    Args:
        work: one trial, in a thread; an :class:`InputError` of it is reported, and the next trials run all the same.
        keep: called in this thread with every result, as soon as it is there.
    """
    deadline = time.time() + 60 * minutes
    waiting, running, failed = iter(trials), {}, 0
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(running) < jobs and time.time() < deadline and (trial := next(waiting, None)) is not None:
                running[pool.submit(work, trial)] = trial
            if not running:
                return failed
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                failed += not _collect(running.pop(future), future, keep)


def _collect(trial: Trial, future: Future, keep: Callable[[Trial, Result], None]) -> bool:
    try:
        result = future.result()
    except InputError as error:
        print(f"failed: {trial}: {error}", file=sys.stderr, flush=True)
        return False
    keep(trial, result)
    return True
