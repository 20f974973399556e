"""The conformance suite of transports."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from dataplane.transport.channels import Transport, TransportError
from dataplane.transport.sockets import Memory
from tests.processes import until

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
GUARD = 64  # bytes beside a target, which must stay as they are
BLANK = 0xEE

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shelf:
    """Memory to be offered: a file in memory between guard bytes."""

    fd: int
    content: Bytes
    mapped: mmap.mmap

    @property
    def memory(self) -> Memory:
        return Memory(self.fd, PAGE, len(self.content))

    def overwrite(self) -> None:
        """Reuse the memory, as a node does once nobody may read it."""
        self.mapped[:] = b"\xff" * len(self.mapped)

    def close(self) -> None:
        self.mapped.close()
        os.close(self.fd)


class Target:
    """Memory to read into, between guard bytes."""

    def __init__(self, size: int) -> None:
        self._whole = np.full(GUARD + size + GUARD, BLANK, np.uint8)
        self.bytes = self._whole[GUARD : GUARD + size]

    @property
    def memory(self) -> memoryview:
        return self.bytes.data

    def begun(self) -> bool:
        """Whether something has been written, anywhere: each page of an offer has bytes that are not blank."""
        return bool((self.bytes[:: max(1, len(self.bytes) // 4096)] != BLANK).any())

    def blank(self) -> bool:
        return bool((self._whole == BLANK).all())

    def guarded(self) -> bool:
        return bool((self._whole[:GUARD] == BLANK).all() and (self._whole[len(self._whole) - GUARD :] == BLANK).all())


Shelves = Callable[..., Shelf]
"""Makes memory to be offered, of a size and with a seed for its bytes."""


def noise(size: int, seed: int = 1) -> Bytes:
    """Bytes that never repeat, and differ from blank memory and from `overwrite`."""
    return np.random.default_rng(seed).integers(0, 0xE0, size, np.uint8)


class TransportSuite:
    """A subclass is named Test..., implements `made`, which creates a transport, and may add tests of its own."""

    def made(self) -> Transport:
        raise NotImplementedError

    async def read(self, reader: Transport, server: Transport, ticket: bytes, size: int) -> Target:
        target = Target(size)
        try:
            await reader.read(server.address, ticket, target.memory, 10.0)
        finally:
            assert target.guarded()
        return target

    # Offered bytes arrive

    @pytest.mark.parametrize("size", [1, 4095, 4 * KIB, 4 * KIB + 1, 9 * MIB, 33 * MIB])
    async def test_every_byte_arrives(self, server: Transport, reader: Transport, shelf: Shelves, size: int) -> None:
        one = shelf(size)
        ticket = server.offer(one.memory)
        target = await self.read(reader, server, ticket, size)
        assert np.array_equal(target.bytes, one.content)
        await server.withdraw(ticket)

    async def test_concurrent_reads_of_several_offers_are_complete(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        sizes = [1, 100, 4 * KIB, MIB, 9 * MIB, 5 * MIB, 8 * MIB, 70_001]
        shelves = [shelf(size, seed) for seed, size in enumerate(sizes)]
        tickets = [server.offer(each.memory) for each in shelves]
        assert len(set(tickets)) == len(tickets)
        readers = [reader, server] * 4
        targets = await asyncio.gather(
            *(self.read(who, server, ticket, size) for who, ticket, size in zip(readers, tickets, sizes, strict=True))
        )
        for target, each in zip(targets, shelves, strict=True):
            assert np.array_equal(target.bytes, each.content)

    async def test_memory_offered_several_times_is_read_by_each_ticket(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        one = shelf(5 * MIB)
        tickets = [server.offer(one.memory) for _ in range(5)]
        await server.withdraw(tickets.pop())
        targets = await asyncio.gather(*(self.read(reader, server, ticket, 5 * MIB) for ticket in tickets))
        assert all(np.array_equal(target.bytes, one.content) for target in targets)

    async def test_only_the_requested_ranges_are_written(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        one = shelf(9 * MIB)
        for chosen in (
            [(0, 1)],
            [(9 * MIB - 1, 9 * MIB)],
            [(0, 9 * MIB)],
            [(5, 4 * MIB + 17), (4 * MIB + 18, 9 * MIB - 3)],
            [(start, start + 7) for start in range(0, 9 * MIB - 7, 4099)],
        ):
            ticket = server.offer(one.memory)
            target = Target(9 * MIB)
            await reader.read(server.address, ticket, target.memory, 10.0, chosen)
            expected = np.full(9 * MIB, BLANK, np.uint8)
            for start, stop in chosen:
                expected[start:stop] = one.content[start:stop]
            assert np.array_equal(target.bytes, expected)
            assert target.guarded()
            await server.withdraw(ticket)

    # Other reads fail

    async def test_a_read_with_a_wrong_ticket_fails_and_writes_nothing(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        ticket = server.offer(shelf(64 * KIB).memory)
        for wrong in (bytes(len(ticket)), os.urandom(len(ticket)), ticket[:-1] + bytes([ticket[-1] ^ 1])):
            target = Target(64 * KIB)
            with pytest.raises(TransportError):
                await reader.read(server.address, wrong, target.memory, 10.0)
            assert target.blank()
        await self.read(reader, server, ticket, 64 * KIB)

    @pytest.mark.parametrize("size", [1, 64 * KIB, 9 * MIB])
    async def test_a_ticket_is_valid_for_one_read(
        self, server: Transport, reader: Transport, shelf: Shelves, size: int
    ) -> None:
        ticket = server.offer(shelf(size).memory)
        await self.read(reader, server, ticket, size)
        target = Target(size)
        with pytest.raises(TransportError):
            await reader.read(server.address, ticket, target.memory, 10.0)
        assert target.blank()

    async def test_at_most_one_of_two_reads_with_one_ticket_succeeds(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        one = shelf(9 * MIB)
        ticket = server.offer(one.memory)
        targets = [Target(9 * MIB), Target(9 * MIB)]
        results = await asyncio.gather(
            *(reader.read(server.address, ticket, target.memory, 10.0) for target in targets), return_exceptions=True
        )
        assert {type(result) for result in results} <= {type(None), TransportError}
        assert results.count(None) <= 1
        for result, target in zip(results, targets, strict=True):
            assert result is not None or np.array_equal(target.bytes, one.content)
            assert target.guarded()

    async def test_a_read_beyond_the_offered_memory_fails(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        """Bytes next to an offer belong to others: no request can read them."""
        ticket = server.offer(shelf(64 * KIB).memory)
        target = Target(64 * KIB + 100)
        with pytest.raises(TransportError):
            await reader.read(server.address, ticket, target.memory, 10.0)
        assert 0xFF not in target.bytes
        assert target.guarded()

    async def test_a_read_of_a_withdrawn_offer_fails_and_writes_nothing(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        ticket = server.offer(shelf(64 * KIB).memory)
        await server.withdraw(ticket)
        target = Target(64 * KIB)
        with pytest.raises(TransportError):
            await reader.read(server.address, ticket, target.memory, 10.0)
        assert target.blank()

    async def test_a_withdrawal_of_an_unknown_ticket_is_no_error(self, server: Transport, shelf: Shelves) -> None:
        ticket = server.offer(shelf(KIB).memory)
        await server.withdraw(ticket)
        await server.withdraw(ticket)
        await server.withdraw(b"")
        await server.withdraw(os.urandom(16))

    @pytest.mark.parametrize("size", [MIB, 33 * MIB])
    async def test_an_offer_withdrawn_during_a_read_yields_no_later_bytes(
        self, server: Transport, reader: Transport, shelf: Shelves, size: int
    ) -> None:
        """After that the memory belongs to others: no reader gets their bytes as the offered ones."""
        one = shelf(size)
        ticket = server.offer(one.memory)
        target = Target(size)
        reading = asyncio.create_task(reader.read(server.address, ticket, target.memory, 10.0))
        await until(lambda: target.begun() or reading.done())
        await server.withdraw(ticket)
        one.overwrite()
        (result,) = await asyncio.gather(reading, return_exceptions=True)
        if result is None:
            assert np.array_equal(target.bytes, one.content)
        else:
            assert isinstance(result, TransportError)
        assert target.guarded()

    @pytest.mark.parametrize("size", [64 * KIB, 33 * MIB])
    async def test_a_read_from_a_closing_server_completes_or_fails(
        self, server: Transport, reader: Transport, shelf: Shelves, size: int
    ) -> None:
        one = shelf(size)
        address, ticket = server.address, server.offer(one.memory)
        target = Target(size)
        reading = asyncio.create_task(reader.read(address, ticket, target.memory, 10.0))
        await until(lambda: target.begun() or reading.done())
        async with asyncio.timeout(60):
            await server.aclose()
            (result,) = await asyncio.gather(reading, return_exceptions=True)
        assert result is None or isinstance(result, TransportError)
        assert result is not None or np.array_equal(target.bytes, one.content)
        with pytest.raises(TransportError):
            await reader.read(address, ticket, target.memory, 10.0)

    @pytest.mark.parametrize("size", [64 * KIB, 33 * MIB])
    @pytest.mark.parametrize("begun", [False, True])
    async def test_a_cancelled_read_writes_nothing_afterwards(
        self, server: Transport, reader: Transport, shelf: Shelves, size: int, begun: bool
    ) -> None:
        one = shelf(size)
        ticket = server.offer(one.memory)
        target = Target(size)
        reading = asyncio.create_task(reader.read(server.address, ticket, target.memory, 10.0))
        await (until(lambda: target.begun() or reading.done()) if begun else asyncio.sleep(0))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        target.bytes[:] = BLANK
        await server.withdraw(ticket)
        await server.aclose()
        await reader.aclose()  # any byte in transfer has arrived, or never will
        assert target.blank()

    async def test_reads_cancelled_at_any_moment_do_not_affect_later_reads(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        one = shelf(9 * MIB)
        for turns in range(20):
            ticket = server.offer(one.memory)
            target = Target(9 * MIB)
            reading = asyncio.create_task(reader.read(server.address, ticket, target.memory, 10.0))
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            reading.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            target.bytes[:] = BLANK
            await server.withdraw(ticket)
            assert target.blank()
        target = await self.read(reader, server, server.offer(one.memory), 9 * MIB)
        assert np.array_equal(target.bytes, one.content)

    @pytest.mark.parametrize("address", ["", "nonsense", ":", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "a" * 99])
    async def test_a_read_from_an_invalid_address_fails_and_writes_nothing(
        self, reader: Transport, address: str
    ) -> None:
        target = Target(KIB)
        with pytest.raises(TransportError):
            await reader.read(address, bytes(16), target.memory, 10.0)
        assert target.blank()

    @pytest.mark.parametrize("length", [0, 1, 15, 17, 1000])
    async def test_a_read_with_a_ticket_of_a_wrong_length_fails(
        self, server: Transport, reader: Transport, shelf: Shelves, length: int
    ) -> None:
        good = server.offer(shelf(KIB).memory)
        target = Target(KIB)
        with pytest.raises(TransportError):
            await reader.read(server.address, bytes(length), target.memory, 10.0)
        assert target.blank()
        await self.read(reader, server, good, KIB)

    # The end

    async def test_a_transport_can_be_closed_twice_and_before_its_start(self, shelf: Shelves) -> None:
        never = self.made()
        await never.aclose()
        transport = self.made()
        await transport.start()
        assert transport.address
        transport.offer(shelf(KIB).memory)
        await transport.aclose()
        await transport.aclose()

    async def test_a_read_by_a_closed_transport_fails(
        self, server: Transport, reader: Transport, shelf: Shelves
    ) -> None:
        ticket = server.offer(shelf(KIB).memory)
        await reader.aclose()
        with pytest.raises(TransportError):
            await reader.read(server.address, ticket, Target(KIB).memory, 10.0)
