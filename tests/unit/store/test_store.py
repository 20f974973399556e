from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.config import PAGE, NodeConfig
from dataplane.errors import Backpressure, Corrupt, DataplaneError, Freed, LeaseExpired, LimitExceeded, ProtocolMismatch
from dataplane.store.arena import Extent
from dataplane.store.store import Store
from tests.cases import each_case
from tests.processes import WAIT_S, without_descriptors
from tests.unit.store.stores import FakeClock, content, moving, soon

MIB = 1 << 20
CAPACITY = MIB // PAGE
LEASE_S = 60.0
ROWS, COLUMNS = 4, 2


def layout(nbytes: int, *, rows: int = ROWS, offset: int = 0) -> bytes:
    """Two dense columns that fill `nbytes` between them."""
    width = nbytes // (COLUMNS * rows)
    field, size = Field("dense", "uint8", (width,)), rows * width
    columns = ((name, ColumnLayout(field, rows, rows, ((offset + i * size, size),))) for i, name in enumerate("ab"))
    return ShardLayout(tuple(columns)).encode()


def write(store: Store, extent: Extent, data: bytes) -> None:
    with store.arena.view(extent) as view:
        view[: len(data)] = data


def read(store: Store, extent: Extent, nbytes: int) -> bytes:
    with store.arena.view(extent) as view:
        return bytes(view[:nbytes])


def _settings(directory: Path, **changed: Any) -> dict[str, Any]:
    defaults = {"memory": MIB, "spill": 32 * MIB, "spill_dir": directory, "prewarm": 0, "reservation_lease_s": LEASE_S}
    return defaults | changed


def running(directory: Path, clock: FakeClock | None = None, **changed: Any) -> AbstractAsyncContextManager[Store]:
    return moving(_settings(directory, **changed), **({} if clock is None else {"clock": clock}))


@contextmanager
def refused(store: Store, *errors: type[DataplaneError]) -> Iterator[None]:
    before = store.statistics()
    with pytest.raises(errors):
        yield
    after = store.statistics()
    assert (after.shards, after.put, after.pinned) == (before.shards, before.put, before.pinned)
    assert after.budget.used <= before.budget.used


@dataclass
class Known:
    data: bytes
    scope: str
    live: np.ndarray[Any, Any]
    pages: int
    punch: bool = False  # the memory of what was freed of it may have gone

    def intact(self, found: bytes) -> bool:
        """Whether what still counts is as it was written."""
        if not self.punch:
            return found == self.data
        width = len(self.data) // self.live.size
        places = (np.flatnonzero(self.live) * width).tolist()
        return all(found[at : at + width] == self.data[at : at + width] for at in places)


CLIENTS = st.sampled_from(["a", "b", "c"])
SCOPES = st.sampled_from(["", "", "step-1", "step-2"])
PAGES = st.one_of(st.integers(1, 8), st.integers(1, 90))


