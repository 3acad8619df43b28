"""Order is kept, few items are in memory at a time, and errors and killed workers are not lost."""

import os
import signal
import time

import pytest

from speech_mt.data import parallel_map as parallel_map_module
from speech_mt.data.parallel_map import parallel_map
from speech_mt.errors import InputError

_offset = 0


def set_offset(offset):
    global _offset
    _offset = offset


def add_offset(item):
    time.sleep(0.02 * (item % 2))  # so that they end in another order
    return item + _offset


def fail_at_two(item):
    if item == 2:
        raise InputError("two")
    return item


def kill_at_two(item):
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_results_are_in_order():
    assert list(parallel_map(add_offset, range(9), 3, set_offset, (100,))) == list(range(100, 109))


def test_items_are_read_as_results_are_taken():
    read = []

    def items():
        for item in range(1000):
            read.append(item)
            yield item

    results = parallel_map(add_offset, items(), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(read) <= 3 + 2 * 4
    results.close()
    assert len(read) <= 3 + 2 * 4


@pytest.mark.parametrize(("items", "most"), [(3, 3), (1000, 4 * len(os.sched_getaffinity(0))), (0, 0)])
def test_there_are_no_more_processes_than_there_is_work_for(monkeypatch, items, most):
    started = []
    real = parallel_map_module.ProcessPoolExecutor
    monkeypatch.setattr(
        parallel_map_module, "ProcessPoolExecutor", lambda n, **kw: started.append(n) or real(1, **kw)
    )
    assert list(parallel_map(abs, range(items), 100_000)) == list(range(items))
    assert sum(started) == most


def test_an_error_comes_at_its_turn():
    results = parallel_map(fail_at_two, range(5), 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(InputError, match="two"):
        next(results)


def test_a_killed_worker_is_a_message():
    with pytest.raises(InputError, match=r"killed, perhaps for lack of memory.*fewer --workers"):
        list(parallel_map(kill_at_two, range(5), 2))
