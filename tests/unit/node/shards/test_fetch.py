"""What is asked of a node that does not answer, by real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member
from dataplane.errors import Freed, OutcomeUnknown, PeerUnavailable
from dataplane.node.shards import fetch, pending_changes
from dataplane.node.shards.fetch import Fetcher
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.shards.remote import Want
from dataplane.store.store import Store
from dataplane.transport.choice import TransportChoice
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers
from tests.cases import each_case
from tests.keys import KEY
from tests.processes import WAIT_S, until
from tests.unit.node.shards.members import ME, Members
from tests.unit.store.stores import content, layout, moving

ANY, OWNER = "tcp://127.0.0.1:0", b"owner..."
NBYTES = 64
MIB = 1 << 20
Answer = Callable[[Any], Awaitable[Message]]


class Owner:
    """Has every shard but the `freed` ones. It answers while `go` is set; `asked`: the shards asked for."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.peers = Peers(OWNER.hex(), ANY, KEY, answer or self._answer)
        self.freed: set[int] = set()
        self.asked: list[int] = []
        self.go = asyncio.Event()
        self.go.set()

    async def _answer(self, request: Any) -> Message:
        if isinstance(request, pm.FreeParts):
            self.freed |= {number for number, *_ in request.parts}
            return pm.PartsFreed(request.id, [])
        if not isinstance(request, pm.DescribeShards):
            return Done(request.id)
        self.asked += request.shards
        await self.go.wait()
        for number in request.shards:
            if number in self.freed:
                raise Freed(f"shard {number} was freed", shard=number)
        encoded = layout(NBYTES)
        return pm.Described(request.id, [(NBYTES, 1, 1, encoded, [], content(n, NBYTES)) for n in request.shards])


@asynccontextmanager
async def owning(answer: Answer | None = None) -> AsyncIterator[tuple[Owner, Peers, Members]]:
    """An owner, which may answer otherwise; the sockets of another node; and its members, the owner among them."""
    owner, mine = Owner(answer), Peers(ME.hex(), ANY, KEY, lambda request: Done(request.id))
    owner.peers.start()
    mine.start()
    try:
        yield owner, mine, Members(of={OWNER: Member(1, owner.peers.address)})
    finally:
        await mine.aclose()
        await owner.peers.aclose()


@asynccontextmanager
async def fetching(
    directory: Path, answer: Answer | None = None
) -> AsyncIterator[tuple[Fetcher, Store, Owner, Members]]:
    async with (
        owning(answer) as (owner, mine, members),
        moving({"memory": MIB, "spill": 0, "spill_dir": directory}) as store,
    ):
        fetcher = Fetcher(ME, store, mine, members, TransportChoice(()))
        yield fetcher, store, owner, members
        await fetcher.aclose()


async def test_an_unanswered_free_has_an_unknown_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the owner is a member; what one that has ended had is gone anyhow."""
    monkeypatch.setattr(fetch, "_CONTROL_S", 0.1)
    heard = asyncio.Event()

    async def answer(request: Any) -> Message:
        heard.set()
        await asyncio.Event().wait()
        return Done(request.id)

    async with fetching(tmp_path, answer) as (fetcher, _, _, members):
        with pytest.raises(OutcomeUnknown, match="free it again"):
            await fetcher.free(OWNER, [(1, [0], (0, 1, b""))])
        await heard.wait()
        members.lose(OWNER)
        await fetcher.free(OWNER, [(1, [0], (0, 1, b""))])


@each_case("how", ["cancelled", "not answered in time"])
async def test_a_retain_that_fails_has_retained_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The owner has made the links, and answers once the caller has gone."""
    if how != "cancelled":
        monkeypatch.setattr(fetch, "_CONTROL_S", 0.1)
    heard, go = asyncio.Event(), asyncio.Event()
    freed: list[int] = []

    async def answer(request: Any) -> Message:
        if isinstance(request, pm.FreeParts):
            freed.extend(number for number, *_ in request.parts)
            return pm.PartsFreed(request.id, [])
        heard.set()
        await go.wait()
        return pm.Linked(request.id, [7])

    async with fetching(tmp_path, answer) as (fetcher, _, _, _):
        retaining = asyncio.create_task(fetcher.retain(OWNER, [(1, [([0], (0, 1, b""))])]))
        await heard.wait()
        if how == "cancelled":
            retaining.cancel()
        with pytest.raises((PeerUnavailable, asyncio.CancelledError)):
            await retaining
        go.set()
        await until(lambda: freed == [7])


# Copies that are forgotten or freed while others are described.

