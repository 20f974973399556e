"""The parts of a shard that several readers want, while they come and after they did not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dataplane.batch.byte_ranges import ByteRanges, total
from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.rows import RowIndices
from dataplane.errors import PeerUnavailable
from dataplane.node.shards.reading import WantedRanges
from dataplane.node.shards.remote import Remote, Want
from tests.cases import each_case

ROWS, ROW = 1024, 1024
SIZE = ROWS * ROW
CONTENT = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
LAYOUT = ShardLayout((("x", ColumnLayout(Field("dense", "uint8", (ROW,)), ROWS, ROWS, ((0, SIZE),))),)).encode()


class Owner:
    """Sends what is read, once `go` is set, or else fails."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked = asyncio.Event()
        self.gone = False

    async def read(self, wanted: WantedRanges) -> ByteRanges:
        self.asked.set()
        await self.go.wait()
        if self.gone:
            raise PeerUnavailable("it does not answer")
        for start, stop in wanted.ranges:
            wanted.memory[start:stop] = CONTENT[start:stop].data
        return wanted.ranges


def rows(start: int, stop: int) -> list[Want]:
    return [((0,), RowIndices.range(start, stop), [])]


def there(memory: np.ndarray, start: int, stop: int) -> bool:
    return np.array_equal(memory[start * ROW : stop * ROW], CONTENT[start * ROW : stop * ROW])


async def partly(owner: Owner) -> tuple[Remote, np.ndarray]:
    """A shard whose first row is in memory."""
    remote, memory = Remote(owner, b"owner", 1, LAYOUT, SIZE, whole=False), np.zeros(SIZE, np.uint8)  # type: ignore[arg-type]
    remote.want(rows(0, 1))
    await remote.read(memory.data)
    assert there(memory, 0, 1)
    assert not there(memory, 1, 2)
    assert not remote.want(rows(0, 1))
    assert remote.covers(rows(0, 1))
    return remote, memory


@each_case("stop", [4, ROWS])  # some rows; or all, so that the whole shard is wanted from then on
@each_case("how", ["fails", "is cancelled"])
async def test_a_byte_range_whose_fetch_fails_is_fetched_by_the_next_reader(stop: int, how: str) -> None:
    owner = Owner()
    remote, memory = await partly(owner)
    owner.go.clear()
    owner.asked.clear()
    assert remote.want(rows(0, stop))
    first = asyncio.create_task(remote.add(memory.data))
    await owner.asked.wait()
    assert remote.want(rows(0, stop)), "it is known, and not here"
    assert not remote.covers(rows(0, stop))
    second = asyncio.create_task(remote.add(memory.data))
    if how == "fails":
        owner.gone = True
        owner.go.set()
        for each in (first, second):
            with pytest.raises(PeerUnavailable):
                await each
        owner.gone = False
    else:
        first.cancel()
        await asyncio.wait([first])
        second.cancel()
        await asyncio.wait([second])
        owner.go.set()
    assert remote.want(rows(0, stop))
    await remote.add(memory.data)
    assert there(memory, 0, stop)
    assert not remote.want(rows(0, stop))
    assert remote.covers(rows(0, stop))


async def test_a_byte_range_requested_during_a_fetch_is_fetched_next() -> None:
    owner = Owner()
    remote, memory = await partly(owner)
    owner.go.clear()
    owner.asked.clear()
    assert remote.want(rows(1, 2))
    first = asyncio.create_task(remote.add(memory.data))
    await owner.asked.wait()
    assert remote.want(rows(2, 3))
    owner.go.set()
    await first
    assert there(memory, 1, 2)
    assert not there(memory, 2, 3)
    assert remote.want(rows(1, 2)), "another part is behind"
    await remote.add(memory.data)
    assert there(memory, 1, 3)
    assert not remote.want([*rows(1, 2), *rows(2, 3)])
    assert total(remote._there) < SIZE
