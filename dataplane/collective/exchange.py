"""Payloads between ranks, each along a chain: from the rank that has it through all ranks that want it.

A rank forwards a piece as soon as it has it, and receives the following pieces meanwhile. Each rank processes the
pieces of all its chains in the same order: the first piece of each chain, the second of each, and so on. If the rows go
to a device, received pieces are copied there while the next arrive.

Lemma: this cannot deadlock. No rank waits for its own sends before it has received everything. Consider a rank whose
progress is minimal. The piece that it waits for was already sent by its predecessor, which is at least as far, or
the predecessor waits for the same piece, one position nearer to the beginning of the chain. A wait for a send would
also not end if the other rank is killed: gloo of torch 2.13 then ends the waits of receivers, but not of all
senders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.collective.device_link import DeviceLink
from dataplane.collective.link import RankLink
from dataplane.collective.memory import ReceivedBlock
from dataplane.collective.packing import SHORT, PackedBatch, PackedHeader, numbers, opened, unpacked
from dataplane.device.memory import bytes_tensor

_AHEAD = 8
"""The number of pieces of a chain that a rank is ready to receive at a time."""

_TAGS = 2  # the tag of the first chain's payloads; texts have those below


class Chain:
    """One rank's part of the transfer of one payload. `ranks`: the one that has it, and then those that want it,
    each once."""

    def __init__(
        self,
        number: int,
        ranks: Sequence[int],
        rank: int,
        packed: PackedBatch | None,
        header: bytes,
        device: Any,
        devices: DeviceLink | None = None,
    ) -> None:
        """`packed`: the payload, at the rank that sends it first. `header`: the payload's header, at a rank that
        receives it; memory is then allocated. `devices`: the link for large pieces of numeric columns; None: all go
        by gloo. Raises LimitExceeded, ProtocolMismatch."""
        at = list(ranks).index(rank)
        self.tag = _TAGS + number
        self.before = ranks[at - 1] if at else None
        self.after = ranks[at + 1] if at + 1 < len(ranks) else None
        self._packed = packed
        self.header: PackedHeader = opened(header if packed is None else packed.header)
        self._memory: ReceivedBlock | None = None
        self._due: deque[Any] = deque()
        self._posted = 0
        wanted = [] if device is None else numbers(self.header)
        self.devices = devices
        self._direct = [devices is not None and _is_direct(piece, wanted) for piece in self.header.pieces]
        if packed is None:
            self._memory = ReceivedBlock(self.header.nbytes)
            if devices is not None or (device is not None and device.type != "cpu"):
                self._memory.mirror(device, wanted)

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self.header.pieces)

    def pass_on(self, link: RankLink, piece: int) -> None:
        """Receive a piece, unless it is this rank's own, and forward it. Pieces are passed on in their order."""
        data: Any = None if self._packed is None else self._packed.pieces[piece]
        if self._packed is None:
            data = self._received(link, piece)
        if self.after is not None and not self._direct[piece]:
            link.post(self.after, data, self.tag)
        elif self.after is not None:
            assert self.devices is not None, "a piece goes from device to device"
            if self._packed is None:
                self.devices.send(self.after, data)
            else:
                self.devices.send_copy(self.after, bytes_tensor(data))
        if self._memory is not None and not self._direct[piece]:
            self._memory.arrived(*self.header.pieces[piece])  # and goes to the device while the next arrive

    def _received(self, link: RankLink, piece: int) -> Any:
        """The bytes of a piece: an array, or a tensor on the device, which its stream has when it needs it."""
        assert self._memory is not None, "who receives has memory"
        assert self.before is not None, "and a rank to receive from"
        for at in range(self._posted, min(piece + _AHEAD, len(self))):
            start, stop = self.header.pieces[at]
            if self.devices is not None and self._direct[at]:
                into = self._memory.direct(start, stop)
                self._due.append((self.devices.receive(self.before, into), into))
            else:
                into = self._memory.block[start:stop]
                self._due.append((link.receive(self.before, into, self.tag), into))
            self._posted += 1
        work, data = self._due.popleft()
        if self._direct[piece]:
            work.wait()
        else:
            link.wait(work, self.before)
        return data

    def batch(self) -> Batch:
        """The received batch."""
        assert self._memory is not None, "who receives has memory"
        return unpacked(self.header, self._memory)


def move(link: RankLink, chains: Sequence[Chain]) -> None:
    """Carry out this rank's part of all payloads; its sends are in progress when this returns, until `RankLink.flush`.
    `chains`: those that it is in, in an order that all ranks share. Raises as `RankLink.wait`."""
    devices = next((chain.devices for chain in chains), None)
    before = [chain.before for chain in chains if chain.before is not None]
    after = [chain.after for chain in chains if chain.after is not None]
    with nullcontext() if devices is None else link.between_devices(devices, before, after):
        for piece in range(max(map(len, chains), default=0)):
            for chain in chains:
                if piece < len(chain):
                    chain.pass_on(link, piece)


def _is_direct(piece: tuple[int, int], wanted: Sequence[tuple[int, int]]) -> bool:
    """Whether the piece is a large one of a column of numbers alone."""
    start, stop = piece
    return stop - start >= SHORT and any(first <= start and stop <= last for first, last in wanted)