class StoreAgainstAModel(RuleBasedStateMachine):
    """Everything that clients do, in any order, with a memory that is too small and a disk that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = FakeClock(1000.0)
        self.store = Store(NodeConfig(**_settings(Path(self.directory.name), compression="never")), clock=self.clock)
        self.mover = self.loop.create_task(self.store.residency.run())
        self.reserved: dict[int, tuple[str, Extent]] = {}
        self.revoked: dict[int, tuple[str, Extent]] = {}
        self.sealed: dict[int, Known] = {}
        self.pins: Counter[tuple[str, int]] = Counter()
        self.extents: dict[int, Extent] = {}  # of what is pinned
        self.freed: dict[int, Known] = {}  # that are pinned still
        self.gone: set[int] = set()
        self.seed = 0

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    # What the model says

    def held(self) -> set[int]:
        return {number for _, number in +self.pins}

    def known(self, number: int) -> Known:
        return self.sealed[number] if number in self.sealed else self.freed[number]

    def fixed(self) -> int:
        """Pages that can not be taken from anybody."""
        reserved = sum(extent.size for _, extent in self.reserved.values()) // PAGE
        return reserved + sum(self.store.shards.held(number).held // PAGE for number in self.held())

    def new(self, size: int) -> bytes:
        self.seed += 1
        return content(self.seed, size)

    def forget(self, number: int) -> None:
        known = self.sealed.pop(number)
        self.gone.add(number)
        if number in self.held():
            self.freed[number] = known

    def let_go(self) -> None:
        for number in set(self.extents) - self.held():
            del self.extents[number]
            self.freed.pop(number, None)

    # What clients do

    @rule(client=CLIENTS, sizes=st.lists(PAGES, min_size=1, max_size=4))
    def reserve(self, client: str, sizes: list[int]) -> None:
        nbytes = [size * PAGE - 8 for size in sizes]
        if sum(sizes) > CAPACITY:
            with pytest.raises(LimitExceeded):
                self.run(self.store.reservations.reserve(client, nbytes, soon()))
            return
        if sum(sizes) + self.fixed() > CAPACITY:
            with pytest.raises(Backpressure) as caught:
                self.run(self.store.reservations.reserve(client, nbytes, Deadline.after(0.002)))
            assert caught.value.needed == sum(sizes) * PAGE
            assert sum(holder["bytes"] for holder in caught.value.holders) >= self.fixed() * PAGE
            return
        made = self.store.reservations.reserve_now(client, nbytes) or self.run(
            self.store.reservations.reserve(client, nbytes, soon())
        )
        assert [r.extent.size for r in made] == [size * PAGE for size in sizes]
        self.reserved |= {r.shard: (client, r.extent) for r in made}

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), scope=SCOPES, hold=st.booleans())
    def seal(self, data: st.DataObject, scope: str, hold: bool) -> None:
        client = data.draw(st.sampled_from(sorted({client for client, _ in self.reserved.values()})))
        mine = sorted(number for number, (who, _) in self.reserved.items() if who == client)
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        made = {}
        for number in chosen:
            extent = self.reserved[number][1]
            made[number] = self.new(extent.size)
            write(self.store, extent, made[number])
        sealed = [(number, layout(len(made[number]))) for number in chosen]
        self.store.seal(client, sealed, scope=scope, holder=client, hold=hold)
        for number in chosen:
            _, extent = self.reserved.pop(number)
            live = np.ones((COLUMNS, ROWS), bool)
            self.sealed[number] = Known(made[number], scope, live, extent.size // PAGE)
            if hold:
                self.pins[client, number] += 1
                self.extents[number] = extent

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), client=CLIENTS)
    def seal_what_is_anothers_or_false(self, data: st.DataObject, client: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.reserved)))
        owner, extent = self.reserved[number]
        with pytest.raises((ProtocolMismatch, Corrupt)):
            self.store.seal(client, [(number, layout(2 * extent.size))], scope="", holder=client)
        if owner == client:
            del self.reserved[number]

    @precondition(lambda self: self.reserved or self.revoked)
    @rule(data=st.data(), client=CLIENTS)
    def abort(self, data: st.DataObject, client: str) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.reserved | self.revoked)), min_size=1))
        self.store.reservations.abort(client, numbers)
        for number in numbers:
            for place in (self.reserved, self.revoked):
                if number in place and place[number][0] == client:
                    del place[number]

    @rule(client=CLIENTS, size=PAGES, scope=SCOPES)
    def put_now(self, client: str, size: int, scope: str) -> None:
        made = self.new(size * PAGE)
        number = self.store.put_now(client, made, layout(len(made)), scope=scope, holder=client)
        if number is None:
            if size + self.fixed() > CAPACITY:
                return
            put = self.store.put(client, made, layout(len(made)), soon(), scope=scope, holder=client)
            number = self.run(put)
        self.sealed[number] = Known(made, scope, np.ones((COLUMNS, ROWS), bool), size)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data(), client=CLIENTS)
    def pin(self, data: st.DataObject, client: str) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.sealed)), min_size=1, max_size=5))
        asked = sum(self.sealed[number].pages for number in set(numbers))
        more = sum(self.sealed[number].pages for number in set(numbers) - self.held())
        pinned = None if asked > CAPACITY else self.store.pin_now(client, numbers)
        if asked > CAPACITY:
            with pytest.raises(LimitExceeded) as refused:
                self.run(self.store.pin(client, numbers, soon()))
            assert (refused.value.asked, refused.value.limit) == (asked * PAGE, MIB)
            return
        if pinned is None and more + self.fixed() > CAPACITY:
            with pytest.raises(Backpressure):
                self.run(self.store.pin(client, numbers, Deadline.after(0.002)))
            return
        pinned = pinned or self.run(self.store.pin(client, numbers, soon()))
        assert [p.shard for p in pinned] == numbers
        for p in pinned:
            known = self.sealed[p.shard]
            assert self.extents.setdefault(p.shard, p.extent) == p.extent, "it has moved"
            assert p.layout == layout(len(known.data))
            for column, live in enumerate(known.live):
                assert live.all() if p.cells is None else np.array_equal(p.cells.flags(column, 0, len(live)), live)
            self.pins[client, p.shard] += 1

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), client=CLIENTS)
    def pin_what_is_gone(self, data: st.DataObject, client: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.gone)))
        numbers = [*sorted(self.sealed)[:2], number]
        for attempt in (self.store.pin_now, lambda *asked: self.run(self.store.pin(*asked, soon()))):
            with pytest.raises(Freed) as caught:
                attempt(client, numbers)
            assert caught.value.shard == number

    @precondition(lambda self: self.held())
    @rule(data=st.data(), client=CLIENTS)
    def unpin(self, data: st.DataObject, client: str) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.held())), min_size=1, max_size=6))
        self.store.unpin(client, numbers)
        for number in numbers:
            self.pins[client, number] = max(0, self.pins[client, number] - 1)
        self.let_go()

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.sealed)), min_size=1, max_size=4))
        self.store.free([*numbers, *sorted(self.gone)[:1]])
        for number in set(numbers):
            self.forget(number)

    @precondition(lambda self: self.sealed)
    @rule(
        data=st.data(),
        columns=st.lists(st.integers(0, COLUMNS - 1), min_size=1),
        rows=st.lists(st.integers(0, ROWS - 1), min_size=1),
        punch=st.booleans(),
    )
    def free_part(self, data: st.DataObject, columns: list[int], rows: list[int], punch: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.sealed)))
        self.store.free_part(number, columns, RowIndices.index(sorted(set(rows))), punch=punch)
        self.sealed[number].punch |= punch
        self.sealed[number].live[np.ix_(sorted(set(columns)), sorted(set(rows)))] = False
        if not self.sealed[number].live.any():
            self.forget(number)

    @rule(scope=st.sampled_from(["step-1", "step-2", "no such"]))
    def free_scope(self, scope: str) -> None:
        self.store.free(self.store.shards.under(scope))
        for number in [number for number, known in self.sealed.items() if known.scope == scope]:
            self.forget(number)

    @rule(client=CLIENTS)
    def leave(self, client: str) -> None:
        self.store.leave(client)
        self.reserved = {number: item for number, item in self.reserved.items() if item[0] != client}
        self.revoked = {number: item for number, item in self.revoked.items() if item[0] != client}
        for key in [key for key in self.pins if key[0] == client]:
            del self.pins[key]
        self.let_go()

    @rule(client=CLIENTS)
    def all_but_one_fall_silent(self, client: str) -> None:
        self.clock.now += LEASE_S + 1
        self.store.reservations.touch(client)
        expected = {who for who, _ in self.reserved.values()} - {client}
        assert set(self.store.reservations.revoke_silent()) == expected
        for number in [number for number, (who, _) in self.reserved.items() if who != client]:
            self.revoked[number] = self.reserved.pop(number)

    @precondition(lambda self: self.revoked)
    @rule(data=st.data())
    def seal_too_late(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.revoked)))
        client, extent = self.revoked.pop(number)
        with pytest.raises(LeaseExpired):
            self.store.seal(client, [(number, layout(extent.size))], scope="", holder=client)

    # What always holds

    @invariant()
    def accounts_agree(self) -> None:
        now = self.store.statistics()
        assert now.budget.used == self.store.arena.used <= now.resident <= now.budget.capacity == MIB
        assert now.peak <= MIB
        assert now.reserved == sum(extent.size for _, extent in self.reserved.values())
        pinned = [self.known(number) for number in self.held()]
        assert now.pinned <= sum(known.pages for known in pinned) * PAGE
        assert now.pinned >= sum(known.pages for known in pinned if not known.punch) * PAGE
        assert now.shards == len(self.sealed)
        assert now.budget.waiting == 0
        assert now.disk.used <= now.disk.quota

    @invariant()
    def pinned_bytes_are_those_that_were_written(self) -> None:
        for number, extent in self.extents.items():
            known = self.known(number)
            assert known.intact(read(self.store, extent, len(known.data)))

    @invariant()
    def nothing_lies_over_anything_else(self) -> None:
        places = [extent for _, extent in (*self.reserved.values(), *self.revoked.values())]
        places = sorted([*places, *self.extents.values()], key=lambda e: (e.segment, e.offset))
        assert all(a.segment != b.segment or a.end <= b.offset for a, b in itertools.pairwise(places))

    def teardown(self) -> None:
        try:
            self.run(self.end())
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.directory.cleanup()

    async def end(self) -> None:
        """Each shard is what was put, and afterwards nothing is left."""
        store = self.store
        try:
            for client in "abc":
                store.leave(client)
            for number, known in self.sealed.items():
                (pinned,) = await store.pin("a", [number], soon())
                assert known.intact(read(store, pinned.extent, len(known.data)))
                store.unpin("a", [number])
            store.free(list(self.sealed))
            async with asyncio.timeout(WAIT_S):
                while store.budget.used or store.disk.used:
                    assert not self.mover.done()
                    await asyncio.sleep(0)
            now = store.statistics()
            assert (store.arena.used, now.shards, now.pinned, now.reserved, now.holders) == (0, 0, 0, 0, ())
            assert now.put == now.freed
            assert store.disk.directory is not None
            assert os.listdir(store.disk.directory) == []
        finally:
            self.mover.cancel()
            await asyncio.gather(self.mover, return_exceptions=True)
            await store.aclose()
        assert os.listdir(self.directory.name) == []


TestStoreAgainstAModel = StoreAgainstAModel.TestCase
TestStoreAgainstAModel.settings = settings(stateful_step_count=40)


def nonsense() -> dict[str, bytes]:
    texts = ColumnLayout(Field("text"), 3, 3, ((0, 32), (64, 5)))
    return {
        "no layout": b"",
        "no message": b"\xc1",
        "another message": b"\x93\x01\x02\x03",
        "beyond the extent": layout(2 * PAGE),
        "not aligned": layout(PAGE // 2, offset=8),
        "no columns": ShardLayout(()).encode(),
        "more than there is": layout(PAGE, rows=8)[:-3] + b"\xcd\xff\xff",
        "offsets that do not rise": ShardLayout((("x", texts),)).encode(),
    }


@each_case("what", nonsense())
async def test_an_invalid_layout_is_refused_and_its_reservation_is_returned(tmp_path: Path, what: str) -> None:
    async with running(tmp_path) as store:
        (good, bad) = await store.reservations.reserve("a", [PAGE, PAGE], soon())
        write(store, bad.extent, b"\xff" * PAGE)
        with refused(store, Corrupt, ProtocolMismatch):
            store.seal("a", [(good.shard, layout(PAGE)), (bad.shard, nonsense()[what])], scope="s", holder="a")
        assert (store.budget.used, store.arena.used, store.statistics().reserved) == (0, 0, 0)
        with refused(store, Corrupt, ProtocolMismatch):
            store.put_now("a", b"\xff" * PAGE, nonsense()[what], scope="s", holder="a")
        with refused(store, Corrupt, ProtocolMismatch):
            await store.put("a", b"\xff" * PAGE, nonsense()[what], soon(), scope="s", holder="a")
        assert store.budget.used == 0
        with pytest.raises(Freed):
            store.pin_now("a", [good.shard])
        store.free(store.shards.under("s"))


async def test_a_kept_shard_that_lands_in_a_larger_reservation_counts_with_the_size_of_that(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        number = store.keep("owner", PAGE, layout(PAGE), b"handle", scope="", holder="owner", tell=lambda *_: None)
        (reserved,) = await store.reservations.reserve("owner", [2 * PAGE], soon())
        store.land("owner", number, reserved.shard)
        assert store.shards.rooms.largest == store.budget.used == 2 * PAGE
        store.free([number])
        assert store.shards.rooms.largest == store.budget.used == 0


async def test_readers_that_need_each_others_pinned_shards_do_not_deadlock(tmp_path: Path) -> None:
    """Six shards of 48 pages in memory for five; each reader wants four, and two of them are wanted by both."""
    async with running(tmp_path) as store:
        size = 48 * PAGE
        data = [content(seed, size) for seed in range(6)]
        numbers = [await store.put("p", d, layout(size), soon(), scope="", holder="p") for d in data]
        rounds = 15

        async def reader(name: str, wanted: list[int]) -> int:
            done = 0
            for _ in range(rounds):
                pinned = await store.pin(name, [numbers[i] for i in wanted], soon())
                assert [read(store, p.extent, size) for p in pinned] == [data[i] for i in wanted]
                await asyncio.sleep(0)
                store.unpin(name, [p.shard for p in pinned])
                done += 1
            return done

        async with asyncio.timeout(WAIT_S):
            done = await asyncio.gather(reader("a", [0, 1, 2, 3]), reader("b", [2, 3, 4, 5]), reader("c", [5, 4, 1, 0]))
        assert done == [rounds] * 3
        assert store.statistics().pinned == 0


async def test_a_slow_restore_is_reported_as_slow_and_not_as_lack_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as store:
        size = 200 * PAGE
        data = [content(seed, size) for seed in range(2)]
        first, _ = [await store.put("p", d, layout(size), soon(), scope="", holder="p") for d in data]
        go_on, reading, read_file = asyncio.Event(), asyncio.Event(), store.disk.read

        async def slow(*args: Any) -> None:
            reading.set()
            await go_on.wait()
            await read_file(*args)

        monkeypatch.setattr(store.disk, "read", slow)
        begun = asyncio.create_task(store.pin("p", [first], soon()))
        await reading.wait()  # room was made, which takes time on a busy machine
        begun.cancel()
        for _ in range(2):
            with pytest.raises(Backpressure, match="still being read from disk") as caught:
                await store.pin("r", [first], Deadline.after(0.1))
            assert caught.value.needed == size
        assert store.statistics().pinned == 0
        go_on.set()
        (pinned,) = await store.pin("r", [first], soon())
        assert read(store, pinned.extent, size) == data[0]


async def test_a_restore_without_free_descriptors_is_backpressure_and_loses_no_shard(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        size = 200 * PAGE
        data = [content(seed, size) for seed in range(2)]
        first, second = [await store.put("p", d, layout(size), soon(), scope="", holder="p") for d in data]
        assert store.pin_now("r", [second])
        store.unpin("r", [second])
        with without_descriptors(), pytest.raises(Backpressure, match="Too many open files"):
            await store.pin("r", [first], Deadline.after(0.3))
        assert store.statistics().pinned == 0
        (pinned,) = await store.pin("r", [first], soon())
        assert read(store, pinned.extent, size) == data[0]
