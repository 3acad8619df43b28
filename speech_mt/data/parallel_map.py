"""A function over many items by several processes, with few items in memory at a time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import TypeVar

from speech_mt.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 4  # items a worker, being worked on or waiting


def bounded(workers: int) -> int:
    """``workers``, but no more than four a core: these would take memory and time to start, and do nothing faster."""
    return min(workers, 4 * len(os.sched_getaffinity(0)))


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple = (),
) -> Iterator[Result]:
    """Yield ``function(item)`` in the order of ``items``, computed by ``workers`` processes.

    ``items`` is read as work proceeds and results wait for the consumer, so that neither is ever held whole.

    Args:
        function, items: what is sent to a process, so both must pickle.
        workers: processes; fewer if there are fewer items, or see :func:`bounded`.
        initializer, initargs: called once in each process.

    Raises:
        InputError: a process was killed, as happens when memory runs out.
        Exception: whatever ``function`` raises, at the item's turn.
    """
    items = iter(items)
    first = list(islice(items, bounded(workers)))
    if not first:
        return
    workers = len(first)
    pool = ProcessPoolExecutor(workers, initializer=_start, initargs=(initializer, initargs))
    pending: deque[Future[Result]] = deque()
    try:
        for item in chain(first, items):
            pending.append(pool.submit(function, item))
            if len(pending) >= _AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise InputError(
            "a worker process was killed, perhaps for lack of memory: run this again with fewer --workers; "
            "what is done is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(initializer: Callable[..., None] | None, initargs: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with_parent() -> None:
    """A worker would wait for work for ever if the process that sends it were killed."""
    wait([parent_process().sentinel])
    os._exit(1)
