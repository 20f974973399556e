from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.clock import Deadline
from dataplane.config import PAGE
from dataplane.errors import LimitExceeded
from dataplane.store.budget import Budget, Holders, Purpose
from dataplane.store.shard import Shard
from dataplane.store.spill_file import SpillFile
from dataplane.store.stored import SPARE, Rooms, StoredBytes
from tests.cases import each_case
from tests.unit.store.stores import FakeClock

LONG = 20.0


class Waiters:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.granted: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, nbytes: int, purpose: Purpose = "put") -> asyncio.Task[None]:
        async def wait() -> None:
            await self.budget.reserve(nbytes, Deadline.after(LONG), purpose)
            self.granted.append(name)

        self.tasks[name] = task = asyncio.create_task(wait())
        await turns()
        return task

    async def free(self, nbytes: int) -> None:
        self.budget.release(nbytes)
        await turns()

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def turns() -> None:
    """Lets every task go on until it waits: none here waits for anything but the budget."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_small_request_passes_a_large_one_only_for_a_bounded_time() -> None:
    clock = FakeClock()
    budget = Budget(100, passing_s=1.0, clock=clock)
    assert budget.try_reserve(90)
    waiters = Waiters(budget)
    await waiters.ask("large", 80)
    clock.now = 1.0
    await waiters.ask("small", 5)
    assert waiters.granted == ["small"]
    assert budget.try_reserve(2)
    clock.now = 1.01
    assert not budget.try_reserve(1), "everything is kept for the large one"
    await waiters.ask("late", 1)
    await waiters.free(30)
    assert waiters.granted == ["small"]
    await waiters.free(47)
    assert waiters.granted == ["small", "large"]
    await waiters.free(1)
    assert waiters.granted == ["small", "large", "late"]


async def test_restores_are_granted_before_new_reservations() -> None:
    clock = FakeClock()
    budget = Budget(100, passing_s=1.0, clock=clock)
    assert budget.try_reserve(100)
    waiters = Waiters(budget)
    await waiters.ask("put", 40)
    await waiters.ask("restore", 40, "restore")
    await waiters.free(40)
    assert waiters.granted == ["restore"]
    clock.now = 10.0
    await waiters.free(30)
    assert budget.try_reserve(30, "restore"), "it waits for no put, however old"
    assert not budget.try_reserve(1)
    await waiters.end()


async def test_appends_leave_memory_for_extends_which_pass_them() -> None:
    clock = FakeClock()
    budget = Budget(160, passing_s=1.0, clock=clock)
    assert budget.try_reserve(75, "append")
    assert budget.try_reserve(75, "append")
    waiters = Waiters(budget)
    await waiters.ask("append", 1, "append")
    clock.now = 10.0
    assert not budget.shortfall, "it waits for fewer bytes in use, not for others to leave memory"
    assert budget.try_reserve(10, "extend"), "it waits for no append, however old"
    await waiters.ask("extend", 10, "extend")
    await waiters.free(10)
    assert waiters.granted == ["extend"]
    await waiters.free(11)
    assert waiters.granted == ["extend", "append"]
    await waiters.free(149)
    assert budget.try_reserve(159, "append"), "a large one may use all of the memory"


async def test_a_request_that_waits_for_stored_bytes_takes_no_memory_and_holds_up_no_restore() -> None:
    clock = FakeClock()
    stored = StoredBytes(100, lambda: 100, Rooms())
    budget = Budget(100, stored=stored, passing_s=1.0, clock=clock)
    assert budget.try_reserve(50)
    stored.add(spilled := Shard(1, 1, 1, 1, b"", "", "", 0, file=SpillFile(1, Path(), PAGE, ())))
    waiters = Waiters(budget)
    await waiters.ask("put", 10)
    assert not budget.shortfall
    clock.now = 2.0
    await waiters.ask("restore", 60, "restore")
    assert budget.shortfall == 10
    await waiters.free(10)
    assert waiters.granted == ["restore"]
    await waiters.free(60)
    stored.remove(spilled)
    budget.grant()
    await turns()
    assert waiters.granted == ["restore", "put"]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 110), st.booleans()),
        st.tuples(st.just("free"), st.integers(0, 9), st.just(False)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("time"), st.integers(0, 3), st.just(False)),
    ),
    max_size=40,
)


@given(actions)
def test_budget_accounting_holds_under_random_operations(done: list[tuple[str, int, bool]]) -> None:
    async def scenario() -> None:
        clock = FakeClock()
        budget = Budget(100, clock=clock)
        tasks: list[tuple[int, asyncio.Task[None]]] = []
        held: list[int] = []

        async def hold(nbytes: int, first: bool) -> None:
            await budget.reserve(nbytes, Deadline.after(LONG), "extend" if first else "put")
            held.append(nbytes)

        for what, number, flag in done:
            if what == "ask" and number > 100:
                with pytest.raises(LimitExceeded):
                    budget.try_reserve(number)
            elif what == "ask":
                tasks.append((number, asyncio.create_task(hold(number, flag))))
            elif what == "free" and held:
                budget.release(held.pop(number % len(held)))
            elif what == "cancel" and tasks:
                tasks[number % len(tasks)][1].cancel()
            elif what == "time":
                clock.now += number / 2
            assert 0 <= budget.used <= 100
            if not flag:
                await turns()
                assert budget.used == sum(held)
                waiting = [nbytes for nbytes, task in tasks if not task.done()]
                assert budget.statistics().waiting_bytes == sum(waiting)
                assert all(budget.used + nbytes > 100 for nbytes in waiting) or clock.now > 1
        await turns()
        while held or budget.statistics().waiting:
            assert held, "somebody waits while nothing is held"
            budget.release(held.pop())
            await turns()
        assert budget.used == 0
        assert all(task.done() for _, task in tasks)

    run(scenario)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


@pytest.mark.parametrize("disk", [0, 8 << 20, 32 << 20])
def test_appends_of_small_rows_leave_room_for_a_large_extend(disk: int) -> None:
    memory, row, used = 16 << 20, 20 << 10, 0
    rooms = Rooms()
    stored = StoredBytes(memory, lambda: disk, rooms)
    while stored.admits(used, row, row, spare=True):
        rooms.add(row)
        used += row
    assert stored.admits(used, memory // SPARE, memory // SPARE, spare=False)


def test_a_shard_that_is_larger_than_the_memory_leaves_the_disk_usable() -> None:
    rooms = Rooms()
    rooms.add(100)  # a copy of another host's shard, never read back here as a whole
    stored = StoredBytes(10, lambda: 50, rooms)
    assert [stored.admits(used, 1, 1, spare=False) for used in (39, 40)] == [True, False]


@each_case("owner, named", [("stream rollouts", True), ("scope streams", False), ("", False)])
def test_the_error_names_max_bytes_if_a_stream_holds_the_bytes(owner: str, named: bool) -> None:
    holder = {"holder": "rollout.py", "bytes": PAGE, "how": "stored", "owner": owner}
    error = Budget(PAGE, explain=lambda full: Holders((holder,))).backpressure(PAGE, Deadline.after(0.0))
    assert ("set `max_bytes` of the streams" in str(error)) == named
