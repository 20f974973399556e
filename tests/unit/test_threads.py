from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane.clock import Deadline, monotonic
from dataplane.closing import close_each
from dataplane.threads import Pool, together
from tests.cases import each_case


def test_shared_work_does_not_wait_for_a_busy_pool() -> None:
    with ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(together, pool, str, range(50)) for _ in range(20)]
        assert [each.result(60) for each in inside] == [list(map(str, range(50)))] * 20
        go = threading.Event()
        busy = [pool.submit(go.wait, 10) for _ in range(2)]
        assert together(pool, str, range(3)) == ["0", "1", "2"]
        assert not any(each.done() for each in busy)
        go.set()


@each_case("who", ["caller", "helper"])
def test_an_exception_is_raised_after_all_workers_have_stopped(who: str) -> None:
    caller, both, done = threading.get_ident(), threading.Barrier(2, timeout=60), []

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
        pool.submit(int).result(60)
        assert len(done) == after


@pytest.fixture
def threads() -> Iterator[Pool]:
    made = Pool(2, "test")
    yield made
    made.shutdown()


def test_work_that_gets_no_thread_is_refused_and_never_done(threads: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library's pool keeps it, and does it whenever a thread comes."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[str] = []
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="no thread can be started"):
            threads.submit(done.append, "refused")
        assert asyncio.run(threads.aside(done.append, "by the caller")) is None
    threads.submit(done.append, "later").result(60)
    threads.shutdown()
    assert done == ["by the caller", "later"]


def test_a_hanging_pool_thread_does_not_prevent_process_exit() -> None:
    code = "import time; from dataplane.threads import Pool; Pool(1, 'x').submit(time.sleep, 600); print('over')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "over\n"


def test_a_pool_thread_holds_no_reference_to_finished_work(threads: Pool) -> None:
    class Held:
        pass

    held = Held()
    gone = threading.Event()
    weakref.finalize(held, gone.set)
    threads.submit(id, held).result(60)
    del held
    assert gone.wait(60)


def test_a_pool_of_storage_has_all_threads_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(3, "test", storage=True)
    meeting = threading.Barrier(3)
    starts = iter([threading.Thread.start] * 2)

    def start(thread: threading.Thread) -> None:
        try:
            next(starts)(thread)
        except StopIteration:
            raise RuntimeError("can't start new thread") from None

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="no thread can be started: raise the limit"):
        Pool(3, "test", storage=True)
    assert threading.active_count() == before
    assert sorted(each.result(60) for each in [pool.submit(meeting.wait, 60) for _ in range(3)]) == [0, 1, 2]
    pool.shutdown()


def test_too_little_memory_for_work_of_storage_is_an_error_of_the_system() -> None:
    def work() -> None:
        raise MemoryError

    pool = Pool(1, "test", storage=True)
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        pool.submit(work).result(60)
    assert caught.value.errno == errno.ENOMEM
    pool.shutdown()


def test_shutdown_waits_for_hanging_work_for_a_limited_time() -> None:
    pool, begun, go = Pool(1, "test", storage=True), threading.Event(), threading.Event()
    running = pool.submit(lambda: (begun.set(), go.wait(60))[1])
    waiting = pool.submit(int)
    assert begun.wait(60)
    pool.shutdown(cancel_futures=True, patience_s=0.05)
    assert waiting.cancelled()
    assert not pool.ended
    with pytest.raises(OSError, match="have ended"):
        pool.submit(int)
    go.set()
    pool.shutdown(patience_s=60)
    assert pool.ended
    assert running.result(0)


class Parts:
    """Things to close, which note that they were."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def at_once(self) -> None:
        self.closed.append("at once")

    async def later(self) -> None:
        await asyncio.sleep(0)
        self.closed.append("later")

    async def failing(self) -> None:
        self.closed.append("failing")
        raise OSError("the first")

    def failing_too(self) -> None:
        raise ValueError("the last")

    async def hanging(self) -> None:
        self.closed.append("hanging")
        await asyncio.Event().wait()


async def test_a_failing_close_skips_no_other_and_all_errors_are_reported() -> None:
    parts = Parts()
    with pytest.raises(OSError, match="the first") as raised:
        await close_each(parts.at_once, parts.failing, parts.later, parts.failing_too, parts.at_once)
    assert parts.closed == ["at once", "failing", "later", "at once"]
    assert raised.value.__notes__ == ["closing failed too: ValueError('the last')"]


async def test_a_hanging_close_is_cancelled_and_the_other_closes_are_called() -> None:
    parts = Parts()
    with pytest.raises(TimeoutError):
        await close_each(parts.hanging, parts.at_once, within_s=0.01)
    assert parts.closed == ["hanging", "at once"]


async def test_a_cancelled_close_still_calls_the_other_closes() -> None:
    parts = Parts()
    closing = asyncio.create_task(close_each(parts.hanging, parts.later))
    while not parts.closed:
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert parts.closed == ["hanging", "later"]


def test_a_jump_of_wall_time_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(1000)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert monotonic is time.monotonic
    assert 990 < deadline.remaining_s <= 1000
