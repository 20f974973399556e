from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from dataplane.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2, 2, "test")
    yield made
    made.close(60)
    assert made.ended


@pytest.fixture
def hang() -> Iterator[Callable[[Workers], Future[bool]]]:
    """Gives workers a piece of work that hangs until the test is over; it runs when this returns."""
    over = threading.Event()

    def give(workers: Workers) -> Future[bool]:
        begun = threading.Event()
        given = workers.submit(lambda: (begun.set(), over.wait(60))[1])
        assert begun.wait(60)
        return given

    give.over = over  # type: ignore[attr-defined]
    yield give
    over.set()


def test_late_work_is_replaced_by_a_spare_thread_until_it_ends(
    workers: Workers, hang: Callable[[Workers], Future[bool]]
) -> None:
    hung = [hang(workers) for _ in range(2)]
    later = workers.submit(int)
    workers.relieve(60)
    assert not later.done(), "nothing is late"
    workers.relieve(0)
    assert later.result(60) == 0
    assert workers.late == 2
    hang.over.set()  # type: ignore[attr-defined]
    assert all(each.result(60) for each in hung)
    meeting = threading.Barrier(3)  # which needs three threads at once
    meetings = [workers.submit(meeting.wait, 0.2) for _ in range(3)]
    with pytest.raises(threading.BrokenBarrierError):
        [each.result(60) for each in meetings]
    assert workers.late == 0


def test_waiting_work_is_refused_while_all_threads_are_late(
    workers: Workers, hang: Callable[[Workers], Future[bool]]
) -> None:
    hung = [hang(workers) for _ in range(2)]
    workers.relieve(0)
    hung += [hang(workers) for _ in range(2)]
    waiting = workers.submit(int)
    workers.relieve(0)
    with pytest.raises(TimeoutError, match="4 requests") as caught:  # which is what OSError makes of ETIMEDOUT
        waiting.result(60)
    assert caught.value.errno == errno.ETIMEDOUT
    with pytest.raises(OSError, match="have not been answered"):
        workers.submit(int)
    hang.over.set()  # type: ignore[attr-defined]
    assert all(each.result(60) for each in hung)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert workers.submit(int).result(60) == 0
            break
        except OSError:
            assert time.monotonic() < deadline


def test_closing_waits_for_running_work_and_cancels_pending_work() -> None:
    workers = Workers(1, 1, "test")
    begun, go = threading.Event(), threading.Event()
    running = workers.submit(lambda: (begun.set(), go.wait(60))[1])
    waiting = workers.submit(int)
    assert begun.wait(60)
    threading.Timer(0.02, go.set).start()
    workers.close(60)
    assert workers.ended
    assert running.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)
    with pytest.raises(OSError, match="stops"):
        workers.submit(int)


def test_closing_does_not_wait_for_hanging_work(hang: Callable[[Workers], Future[bool]]) -> None:
    workers = Workers(1, 1, "test")
    hang(workers)
    workers.close(0.05)
    assert not workers.ended
    hang.over.set()  # type: ignore[attr-defined]
    workers.close(60)
    assert workers.ended


def test_work_submitted_by_many_threads_is_completed(workers: Workers) -> None:
    done: list[list[int]] = []

    def give() -> None:
        done.append([workers.submit(abs, -i).result(60) for i in range(200)])

    threads = [threading.Thread(target=give) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        workers.relieve(0)  # at any moment
    for thread in threads:
        thread.join()
    assert done == [list(range(200))] * 4
