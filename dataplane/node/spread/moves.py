"""Rows that have moved from one home to another, as a node knows it that stores columns of them, until their old home
says that it knows too.

A new home tells those who store columns of rows before it takes them. If it dies before the old home has its answer,
they alone know whether the rows had come there, and what was done of them: the old home, which has them still, asks for
that (`pm.Unmoved`).

What always holds: what is noted of a move is forgotten when the old home has said that it is over, has taken the rows
back, or has gone; a move that was taken back is not made any more.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from dataplane.node.spread.wholes import Part
from dataplane.node.streams import packed

_REFUSED = 1 << 12  # moves that are remembered as taken back

Move = tuple[bytes, bytes, int]
"""From which part, to which (their tokens), and since when the node of that had begun."""


@dataclass(frozen=True, slots=True)
class _From:
    """Rows of a part that have moved: by number, to which part, and which number they have there."""

    part: Part
    rows: dict[int, tuple[bytes, int]] = field(default_factory=dict)


class Moves:
    """The moves that one node was told of, and whose end it was not."""

    def __init__(self) -> None:
        self._from: dict[bytes, _From] = {}
        self._refused: OrderedDict[Move, None] = OrderedDict()
        self._waiting: list[asyncio.Future[None]] = []

    def note(self, part: Part, to: bytes, were: packed.Index, came: packed.Index) -> None:
        """These rows of the part are rows of the part of this token now."""
        if len(were):
            rows = self._from.setdefault(part.token, _From(part)).rows
            rows.update(zip(were.tolist(), ((to, number) for number in came.tolist()), strict=True))

    def over(self, token: bytes, rows: packed.Index) -> None:
        """Their old home says that these rows are gone from there."""
        there = self._from.get(token)
        if there is not None:
            for row in rows.tolist():
                there.rows.pop(row, None)
            self._tidy(token)

    def take_back(self, move: Move, rows: packed.Index) -> tuple[Part | None, packed.Index, packed.Index]:
        """These rows are at their old home, and do not move so any more: that part, those of them that had moved, and
        which numbers they have had. The part is None where no row had."""
        self.refuse(move)
        there = self._from.get(move[0])
        if there is None:
            return None, packed.NOTHING, packed.NOTHING
        moved = [row for row in rows.tolist() if there.rows.get(row, (b"", 0))[0] == move[1]]
        came = [there.rows.pop(row)[1] for row in moved]
        self._tidy(move[0])
        return (there.part if moved else None), np.array(moved, np.int64), np.array(came, np.int64)

    def refuse(self, move: Move) -> None:
        """Such a move is taken back: from now on nothing of it is noted."""
        self._refused[move] = None
        while len(self._refused) > _REFUSED:
            self._refused.popitem(last=False)

    def refused(self, move: Move) -> bool:
        """Whether such a move was taken back."""
        return move in self._refused

    def forget(self, token: bytes) -> None:
        """The stream was dropped that this part is of."""
        there = self._from.get(token)
        if there is not None:
            there.rows.clear()
            self._tidy(token)

    def gone(self, node: bytes) -> None:
        """The node has died, or begun anew, and with it all rows that had their old homes there."""
        for token in [token for token, there in self._from.items() if there.part.node == node]:
            self.forget(token)

    def begin_anew(self) -> None:
        """Nobody counts on what this node knows."""
        for token in list(self._from):
            self.forget(token)

    async def settled(self, to: bytes) -> None:
        """When this returns, it is known of all rows that had come to the part of this token who has them."""
        while any(part == to for there in self._from.values() for part, _ in there.rows.values()):
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    def _tidy(self, token: bytes) -> None:
        if not self._from[token].rows:
            del self._from[token]
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
