"""Payloads between ranks, each along a chain: from the rank that has it through all that want it.

A rank passes a piece on to the next as soon as it has it, and meanwhile receives those behind. Each rank goes through
the pieces of all its chains in the same order: first piece of each chain, second of each, and so on. Where the rows are
to be on a device, what has arrived is copied there while the next pieces arrive.

Why that ends. No rank waits for what it sends, which lies where it is anyway, before all have what they receive. Of
all ranks, look at one that is least far: what it waits for, a rank that is at least as far has begun to send, or waits
for in turn one place nearer to the beginning of a chain. Nor would a wait for a send end where the other rank is
killed: gloo of torch 2.13 then ends the waits of those who receive, but not of all who send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.batch.layout import Bytes
from dataplane.collective.link import Link
from dataplane.collective.memory import Received
from dataplane.collective.packing import Header, Packed, numbers, opened, unpacked

_AHEAD = 8
"""Pieces of a chain for which a rank is ready at a time."""

_TAGS = 2  # the tag of the first chain's payloads; texts have those below


class Chain:
    """What one rank has to do for one payload. `ranks`: who has it, and then who wants it, each once."""

    def __init__(
        self, number: int, ranks: Sequence[int], rank: int, packed: Packed | None, header: bytes, device: Any
    ) -> None:
        """`packed`: the payload, of the rank that has it; `header`: of one that receives it, which then has memory for
        it. Raises LimitExceeded, ProtocolMismatch."""
        at = list(ranks).index(rank)
        self.tag = _TAGS + number
        self.before = ranks[at - 1] if at else None
        self.after = ranks[at + 1] if at + 1 < len(ranks) else None
        self._packed = packed
        self.header: Header = opened(header if packed is None else packed.header)
        self._memory: Received | None = None
        self._due: deque[Any] = deque()
        self._posted = 0
        if packed is None:
            self._memory = Received(self.header.nbytes)
            if device is not None and device.type != "cpu":
                self._memory.mirror(device, numbers(self.header))

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self.header.pieces)

    def arrived(self, link: Link, piece: int) -> Bytes:
        """The bytes of a piece, received if they are not this rank's own. Pieces are asked for in their order."""
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
        """A piece that has arrived, and was passed on, is begun to be copied to the device."""
        if self._memory is not None:
            self._memory.arrived(*self.header.pieces[piece])

    def batch(self) -> Batch:
        """What was received."""
        assert self._memory is not None, "who receives has memory"
        return unpacked(self.header, self._memory)


def move(link: Link, chains: Sequence[Chain]) -> None:
    """Carry out this rank's part of all payloads; what it sends is under way when this returns, until `Link.flush`.
    `chains`: those that it is in, in an order that all ranks share."""
    for piece in range(max(map(len, chains), default=0)):
        for chain in chains:
            if piece < len(chain):
                data = chain.arrived(link, piece)
                if chain.after is not None:
                    link.post(chain.after, data, chain.tag)
                chain.keep(piece)
