"""The thread that makes batches ahead of the training (--data-buffer-size)."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any


def prefetching_outlives_the_training() -> bool:
    from fairseq.data import iterators

    return iterators.BackgroundConsumer.__module__ == iterators.__name__


def end_prefetching_at_exit() -> None:
    """At exit let the thread finish the batch it is making, and no more."""
    from fairseq.data import iterators

    running: weakref.WeakSet[StoppableConsumer] = weakref.WeakSet()

    class StoppableConsumer(iterators.BackgroundConsumer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.stopped = threading.Event()
            self._source = until(self.stopped, self._source)
            running.add(self)

        def run(self) -> None:
            super().run()
            self._source = None  # a loader whose last batch was taken ends its workers when nobody holds it

        def stop(self) -> None:
            """Make room for what it waits to put, until it has seen that it should stop."""
            self.stopped.set()
            while self.is_alive():
                try:
                    self._queue.get(timeout=0.05)
                except queue.Empty:
                    self.join(timeout=0.05)

    def stop_all() -> None:
        for consumer in list(running):
            consumer.stop()

    iterators.BackgroundConsumer = StoppableConsumer
    atexit.register(stop_all)


def until(stopped: threading.Event, source: Iterable[Any]) -> Iterator[Any]:
    """The items of ``source``, and the end once ``stopped`` is set."""
    for item in source:
        if stopped.is_set():
            return
        yield item
