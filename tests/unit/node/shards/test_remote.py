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
from dataplane.node.shards import reading
from dataplane.node.shards.reading import RemoteOperations, WantedRanges
from dataplane.node.shards.remote import Remote, Want
from tests.cases import each_case
from tests.unit.node.shards.members import Members

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


# What needs a host ends with it, and its caller's cancellations stay its caller's.


async def yes(node: bytes) -> bool:
    return True


async def wait(running: RemoteOperations, node: bytes) -> None:
    async with running.needing(node):
        await asyncio.Event().wait()


async def test_a_remote_operation_ends_when_its_host_is_lost() -> None:
    members = Members(b"b", b"c")
    running = RemoteOperations(members, yes)
    one, two, three = (asyncio.create_task(wait(running, node)) for node in (b"b", b"b", b"c"))
    await asyncio.sleep(0)
    members.lose(b"b")
    for each in (one, two):
        with pytest.raises(TimeoutError):
            await each
        assert not each.cancelled()
    assert not three.done()
    three.cancel()
    await asyncio.gather(three, return_exceptions=True)
    assert three.cancelled()
    assert not running._ends


async def test_a_cancellation_by_the_caller_prevails_over_the_loss_of_a_host() -> None:
    members = Members(b"a")
    running = RemoteOperations(members, yes)
    one = asyncio.create_task(wait(running, b"a"))
    await asyncio.sleep(0)
    members.lose(b"a")
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert one.cancelled()


async def test_a_remote_operation_ends_when_its_host_is_silent_and_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_LOOK_S", 0.01)
    asked: list[bytes] = []

    async def answers(node: bytes) -> bool:
        asked.append(node)
        return node != b"a"

    running = RemoteOperations(Members(b"a", b"b"), answers)
    one, two = (asyncio.create_task(wait(running, node)) for node in (b"a", b"b"))
    with pytest.raises(TimeoutError):
        await one
    while asked.count(b"b") < 3:
        await asyncio.sleep(0.001)
    assert not two.done()
    two.cancel()
    await asyncio.gather(two, return_exceptions=True)
    assert not running._asking
