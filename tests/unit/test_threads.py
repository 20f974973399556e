from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane.threads import together


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_are_in_order(pool: ThreadPoolExecutor, count: int) -> None:
    assert together(pool, lambda x: x * x, range(count)) == [x * x for x in range(count)]


def test_threads_of_the_pool_help(pool: ThreadPoolExecutor) -> None:
    meeting = threading.Barrier(3, timeout=10)  # which needs three at once
    threads = together(pool, lambda _: (meeting.wait(), threading.get_ident())[1], range(3))
    assert len(set(threads)) == 3


def test_a_pool_that_is_busy_is_not_waited_for(pool: ThreadPoolExecutor) -> None:
    """Also where it is busy with the same: who plans waits for nobody who plans."""
    inside = [pool.submit(together, pool, str, range(50)) for _ in range(20)]
    assert [each.result(10) for each in inside] == [list(map(str, range(50)))] * 20
    go = threading.Event()
    busy = [pool.submit(go.wait, 10) for _ in range(2)]
    assert together(pool, str, range(3)) == ["0", "1", "2"]
    assert not any(each.done() for each in busy)
    go.set()


def test_a_pool_that_is_shut_down_is_done_without() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    assert together(pool, str, range(3)) == ["0", "1", "2"]


@pytest.mark.parametrize("who", ["caller", "helper"])
def test_what_is_raised_comes_when_all_have_stopped(who: str) -> None:
    caller, both, done = threading.get_ident(), threading.Barrier(2, timeout=10), []

    def work(item: int) -> None:
        if item < 2:
            both.wait()
            if (threading.get_ident() == caller) == (who == "caller"):
                raise IndexError("of the work")
        done.append(item)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(IndexError, match="of the work"):
            together(pool, work, range(1000))
        after = len(done)
        pool.submit(int).result(10)
        assert len(done) == after
