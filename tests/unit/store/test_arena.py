from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.config import PAGE
from dataplane.store.arena import Arena, Extent

OWNERS = st.sampled_from(["a", "b", "c"])


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * PAGE)
    yield made
    made.close()


def fill(arena: Arena, extent: Extent, byte: int) -> None:
    with arena.view(extent) as view:
        view[:] = bytes([byte]) * extent.size


def holds(arena: Arena, extent: Extent, byte: int) -> bool:
    with arena.view(extent) as view:
        return bytes(view) == bytes([byte]) * extent.size


class ArenaUnderLoad(RuleBasedStateMachine):
    """Allocated, released, quarantined and made warm in any order, by owners that come and go: nobody's bytes change,
    and no segment carries bytes of two owners."""

    @initialize(capacity=st.integers(1, 40))
    def begin(self, capacity: int) -> None:
        self.arena = Arena(capacity * PAGE)
        self.live: dict[Extent, tuple[str, int]] = {}
        self.quarantined: list[Extent] = []
        self.writers: dict[int, str] = {}  # of each segment that ever was
        self.byte = 0

    @property
    def room(self) -> int:
        return (self.arena.capacity - self.arena.used) // PAGE

    @rule(owner=OWNERS, count=st.integers(1, 20), short=st.integers(0, PAGE - 1))
    def allocate(self, owner: str, count: int, short: int) -> None:
        if count > self.room:
            before = self.arena.used, self.arena.resident, self.arena.mapped
            with pytest.raises(MemoryError):
                self.arena.allocate(owner, count * PAGE - short)
            assert (self.arena.used, self.arena.resident, self.arena.mapped) == before
            return
        extent = self.arena.allocate(owner, count * PAGE - short)
        assert extent.size == count * PAGE
        assert extent.offset % PAGE == 0
        assert extent.end <= self.arena[extent.segment].size
        for other in (*self.live, *self.quarantined):
            apart = extent.end <= other.offset or other.end <= extent.offset
            assert extent.segment != other.segment or apart, "the addresses are in use"
        assert self.writers.setdefault(extent.segment, owner) == owner, "it could write over another's shard"
        self.byte = self.byte % 255 + 1
        fill(self.arena, extent, self.byte)
        self.live[extent] = (owner, self.byte)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(list(self.live)))
        del self.live[extent]
        self.arena.release(extent)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(list(self.live)))
        del self.live[extent]
        self.arena.punch(extent, 0, extent.size, extent.size)
        self.quarantined.append(extent)
        assert holds(self.arena, extent, 0), "its memory has gone back"

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def write_where_nobody_should(self, data: st.DataObject) -> None:
        fill(self.arena, data.draw(st.sampled_from(self.quarantined)), 255)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        extent = self.quarantined.pop(data.draw(st.integers(0, len(self.quarantined) - 1)))
        self.arena.readmit(extent)
        if extent.segment in self.arena:
            assert holds(self.arena, extent, 0), "what was written there meanwhile costs no memory"

    @rule(owner=OWNERS)
    def depart(self, owner: str) -> None:
        self.arena.depart(owner)
        self.writers = {n: f"{who} that was" if who == owner else who for n, who in self.writers.items()}

    @rule(owner=OWNERS, count=st.integers(0, 50))
    def prewarm(self, owner: str, count: int) -> None:
        segment, nbytes = self.arena.prewarm(owner, count * PAGE)
        assert 0 <= nbytes <= min(count * PAGE, self.arena.capacity)
        assert nbytes % PAGE == 0
        used = (*self.live, *self.quarantined)
        assert all(e.offset >= nbytes for e in used if e.segment == segment.number)
        assert self.writers.setdefault(segment.number, owner) == owner

    @invariant()
    def bounded(self) -> None:
        now = self.arena
        assert now.used == sum(extent.size for extent in self.live)
        assert now.used <= now.resident <= now.capacity
        warm = [held for segment in self.arena for held in segment.warm]
        assert now.resident == sum(end - start for start, end in warm)
        assert now.mapped == sum(segment.size for segment in self.arena)
        assert {e.segment for e in (*self.live, *self.quarantined)} <= {segment.number for segment in self.arena}

    @invariant()
    def unchanged(self) -> None:
        for extent, (_, byte) in self.live.items():
            assert holds(self.arena, extent, byte)

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()


TestArenaUnderLoad = ArenaUnderLoad.TestCase
TestArenaUnderLoad.settings = settings(stateful_step_count=40)


def test_released_and_punched_extents_return_memory_to_the_host(arena: Arena) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if setting.exists() and not {"[never]", "[deny]"} & set(setting.read_text().split()):
        pytest.skip("huge pages are on for shared memory, and are given back as whole ones only")

    def blocks() -> int:
        return sum(os.fstat(segment.fd).st_blocks * 512 for segment in arena)

    for owner in "abcd":
        extent = arena.allocate(owner, 40 * PAGE)
        fill(arena, extent, 1)
        assert blocks() == arena.resident <= arena.capacity
        arena.release(extent)
    held = arena.allocate("a", 10 * PAGE)
    fill(arena, held, 2)
    before = arena.resident
    arena.punch(held, 0, held.size, held.size)
    assert blocks() == arena.resident == before - 10 * PAGE
