"""Turns at a loop: by the caller, by the keeper, ended under waiting calls."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dataplane.client.turns import Turns
from dataplane.errors import Closed, Misuse
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
        self._thread.join(10)
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
    assert gate.entered.wait(10)
    assert turns.wait(value(1)) == 1  # handed over, and run in the first one's turn
    with pytest.raises(KeyError):
        turns.wait(failure())
    turns.wait(gate.opened())
    assert first.join().result == "passed"


def test_what_was_handed_over_goes_on_when_the_turn_ends(turns: Turns) -> None:
    first, second = Gate(), Gate()
    leader = Call(turns, first.passed)
    assert first.entered.wait(10)
    follower = Call(turns, second.passed)
    assert second.entered.wait(10)
    turns.wait(first.opened())
    leader.join()
    turns.wait(second.opened())
    assert follower.join().result == "passed"


def test_many_threads(turns: Turns) -> None:
    calls = [Call(turns, lambda i=i: value(i)) for i in range(50)]  # type: ignore[misc]
    assert [call.join().result for call in calls] == list(range(50))


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
    assert gate.entered.wait(10)
    others = [Call(turns, gate.passed) for _ in range(3)]
    eventually(lambda: len(turns._waiting) == 3, "they were handed over")
    closer = threading.Thread(target=turns.close, daemon=True)
    turns.wait(gate.opened())
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert [call.join().result for call in (first, *others)] == ["passed"] * 4


def test_closed(turns: Turns) -> None:
    turns.close()
    turns.close()
    with pytest.raises(Closed):
        turns.wait(value(1))


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
    assert gate.entered.wait(10)
    turns.soon(lambda: done.append(0))
    eventually(lambda: done[1:] == [0], "the one whose turn it is does it")
    turns.wait(gate.opened())
    call.join()


def test_a_little_work_after_the_close(turns: Turns) -> None:
    done: list[int] = []
    turns.close()
    turns.soon(lambda: done.append(1))
    assert done == [1]


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
        assert gate.entered.wait(10)
    gc.collect()
    gc.disable()
    try:
        gone = call()
        if over:
            turns.wait(gate.opened())
            assert first is not None
            first.join()
        eventually(lambda: gone() is None, "it is gone", timeout_s=1)
    finally:
        gc.enable()
