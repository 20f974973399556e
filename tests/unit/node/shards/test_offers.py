"""What others may read of a node: real memory, files and sockets, and no other node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Freed, PeerUnavailable, ProtocolMismatch
from dataplane.node.shards import offers
from dataplane.node.shards.offers import SHARED, Offers
from dataplane.store.store import Store
from dataplane.transport.channels import TransportError
from dataplane.transport.tcp import Tcp
from dataplane.wire import peer_messages as pm
from tests.processes import until
from tests.unit.store.test_store import MIB, layout, running

ME, THEM, OTHERS = b"me", b"them", b"others"
SIZE = 2 * SHARED


class NoCopies:
    def __init__(self) -> None:
        self.strangers = {b"stranger"}
        self.copies: dict[tuple[bytes, int], int] = {}

    def member(self, node: bytes) -> bool:
        return node not in self.strangers

    def copy(self, owner: bytes, shard: int) -> int | None:
        return self.copies.get((owner, shard))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with running(tmp_path, memory=8 * MIB, compression="never") as made:
        yield made


@pytest.fixture
async def tcp() -> AsyncIterator[Tcp]:
    transport = Tcp("127.0.0.1")
    await transport.start()
    yield transport
    await transport.aclose()


@pytest.fixture
async def offered(store: Store, tcp: Tcp) -> AsyncIterator[Offers]:
    made = Offers(ME, store, (tcp,), NoCopies().member, NoCopies().copy)
    yield made
    await made.aclose()
    assert len(made) == 0
    assert store.statistics().pinned == 0


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(SIZE)


async def put(store: Store, seed: int) -> int:
    (made,) = await store.reservations.reserve("client", [SIZE], Deadline.after(5))
    with store.arena.view(made.extent) as view:
        view[:] = content(seed)
    store.seal("client", [(made.shard, layout(SIZE))], scope="", holder="client")
    return made.shard


def offer(shard: int, node: bytes = THEM, timeout_s: float = 5.0, **more: object) -> pm.Offer:
    return pm.Offer(1, node, shard, "tcp", timeout_s, **more)  # type: ignore[arg-type]


def on_disk(directory: Path, shard: int) -> bool:
    return bool(list(directory.rglob(f"{shard:016x}.spill")))


async def read(tcp: Tcp, ticket: bytes) -> bytes:
    target = bytearray(SIZE)
    await tcp.read(tcp.address, ticket, memoryview(target), 5.0)
    return bytes(target)


async def test_an_offered_shard_is_held_until_it_has_been_read(store: Store, tcp: Tcp, offered: Offers) -> None:
    shard = await put(store, 1)
    ticket = (await offered.offer(offer(shard))).ticket
    store.free([shard])
    assert store.statistics().budget.used == SIZE
    assert await read(tcp, ticket) == content(1)
    offered.withdraw(pm.Withdraw(1, OTHERS, ticket, SIZE))
    assert len(offered) == 1, "it is another's"
    offered.withdraw(pm.Withdraw(1, THEM, ticket, SIZE))
    await until(lambda: not len(offered) and store.statistics().budget.used == 0)
    assert offered.sent_bytes == SIZE
    with pytest.raises(TransportError):
        await read(tcp, ticket)
    with pytest.raises(Freed):
        await offered.offer(offer(shard))


async def test_an_offered_spill_file_remains_readable_after_its_deletion(
    store: Store, tcp: Tcp, offered: Offers, tmp_path: Path
) -> None:
    """What is on disk takes no memory; freed meanwhile it is as whoever reads was promised."""
    shards = [await put(store, seed) for seed in range(8)]
    await until(lambda: store.statistics().spilled_shards)
    spilled = next(seed for seed, shard in enumerate(shards) if not store.shards.ready(shard))
    assert on_disk(tmp_path, shards[spilled])
    before, descriptors = store.statistics().budget.used, len(os.listdir("/proc/self/fd"))
    made = await offered.offer(offer(shards[spilled], checks=True))
    assert made.sums == xxhash.xxh3_64_digest(content(spilled))[::-1]
    assert store.statistics().budget.used == before
    store.free([shards[spilled]])
    await until(lambda: not on_disk(tmp_path, shards[spilled]))
    assert await read(tcp, made.ticket) == content(spilled)
    offered.withdraw(pm.Withdraw(1, THEM, made.ticket))
    await until(lambda: not len(offered))
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert store.statistics().disk.read == 0


async def test_a_node_that_leaves_while_waiting_gets_no_offer(
    store: Store, tcp: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offer would be there until it runs out."""
    monkeypatch.setattr(offers, "MAX_OFFERS", 1)
    others = NoCopies()
    made = Offers(ME, store, (tcp,), others.member, others.copy)
    shard = await put(store, 1)
    try:
        first = await made.offer(offer(shard))
        waiting = asyncio.create_task(made.offer(offer(shard, OTHERS)))
        await asyncio.sleep(0)
        others.strangers.add(OTHERS)
        made.gone({OTHERS})
        made.withdraw(pm.Withdraw(1, THEM, first.ticket))
        with pytest.raises(Backpressure):
            await waiting
        assert len(made) == 0
        assert not made._gate.locked()
        assert store.statistics().pinned == 0
    finally:
        await made.aclose()


async def test_a_reader_of_a_copy_is_no_source_of_a_local_shard_with_that_number(store: Store, tcp: Tcp) -> None:
    others = NoCopies()
    made = Offers(ME, store, (tcp,), others.member, others.copy)
    own, copy = await put(store, 1), await put(store, 2)
    others.copies[OTHERS, own] = copy
    try:
        ticket = (await made.offer(offer(own, owner=OTHERS, whole=True))).ticket
        made.withdraw(pm.Withdraw(1, THEM, ticket, SIZE, True))
        first = await made.offer(offer(own, b"first", whole=True))
        second = asyncio.create_task(made.offer(offer(own, b"second", whole=True)))
        await asyncio.sleep(0)
        made.withdraw(pm.Withdraw(1, b"first", first.ticket))
        assert (first.holder, (await second).holder) == (b"", b"")
    finally:
        await made.aclose()


async def test_invalid_offer_requests_are_refused(store: Store, offered: Offers) -> None:
    shard = await put(store, 1)
    for timeout_s in (float("nan"), -1.0, float("-inf")):
        with pytest.raises(ProtocolMismatch):
            await offered.offer(offer(shard, timeout_s=timeout_s))
    with pytest.raises(ProtocolMismatch, match="no transport"):
        await offered.offer(pm.Offer(1, THEM, shard, "pigeon", 1.0))
    with pytest.raises(PeerUnavailable):
        await offered.offer(offer(shard, owner=OTHERS))
    with pytest.raises(Backpressure, match="not yet"):
        await offered.offer(offer(shard, b"stranger"))
    for number in (-1, 2**63, shard + 1):
        with pytest.raises(Freed):
            await offered.offer(offer(number))
    assert len(offered) == 0
    assert offered._gate._value == offers.MAX_OFFERS
    assert (await offered.offer(offer(shard, timeout_s=float("inf")))).ticket