ROW: list[Want] = [((0,), RowIndices.range(0, 1), [])]


async def find(fetcher: Fetcher, *shards: int) -> list[int]:
    return await fetcher.find([(OWNER, shard, ROW) for shard in shards], Deadline.after(WAIT_S))


def read(store: Store, numbers: list[int]) -> list[bytes]:
    pinned = store.pin_now("reader", numbers)
    assert pinned is not None
    found = [store.arena.read(each.extent)[:NBYTES] for each in pinned]
    store.unpin("reader", numbers)
    return found


async def test_copies_named_by_a_request_are_not_evicted_for_its_other_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest copies are, and become the newest by being asked for."""
    monkeypatch.setattr(fetch, "MAX_COPIES", 3)
    async with fetching(tmp_path) as (fetcher, store, owner, _):
        await find(fetcher, 1, 2, 3)
        numbers = await find(fetcher, 2, 1, 4)
        assert read(store, numbers) == [content(shard, NBYTES) for shard in (2, 1, 4)]
        assert fetcher.copies == 3
        assert owner.asked == [1, 2, 3, 4]


async def test_shards_pinned_for_fetches_have_a_readable_holder_name(tmp_path: Path) -> None:
    async with fetching(tmp_path) as (fetcher, store, _, _):
        numbers = await find(fetcher, 1)
        assert store.pin_now(fetcher, numbers)
        (held,) = store.statistics().holders
        assert (held["holder"], held["how"]) == ("reads of other nodes' shards", "pinned")
        store.unpin(fetcher, numbers)


async def test_a_copy_freed_by_another_client_during_a_fetch_raises_freed(tmp_path: Path) -> None:
    async with fetching(tmp_path) as (fetcher, _, owner, _):
        await find(fetcher, 1)
        owner.go.clear()
        finding = asyncio.create_task(find(fetcher, 1, 2))
        await until(lambda: owner.asked == [1, 2])
        await fetcher.free(OWNER, [(1, [0], RowIndices.range(0, 1).encode())])
        owner.go.set()
        with pytest.raises(Freed, match="shard 1 was freed"):
            await finding


# Shards from before a restart.


async def test_frees_of_many_shards_from_before_a_restart_are_one_message_to_each_member(tmp_path: Path) -> None:
    heard: list[Any] = []

    async def answer(request: Any) -> Message:
        heard.append(request)
        return Done(request.id)

    async with fetching(tmp_path, answer) as (fetcher, store, _, _):
        needed = NeededShards(ME, store)
        needed.free_lost = fetcher.free_lost
        recovered = [store.put_now("c", content(1, 64), layout(64), scope="", holder="c") for _ in range(3)]
        store.first = 100
        store.free(number for number in recovered if number is not None)
        await until(lambda: heard)
        needed.free_parts([(number, (0,), RowIndices.range(0, 1)) for number in (50, 51)])
        await until(lambda: len(heard) >= 2)
        assert [{number for number, *_ in each.parts} for each in heard] == [{*recovered}, {50, 51}]


@each_case("why", ["this node has not joined", "the owner is away"])
async def test_a_free_that_reaches_no_owner_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(fetch, "_CONTROL_S", 0.1)
    async with fetching(tmp_path) as (fetcher, _, _, members):
        there = members.members[OWNER]
        members.lose(OWNER)
        if why == "the owner is away":
            members._missing[OWNER.hex()] = there, members._clock()
        else:
            members._seen.clear()
        with pytest.raises(OutcomeUnknown, match="may come back; its own copy is not freed: free it again"):
            await fetcher.free(OWNER, [(1, [0], RowIndices.range(0, 1).encode())])


async def note_changes(changes: list[tuple[type[Any], int]], request: Any) -> Message:
    """Answer as an owner that does what it is asked to."""
    if isinstance(request, pm.RetainReplicas):
        changes.append((type(request), request.links[0][0]))
    elif isinstance(request, pm.FreeParts | pm.FreeReplicas):
        changes.append((type(request), request.parts[0][0]))
    return pm.PartsFreed(request.id, []) if isinstance(request, pm.FreeParts) else Done(request.id)


@each_case("what", ["a shard of the node", "a replica there"])
async def test_changes_for_an_absent_node_are_sent_in_order_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(pending_changes, "_AGAIN_S", 0.01)
    changes: list[tuple[type[Any], int]] = []
    async with fetching(tmp_path, partial(note_changes, changes)) as (fetcher, store, _, members):
        there = members.members[OWNER]
        number = store.put_now("c", content(1, 64), layout(64), scope="", holder="c")
        assert number is not None
        await fetcher.replicas.copy(pm.CopyShards(1, [number], OWNER, WAIT_S))
        members.lose(OWNER)
        members._missing[OWNER.hex()] = there, members._clock()
        expected: list[tuple[type[Any], int]] = [(pm.FreeParts, number)]
        if what == "a replica there":
            (link,) = store.owners.retain([(number, [((0,), RowIndices.range(0, 1))])], holder="c")
            store.free([number])
            expected = [(pm.RetainReplicas, link), (pm.FreeReplicas, number)]
        else:
            with pytest.raises(OutcomeUnknown):
                await fetcher.free(OWNER, [(number, [0], RowIndices.range(0, 1).encode())])
        await asyncio.sleep(0)
        members._say({OWNER: there})
        await until(lambda: len(changes) >= len(expected))
        assert changes == expected


async def test_frees_before_the_node_has_joined_are_sent_once_it_has(tmp_path: Path) -> None:
    changes: list[tuple[type[Any], int]] = []
    async with fetching(tmp_path, partial(note_changes, changes)) as (fetcher, _, _, members):
        there = members.members[OWNER]
        members.lose(OWNER)
        members._seen.clear()
        fetcher.free_lost([(50, (0,), RowIndices.range(0, 1))])
        freeing = asyncio.create_task(fetcher.free(OWNER, [(60, [0], RowIndices.range(0, 1).encode())]))
        await asyncio.sleep(0)
        members._say({OWNER: there})
        members._seen.set()
        await freeing
        await until(lambda: len(changes) >= 2)
        assert set(changes) == {(pm.FreeReplicas, 50), (pm.FreeParts, 60)}


async def test_shards_lost_by_a_restart_are_found_once_the_node_has_joined_and_are_bounded_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_COPIES", 2)

    async def answer(request: Any) -> Message:
        if isinstance(request, pm.FindReplicas):
            return pm.FoundReplicas(request.id, request.shards)
        described = [(NBYTES, 1, 1, layout(NBYTES), [], content(number, NBYTES)) for number in request.shards]
        return pm.Described(request.id, described)

    async with fetching(tmp_path, answer) as (fetcher, _, _, members):
        there = members.members[OWNER]
        members.lose(OWNER)
        members._seen.clear()
        regaining = asyncio.create_task(fetcher.regain([1], Deadline.after(WAIT_S)))
        await asyncio.sleep(0)
        members._say({OWNER: there})
        members._seen.set()
        assert list(await regaining) == [1]
        for shard in (2, 3):
            assert list(await fetcher.regain([shard], Deadline.after(WAIT_S))) == [shard]
        assert fetcher.copies == 2


# Replicas that their owner frees while they are being stored.


@each_case("times", [1, 2])
async def test_a_replica_that_is_freed_while_it_waits_for_memory_does_not_stay(tmp_path: Path, times: int) -> None:
    async with fetching(tmp_path) as (fetcher, store, _, _):
        replicas = fetcher.replicas
        (held,) = await store.reservations.reserve("client", [MIB], Deadline.after(WAIT_S))
        taking = [
            asyncio.create_task(replicas.take(pm.TakeReplicas(number, OWNER, [1, 2], WAIT_S)))
            for number in range(times)
        ]
        await until(lambda: store.budget.statistics().waiting == times)
        replicas.free(OWNER, [(1, [], (0, 0, b""))])
        store.reservations.abort("client", [held.shard])
        await asyncio.gather(*taking)
        assert replicas.here((OWNER, 1)) is None
        assert list(store.shards) == [replicas.here((OWNER, 2))]
        assert not replicas._taking


async def test_replicas_that_no_stream_has_taken_are_freed_when_their_owner_ends(tmp_path: Path) -> None:
    """Nobody has references to them: the append ended with the owner. Those of a put stay."""
    async with fetching(tmp_path) as (fetcher, store, _, _):
        replicas, needed = fetcher.replicas, NeededShards(ME, store)
        needed.replica, replicas.freeing = replicas.here, needed.free_replica
        await replicas.take(pm.TakeReplicas(1, OWNER, [1, 2], WAIT_S, staged=True))
        await replicas.take(pm.TakeReplicas(2, OWNER, [3], WAIT_S))
        needed._needed[OWNER, 2] += 1  # a stream has taken it
        replicas.gone(OWNER)
        assert [replicas.here((OWNER, shard)) is not None for shard in (1, 2, 3)] == [False, True, True]
        needed.unneed([(OWNER, 2)])
        assert list(store.shards) == [replicas.here((OWNER, 3))]
        assert not replicas._staged
