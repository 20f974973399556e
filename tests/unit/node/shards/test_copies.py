"""Copies that are forgotten or freed while others are described."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.errors import Freed
from dataplane.node.shards import fetch
from dataplane.node.shards.fetch import Fetcher
from dataplane.node.shards.remote import Want
from dataplane.store.store import Store
from dataplane.transport.choice import TransportChoice
from tests.processes import WAIT_S, until
from tests.unit.node.shards.members import ME
from tests.unit.node.shards.owners import NBYTES, OWNER, Owner, owning
from tests.unit.store.stores import content, moving

ROW: list[Want] = [((0,), RowIndices.range(0, 1), [])]


@pytest.fixture
async def fetching(tmp_path: Path) -> AsyncIterator[tuple[Fetcher, Store, Owner]]:
    async with (
        owning() as (owner, peers, members),
        moving({"memory": 1 << 20, "spill": 0, "spill_dir": tmp_path}) as store,
    ):
        fetcher = Fetcher(ME, store, peers, members, TransportChoice(()))
        yield fetcher, store, owner
        await fetcher.aclose()


async def find(fetcher: Fetcher, *shards: int) -> list[int]:
    return await fetcher.find([(OWNER, shard, ROW) for shard in shards], Deadline.after(WAIT_S))


def read(store: Store, numbers: list[int]) -> list[bytes]:
    pinned = store.pin_now("reader", numbers)
    assert pinned is not None
    found = [store.arena.read(each.extent)[:NBYTES] for each in pinned]
    store.unpin("reader", numbers)
    return found


async def test_copies_named_by_a_request_are_not_evicted_for_its_other_copies(
    fetching: tuple[Fetcher, Store, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest copies are, and become the newest by being asked for."""
    fetcher, store, owner = fetching
    monkeypatch.setattr(fetch, "MAX_COPIES", 3)
    await find(fetcher, 1, 2, 3)
    numbers = await find(fetcher, 2, 1, 4)
    assert read(store, numbers) == [content(shard, NBYTES) for shard in (2, 1, 4)]
    assert fetcher.copies == 3
    assert owner.asked == [1, 2, 3, 4]


async def test_shards_pinned_for_fetches_have_a_readable_holder_name(fetching: tuple[Fetcher, Store, Owner]) -> None:
    fetcher, store, _ = fetching
    numbers = await find(fetcher, 1)
    assert store.pin_now(fetcher, numbers)
    (held,) = store.statistics().holders
    assert (held["holder"], held["how"]) == ("reads of other nodes' shards", "pinned")
    store.unpin(fetcher, numbers)


async def test_a_copy_freed_by_another_client_during_a_fetch_raises_freed(
    fetching: tuple[Fetcher, Store, Owner],
) -> None:
    fetcher, _, owner = fetching
    await find(fetcher, 1)
    owner.go.clear()
    finding = asyncio.create_task(find(fetcher, 1, 2))
    await until(lambda: owner.asked == [1, 2])
    await fetcher.free(OWNER, [(1, [0], RowIndices.range(0, 1).encode())])
    owner.go.set()
    with pytest.raises(Freed, match="shard 1 was freed"):
        await finding
