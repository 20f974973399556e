"""Kept columns for readers on other hosts, from process to process: over NCCL between devices, over gloo between hosts'
memories.

Who keeps a column offers it when its node asks for that, and the reader's process reads it into memory where its
tensors are to be: nothing of it passes through an arena. Both ends have a transport (`transport.nccl`) a device, begun
at the first use and kept until the plane is closed.

Invariants: what is offered stays until it was read, its time is over, or `withdraw` has returned; what a failed
read leaves is given to nobody, and the column is then had as any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.batch.layout_check import check_layout
from dataplane.batch.stored_column import Memory
from dataplane.client.column_assembly import PinnedShard
from dataplane.client.memory import CarriedShard
from dataplane.clock import Deadline
from dataplane.transport.base import TransportError
from dataplane.wire import messages as m

log = logging.getLogger(__name__)

_MOST = 256  # offers at a time: beyond, the column is copied to the arena
_HERE = "127.0.0.1"  # where a transport that only reads listens


class Direct:
    """The transports of one plane. Used from its loop alone."""

    def __init__(self) -> None:
        self._transports: dict[tuple[Any, str], Any] = {}
        self._starting = asyncio.Lock()
        self._offers: defaultdict[int, dict[bytes, tuple[Any, asyncio.TimerHandle]]] = defaultdict(dict)
        self._withdrawing: set[asyncio.Task[None]] = set()

    async def offer(self, shard: int, tensor: Any, to: m.OfferTo) -> tuple[str, bytes]:
        """Let one reader read this uint8 tensor, whose bytes are there: where, and its ticket; empty where that can not
        be."""
        _, kind, host, told, seconds = to
        if tensor.device.type != kind:
            return "", b""
        from dataplane.transport.nccl import OnDevice

        for transport in self._transports.values():
            for ticket in transport.had():
                self._withdraw_soon(ticket)
        if sum(map(len, self._offers.values())) >= _MOST:
            return "", b""
        try:
            transport = await self._transport(tensor.device, host, told)
        except OSError as error:
            log.warning("a kept column goes to another host by way of the arena: %s", error)
            return "", b""
        ticket = transport.offer(OnDevice.of(tensor))
        timer = asyncio.get_running_loop().call_later(seconds, self._withdraw_soon, ticket)
        self._offers[shard][ticket] = transport, timer
        return transport.address, ticket

    async def withdraw(self, shard: int) -> None:
        """The memory of the shard goes: nobody reads it any more when this returns."""
        for ticket in list(self._offers.get(shard, ())):
            await self._withdraw(ticket)

    def _withdraw_soon(self, ticket: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._withdraw(ticket))
        self._withdrawing.add(task)
        task.add_done_callback(self._withdrawing.discard)

    async def _withdraw(self, ticket: bytes) -> None:
        shard = next((shard for shard, tickets in self._offers.items() if ticket in tickets), None)
        if shard is None:
            return
        transport, timer = self._offers[shard].pop(ticket)
        if not self._offers[shard]:
            del self._offers[shard]
        timer.cancel()
        await transport.withdraw(ticket)

    async def read(self, offers: Sequence[m.KeptOffer], device: Any, deadline: Deadline) -> dict[int, PinnedShard]:
        """What was offered, read into memory on the device, by shard; without what did not come."""
        try:
            transport = await self._transport(device, _HERE, "")
        except OSError as error:
            log.warning("kept columns of other hosts come by way of the arena: %s", error)
            return {}

        found: dict[int, PinnedShard] = {}
        for shard, size, layout, _, address, ticket in offers:  # by one thread: communicators of one device may block
            laid = check_layout(layout, size)
            try:
                memory = await _read(transport, size, address, ticket, device, deadline.remaining_s)
            except (TransportError, RuntimeError) as error:  # of CUDA: it has no memory
                log.warning("a kept column comes by way of the arena: %s", error)
                break
            found[shard] = PinnedShard(memory, size, laid)
        return found

    async def _transport(self, device: Any, host: str, told: str) -> Any:
        """The transport of this device that listens there. Raises OSError."""
        from dataplane.transport.nccl import Nccl

        async with self._starting:
            found = self._transports.get((device, host))
            if found is None:
                found = Nccl(host, told, device)
                try:
                    await found.start()
                except BaseException:
                    await found.aclose()
                    raise
                self._transports[device, host] = found
            return found

    async def aclose(self) -> None:
        """Take all offers back, and end the transports. Idempotent."""
        for shard in list(self._offers):
            await self.withdraw(shard)
        await asyncio.gather(*self._withdrawing, return_exceptions=True)
        while self._transports:
            _, transport = self._transports.popitem()
            await transport.aclose()


async def _read(transport: Any, size: int, address: str, ticket: bytes, device: Any, timeout_s: float) -> Memory:
    """The bytes that were offered there, in memory of this process on the device. Raises TransportError."""
    if device.type == "cpu":
        memory = np.empty(size, np.uint8)
        await transport.read(address, ticket, memory.data, timeout_s)
        return CarriedShard(memory.data.toreadonly(), 0, size)
    import torch

    from dataplane.client.device_memory import MappedDevice

    tensor = torch.empty(size, dtype=torch.uint8, device=device)
    await transport.read(address, ticket, tensor, timeout_s)
    return MappedDevice(tensor, None, own=True)
