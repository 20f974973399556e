"""Turns at a loop: by the caller, by the background thread, ended under waiting calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from dataplane.client import loop_runner as module
from dataplane.client.blocking import Blocking
from dataplane.client.loop_runner import LoopRunner
from dataplane.errors import Misuse
from tests.cases import each_case
from tests.processes import eventually


@pytest.fixture
def turns() -> Iterator[LoopRunner]:
    turns = LoopRunner()
    yield turns
    turns.close()


async def value(what: Any) -> Any:
    await asyncio.sleep(0)
    return what


class Call:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, turns: LoopRunner, make: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(turns, make), daemon=True)
        self._thread.start()

    def _run(self, turns: LoopRunner, make: Callable[[], Any]) -> None:
        try:
            self.result = turns.wait(make())
        except BaseException as error:
            self.error = error

    def join(self) -> Call:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the call hangs"
        return self


class Gate:
    """Something to wait for on the loop, opened from outside."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.entered = threading.Event()

    async def passed(self) -> str:
        self.entered.set()
        await self.event.wait()
        return "passed"

    async def opened(self) -> None:
        self.event.set()


def test_a_nested_blocking_wait_is_misuse(turns: LoopRunner) -> None:
    async def outer() -> None:
        turns.wait(value(1))

    with pytest.raises(Misuse, match="within"):
        turns.wait(outer())
    assert turns.wait(value(2)) == 2


def test_a_wait_within_a_little_work_is_misuse_and_more_work_is_done_later(turns: LoopRunner) -> None:
    later = threading.Event()

    def work() -> None:
        turns.soon(later.set)
        assert not turns.free
        assert not later.is_set()
        turns.wait(value(1))

    def make() -> Any:
        with pytest.raises(Misuse, match="within"):
            turns.soon(work)
        assert later.wait(60)
        return value(2)

    assert Call(turns, make).join().result == 2


def test_a_handler_that_another_handler_set_during_a_call_stays(turns: LoopRunner) -> None:
    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_IGN))
    try:
        turns.wait(interrupted())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@each_case("over", [False, True], ids=["own turn", "handed over"])
def test_an_error_of_a_signals_handler_cancels_the_call_and_closes_its_iterator(turns: LoopRunner, over: bool) -> None:
    gate, closed = Gate(), threading.Event()

    async def items() -> AsyncIterator[int]:
        main = threading.main_thread().ident
        try:
            asyncio.get_running_loop().call_soon(signal.pthread_kill, main, signal.SIGTERM)
            await asyncio.Event().wait()
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.set()

    leader = Call(turns, gate.passed) if over else None
    assert leader is None or gate.entered.wait(60)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            next(Blocking(None, turns.wait, turns)._each(items()))
    finally:
        signal.signal(signal.SIGTERM, before)
        assert leader is None or (turns.wait(gate.opened()), leader.join().result) == (None, "passed")
    assert closed.is_set()
    eventually(lambda: not turns._waiting, "nothing is waited for")


class Interrupting:
    """Sends a signal before the `step`-th instruction that this thread executes in turns, or in what waits there."""

    FILES = (module.__file__, threading.__file__, concurrent.futures._base.__file__)

    def __init__(self, step: int, number: int) -> None:
        self.left = step
        self._number = number

    def __enter__(self) -> Interrupting:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(self._number)
        return self._trace


@each_case("over", [False, True], ids=["own turn", "handed over"])
@each_case("soon", [False, True], ids=["call", "a little work"])
@each_case("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_any_step_is_raised_once_and_leaves_nothing_waiting(
    over: bool, soon: bool, number: int
) -> None:
    interrupted = 0

    def attempt(turns: LoopRunner, step: int) -> bool:
        nonlocal interrupted
        before = interrupted
        work = value(step)
        point = Interrupting(step, number)
        try:
            try:
                with point:
                    if soon:
                        turns.soon(lambda: None)
                    else:
                        assert turns.wait(work) == step
                deadline = time.monotonic() + 10
                while point.left <= 0 and time.monotonic() < deadline:  # it came too late, and is sent again
                    time.sleep(0.0001)
            except KeyboardInterrupt:
                interrupted += 1
        finally:
            sys.settrace(None)
            work.close()
        assert interrupted - before == (point.left <= 0), f"step {step}"
        return point.left <= 0

    turns = LoopRunner()
    gate = Gate()
    handler = signal.signal(number, signal.default_int_handler)
    try:
        leader = Call(turns, gate.passed) if over else None
        assert not over or gate.entered.wait(60)
        for step in range(1, 2000):
            if not attempt(turns, step):
                break
            if leader is None:
                eventually(lambda: turns.free, f"the turn is given back after step {step}")
            eventually(lambda: not turns._waiting, f"nothing is waited for after step {step}")
            assert signal.getsignal(number) is signal.default_int_handler, f"step {step}"
            if step % 20 == 0:  # another thread's
                assert Call(turns, lambda: value(3)).join().result == 3
        assert 50 < step < 1999
        if leader is not None:
            Call(turns, gate.opened).join()
            assert leader.join().result == "passed"
    finally:
        signal.signal(number, handler)
        turns._loop.call_soon_threadsafe(gate.event.set)
        closer = threading.Thread(target=turns.close, daemon=True)
        closer.start()
        closer.join(60)
        assert not closer.is_alive()
