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
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.batch.layout import Bytes
from dataplane.collective.link import Link
from dataplane.collective.memory import ReceivedBlock
from dataplane.collective.packing import Header, Packed, numbers, opened, unpacked

_AHEAD = 8
"""The number of pieces of a chain that a rank is ready to receive at a time."""

_TAGS = 2  # the tag of the first chain's payloads; texts have those below


class Chain:
    """One rank's part of the transfer of one payload. `ranks`: the one that has it, and then those that want it,
    each once."""

    def __init__(
        self, number: int, ranks: Sequence[int], rank: int, packed: Packed | None, header: bytes, device: Any
    ) -> None:
        """`packed`: the payload, at the rank that has it; `header`: at a rank that receives it, which allocates
        memory for it. Raises LimitExceeded, ProtocolMismatch."""
        at = list(ranks).index(rank)
        self.tag = _TAGS + number
        self.before = ranks[at - 1] if at else None
        self.after = ranks[at + 1] if at + 1 < len(ranks) else None
        self._packed = packed
        self.header: Header = opened(header if packed is None else packed.header)
        self._memory: ReceivedBlock | None = None
        self._due: deque[Any] = deque()
        self._posted = 0
        if packed is None:
            self._memory = ReceivedBlock(self.header.nbytes)
            if device is not None and device.type != "cpu":
                self._memory.mirror(device, numbers(self.header))

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self.header.pieces)

    def arrived(self, link: Link, piece: int) -> Bytes:
        """The bytes of a piece, received unless they are this rank's own. Pieces are requested in their order."""
        if self._packed is not None:
            return self._packed.pieces[piece]
        assert self._memory is not None, "who receives has memory"
        assert self.before is not None, "and a rank to receive from"
        pieces = self.header.pieces
        for start, stop in pieces[self._posted : piece + _AHEAD]:
            self._due.append(link.receive(self.before, self._memory.block[start:stop], self.tag))
            self._posted += 1
        link.wait(self._due.popleft(), self.before)
        start, stop = pieces[piece]
        return self._memory.block[start:stop]

    def keep(self, piece: int) -> None:
        """Begin to copy a received and forwarded piece to the device."""
        if self._memory is not None:
            self._memory.arrived(*self.header.pieces[piece])

    def batch(self) -> Batch:
        """The received batch."""
        assert self._memory is not None, "who receives has memory"
        return unpacked(self.header, self._memory)


def move(link: Link, chains: Sequence[Chain]) -> None:
    """Carry out this rank's part of all payloads; its sends are in progress when this returns, until `Link.flush`.
    `chains`: those that it is in, in an order that all ranks share."""
    for piece in range(max(map(len, chains), default=0)):
        for chain in chains:
            if piece < len(chain):
                data = chain.arrived(link, piece)
                if chain.after is not None:
                    link.post(chain.after, data, chain.tag)
                chain.keep(piece)
