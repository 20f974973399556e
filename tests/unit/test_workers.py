from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait

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


def test_results_and_errors_are_the_works_own(workers: Workers) -> None:
    assert workers.submit(divmod, 7, 2).result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 7, 0).result(60)


def test_want_of_memory_is_an_error_of_the_system(workers: Workers) -> None:
    def greedy() -> None:
        raise MemoryError

    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        workers.submit(greedy).result(60)
    assert caught.value.errno == errno.ENOMEM


def test_no_more_run_at_once_than_there_are_lanes(workers: Workers) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.0005)
        with lock:
            inside -= 1

    wait([workers.submit(work) for _ in range(100)], 60)
    assert most == 2


def test_late_work_gives_its_lane_to_a_spare_thread_and_takes_none_back(
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


def test_progress_keeps_work_from_being_late(workers: Workers) -> None:
    go, gone = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(60)
        workers.progress()
        gone.set()
        go.clear()
        go.wait(60)

    working = workers.submit(work)
    since = time.monotonic()
    while time.monotonic() - since < 0.02:
        pass
    go.set()
    gone.wait(60)
    workers.relieve(0.015)
    assert workers.late == 0
    go.set()
    working.result(60)


def test_where_all_threads_are_late_what_waits_is_refused_until_one_comes_back(
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


def test_closing_waits_for_what_has_begun_and_cancels_what_has_not() -> None:
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


def test_closing_does_not_wait_for_what_hangs(hang: Callable[[Workers], Future[bool]]) -> None:
    workers = Workers(1, 1, "test")
    hang(workers)
    workers.close(0.05)
    assert not workers.ended
    hang.over.set()  # type: ignore[attr-defined]
    workers.close(60)
    assert workers.ended


def test_where_a_thread_can_not_be_started_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, left = threading.active_count(), threading.Thread.start, [3]

    def some(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(OSError, match="no thread can be started: raise the limit"):
        Workers(2, 2, "test")
    assert threading.active_count() == before


def test_many_pieces_from_many_threads(workers: Workers) -> None:
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
