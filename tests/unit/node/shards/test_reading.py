"""Reading what another node offers, by real sockets: what is checked, what is asked for again, what is left alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import xxhash

from dataplane.batch.byte_ranges import ByteRanges
from dataplane.cluster.membership import Member
from dataplane.errors import PeerUnavailable
from dataplane.node.shards.offers import MAX_OFFERS
from dataplane.node.shards.reading import ShardReads, WantedRanges
from dataplane.transport.choice import TransportChoice
from dataplane.transport.sockets import Memory
from dataplane.transport.tcp import Tcp
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers
from tests.cases import each_case
from tests.keys import KEY
from tests.unit.node.shards.members import Members

ANY, OWNER, ME = "tcp://127.0.0.1:0", b"owner", b"me"
CHUNK, SIZE = 64 << 10, 1 << 20
CONTENT = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)


class Owner:
    """A node's end of it: what it offers comes from a file whose bytes may be wrong, or from memory, where they are
    right."""

    def __init__(self) -> None:
        self.tcp = Tcp("127.0.0.1")
        self.asked: list[pm.Offer] = []
        self.fds = [os.memfd_create(name) for name in ("disk", "memory")]
        for fd in self.fds:
            os.pwrite(fd, CONTENT, 0)
        parts = [CONTENT[start : start + CHUNK] for start in range(0, SIZE, CHUNK)]
        self.sums = b"".join(xxhash.xxh3_64_digest(part)[::-1] for part in parts)
        self.peers = Peers(OWNER.hex(), ANY, KEY, self._answer)

    def damage(self, offset: int) -> None:
        os.pwrite(self.fds[0], bytes([CONTENT[offset] ^ 1]), offset)

    def _answer(self, request: Any) -> Message:
        if not isinstance(request, pm.Offer):
            return Done(request.id)
        self.asked.append(request)
        memory = Memory(self.fds[not request.checks], 0, SIZE)
        if request.checks:
            return pm.Offered(request.id, self.tcp.offer_file(memory), b"", CHUNK, self.sums)
        return pm.Offered(request.id, self.tcp.offer(memory))


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    made = Owner()
    await made.tcp.start()
    made.peers.start()
    yield made
    await made.peers.aclose()
    await made.tcp.aclose()
    for fd in made.fds:
        os.close(fd)


@pytest.fixture
async def reading(owner: Owner) -> AsyncIterator[ShardReads]:
    there = Member(1, owner.peers.address, transports={"tcp": owner.tcp.address})
    tcp, peers, members = (
        Tcp("127.0.0.1"),
        Peers(ME.hex(), ANY, KEY, lambda request: Done(request.id)),
        Members(of={OWNER: there}),
    )
    await tcp.start()
    peers.start()
    made = ShardReads(ME, peers, members, TransportChoice((tcp,)))
    yield made
    await peers.aclose()
    await tcp.aclose()
    await made.aclose()


async def read(reading: ShardReads, chosen: ByteRanges, there: ByteRanges | None = None, *, fresh: bool = True) -> Any:
    target = np.zeros(SIZE, np.uint8)
    for start, stop in there or []:
        target[start:stop] = CONTENT[start:stop]
    async with asyncio.timeout(60):
        came = await reading.read(WantedRanges(OWNER, 1, memoryview(target), chosen, there or [], False, fresh))
    return target, came


def test_a_large_read_has_time_on_a_link_that_it_shares() -> None:
    wanted = WantedRanges(OWNER, 1, memoryview(b""), [(0, 10**9)], [], True, True)
    gigabit = 125e6
    assert wanted.timeout_s > MAX_OFFERS * 10**9 / gigabit


async def test_a_shard_on_disk_is_read_in_whole_chunks(owner: Owner, reading: ShardReads) -> None:
    target, came = await read(reading, [(10, 20), (CHUNK + 1, 2 * CHUNK + 1)])
    assert came == [(0, 3 * CHUNK)]
    assert np.array_equal(target[: 3 * CHUNK], CONTENT[: 3 * CHUNK])
    assert not target[3 * CHUNK :].any()
    assert reading.fetched_bytes == 3 * CHUNK


async def test_a_chunk_with_a_wrong_checksum_is_requested_again_from_memory(owner: Owner, reading: ShardReads) -> None:
    owner.damage(CHUNK + 5)
    target, came = await read(reading, [(CHUNK, CHUNK + 4)])
    assert [each.checks for each in owner.asked] == [True, False]
    assert came == [(CHUNK, CHUNK + 4)], "the rest of that chunk was not read again, and so is not there"
    assert np.array_equal(target[CHUNK : CHUNK + 4], CONTENT[CHUNK : CHUNK + 4])


async def test_shared_memory_is_filled_with_the_requested_bytes_only(owner: Owner, reading: ShardReads) -> None:
    target, came = await read(reading, [(0, 100)], fresh=False)
    assert [each.checks for each in owner.asked] == [False]
    assert came == [(0, 100)]
    assert not target[100:].any()


async def test_a_misbehaving_owner_is_retried_and_then_reported_unavailable(owner: Owner, reading: ShardReads) -> None:
    owner.sums = owner.sums[:-8]
    target, _ = await read(reading, [(0, 100)])
    assert np.array_equal(target[:100], CONTENT[:100]), "it was asked for what needs no sums"
    owner.peers._answer = lambda request: pm.Offered(request.id, bytes(16), b"", CHUNK, owner.sums)
    with pytest.raises(PeerUnavailable):
        await read(reading, [(0, 100)])


@each_case(
    "lie",
    [
        (bytes(16),), (b"",), (bytes(16), b"nobody"), (bytes(16), OWNER), (bytes(16), b"", 1, b""),
        (bytes(16), b"", -4096, bytes(8)), (bytes(16), b"", 2**63, bytes(8)),
    ],
)  # fmt: skip
async def test_an_invalid_offer_of_an_owner_is_reported_unavailable(
    owner: Owner, reading: ShardReads, lie: tuple[Any, ...]
) -> None:
    """Its ticket, who has a copy, the size of its chunks, and their sums."""
    owner.peers._answer = lambda request: (
        pm.Offered(request.id, *lie) if isinstance(request, pm.Offer) else Done(request.id)
    )
    with pytest.raises(PeerUnavailable):
        await read(reading, [(0, 100)])
    owner.peers._answer = owner._answer
    target, _ = await read(reading, [(0, 100)])
    assert np.array_equal(target[:100], CONTENT[:100])


async def test_at_most_sixteen_reads_run_at_a_time(owner: Owner, reading: ShardReads) -> None:
    most = 0
    answer = owner._answer

    def counting(request: Any) -> Message:
        nonlocal most
        most = max(most, 256 - reading._turns._value)
        return answer(request)

    owner.peers._answer = counting
    await asyncio.gather(*(read(reading, [(n, n + 1)]) for n in range(100)))
    assert most == 16
    assert reading._turns._value == 256
