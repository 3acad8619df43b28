"""Runs of a study, a few at a time, a row each."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """Worker processes with a thread each, which import what they need themselves; Ctrl-C ends them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def run_all(
    trials: Iterable[Trial],
    work: Callable[[Trial], Result],
    keep: Callable[[Trial, Result], None],
    jobs: int = 1,
    minutes: float = float("inf"),
    workers: Callable[[int], AbstractContextManager[Executor]] = ThreadPoolExecutor,
) -> int:
    """Run ``trials`` in order, ``jobs`` at a time, starting none after ``minutes``; returns how many failed.

    Args:
        trials: each is asked for when it is to start, so that a generator can leave some out for what came before.
        work: one trial, in a worker. If it fails this is reported, and the next trials run all the same.
        keep: called in this thread with every result, as soon as it is there.
        workers: of ``jobs`` -> what runs the work: threads, for those who start commands, or :func:`processes`.

    Raises:
        InputError: a worker process was killed.
    """
    deadline = time.time() + 60 * minutes
    waiting, running, failed = iter(trials), {}, 0
    with workers(jobs) as pool:
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
    except BrokenProcessPool:
        raise InputError(f"{trial}: a worker was killed, perhaps for want of memory; try fewer --jobs") from None
    except Exception as error:
        if not isinstance(error, InputError):
            traceback.print_exception(error)
        print(f"failed: {trial}: {error}", file=sys.stderr, flush=True)
        return False
    keep(trial, result)
    return True
