"""Turns at a loop: by the caller, by the keeper, ended under waiting calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from dataplane.client import turns as module
from dataplane.client.turns import Turns
from dataplane.errors import Closed, Misuse
from tests.cases import each_case
from tests.processes import eventually


@pytest.fixture
def turns() -> Iterator[Turns]:
    turns = Turns()
    yield turns
    turns.close()


async def value(what: Any) -> Any:
    await asyncio.sleep(0)
    return what


async def failure() -> None:
    await asyncio.sleep(0)
    raise KeyError("it")


class Call:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, turns: Turns, make: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(turns, make), daemon=True)
        self._thread.start()

    def _run(self, turns: Turns, make: Callable[[], Any]) -> None:
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


def test_a_result_and_an_error(turns: Turns) -> None:
    assert turns.wait(value(7)) == 7
    with pytest.raises(KeyError, match="it"):
        turns.wait(failure())
    assert turns.wait(value(8)) == 8


def test_it_runs_in_the_callers_thread_when_nobody_else_calls(turns: Turns) -> None:
    async def where() -> int:
        return threading.get_ident()

    assert turns.wait(where()) == threading.get_ident()


def test_a_call_while_anothers_turn_lasts(turns: Turns) -> None:
    gate = Gate()
    first = Call(turns, gate.passed)
    assert gate.entered.wait(60)
    assert turns.wait(value(1)) == 1  # handed over, and run in the first one's turn
    with pytest.raises(KeyError):
        turns.wait(failure())
    turns.wait(gate.opened())
    assert first.join().result == "passed"


def test_what_was_handed_over_goes_on_when_the_turn_ends(turns: Turns) -> None:
    first, second = Gate(), Gate()
    leader = Call(turns, first.passed)
    assert first.entered.wait(60)
    follower = Call(turns, second.passed)
    assert second.entered.wait(60)
    turns.wait(first.opened())
    leader.join()
    turns.wait(second.opened())
    assert follower.join().result == "passed"


async def test_where_a_loop_runs_in_the_callers_thread() -> None:
    turns = Turns()
    try:
        assert turns.wait(value(3)) == 3
        with pytest.raises(KeyError):
            turns.wait(failure())
    finally:
        turns.close()


def test_within_itself_it_is_refused(turns: Turns) -> None:
    async def outer() -> None:
        turns.wait(value(1))

    with pytest.raises(Misuse, match="within"):
        turns.wait(outer())
    assert turns.wait(value(2)) == 2


def test_closing_waits_for_what_was_handed_over() -> None:
    turns = Turns()
    gate = Gate()
    first = Call(turns, gate.passed)
    assert gate.entered.wait(60)
    others = [Call(turns, gate.passed) for _ in range(3)]
    eventually(lambda: len(turns._waiting) == 3, "they were handed over")
    closer = threading.Thread(target=turns.close, daemon=True)
    turns.wait(gate.opened())
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    assert [call.join().result for call in (first, *others)] == ["passed"] * 4


def test_calls_against_the_close() -> None:
    """Each either runs to its end or is refused; none hangs."""
    for _ in range(60):
        turns = Turns()
        together = threading.Barrier(4)

        def call(turns: Turns = turns, together: threading.Barrier = together) -> Any:
            together.wait()
            return value(5)

        calls = [Call(turns, call) for _ in range(3)]
        together.wait()
        turns.close()
        for done in calls:
            done.join()
            assert done.result == 5 or isinstance(done.error, Closed)


def test_a_little_work(turns: Turns) -> None:
    done: list[int] = []
    turns.soon(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]  # nobody had the turn
    gate = Gate()
    call = Call(turns, gate.passed)
    assert gate.entered.wait(60)
    turns.soon(lambda: done.append(0))
    eventually(lambda: done[1:] == [0], "the one whose turn it is does it")
    turns.wait(gate.opened())
    call.join()


def test_busy_keeps_the_loop_going(turns: Turns) -> None:
    """Timers go on while `busy` says so, although nobody calls."""
    ticks: list[float] = []
    wanted = True
    turns.busy = lambda: wanted

    async def start() -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            ticks.append(time.monotonic())
            if wanted:
                loop.call_later(0.01, tick)

        tick()

    turns.wait(start())
    eventually(lambda: len(ticks) > 5, "it ticks")
    wanted = False
    turns.wait(value(1))  # which ends it


@pytest.mark.parametrize("over", [False, True], ids=["own turn", "handed over"])
def test_an_error_keeps_nothing_alive(turns: Turns, over: bool) -> None:
    """No cycle through the error's frames: what the call held goes with the error, not with the next collection."""

    class Held:
        pass

    async def fail(held: Held) -> None:
        await asyncio.sleep(0)
        raise KeyError

    def call() -> weakref.ref[Held]:
        held = Held()
        gone = weakref.ref(held)
        try:
            turns.wait(fail(held))
        except KeyError:
            pass
        return gone

    gate = Gate()
    first = Call(turns, gate.passed) if over else None
    if first is not None:
        assert gate.entered.wait(60)
    gc.collect()
    gc.disable()
    try:
        gone = call()
        if over:
            turns.wait(gate.opened())
            assert first is not None
            first.join()
        eventually(lambda: gone() is None, "it is gone")
    finally:
        gc.enable()


class Interrupting:
    """Sends SIGINT before the `step`-th instruction that this thread executes in turns, or in what waits there."""

    FILES = (module.__file__, threading.__file__, concurrent.futures._base.__file__)

    def __init__(self, step: int) -> None:
        self.left = step

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
                signal.raise_signal(signal.SIGINT)
        return self._trace


@each_case("over", [False, True], ids=["own turn", "handed over"])
@each_case("soon", [False, True], ids=["call", "a little work"])
def test_interrupted_at_any_step(over: bool, soon: bool) -> None:
    """Each interrupt is raised, once; no turn stays taken, and nothing is left that is waited for."""
    interrupted = 0

    def attempt(turns: Turns, step: int) -> bool:
        """Whether there was such a step."""
        nonlocal interrupted
        before = interrupted
        work = value(step)
        point = Interrupting(step)
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

    turns = Turns()
    gate = Gate()
    try:
        leader = Call(turns, gate.passed) if over else None
        assert not over or gate.entered.wait(60)
        for step in range(1, 2000):
            if not attempt(turns, step):
                break
            if leader is None:
                eventually(lambda: not turns._turn.locked(), f"the turn is given back after step {step}")
            eventually(lambda: not turns._waiting, f"nothing is waited for after step {step}")
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"step {step}"
            if step % 20 == 0:  # another thread's
                assert Call(turns, lambda: value(3)).join().result == 3
        assert 50 < step < 1999
        if leader is not None:
            Call(turns, gate.opened).join()
            assert leader.join().result == "passed"
    finally:
        turns._loop.call_soon_threadsafe(gate.event.set)
        closer = threading.Thread(target=turns.close, daemon=True)
        closer.start()
        closer.join(60)
        assert not closer.is_alive()
