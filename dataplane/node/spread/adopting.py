"""Rows that come to the homes here: their own have died, and those tell of them that hold their columns; or these are
theirs now, since members have come or gone.

What always holds: a row that is announced twice comes once, and so do its columns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, PeerUnavailable
from dataplane.node.spread.wholes import Whole, Wholes
from dataplane.node.streams import packed
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes
from dataplane.stream.moving import Columns, adopt, renumbered, some_columns
from dataplane.stream.snapshot import block_rows, put_columns
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done

log = logging.getLogger(__name__)

Encoded = list[tuple[bytes, int, bytes, dict[str, bytes]]]


_BETWEEN_S = 0.05
_HEARD_S = 2.5  # in which a node that has joined hears of the others

_LOOK_S = 0.2

AWAITED_S = 5.0
"""Seconds in which columns of rows that have come are announced by those who store them."""


class Adopting:
    """The rows that have come to one node."""

    def __init__(self, homes: Homes, wholes: Wholes, asking: Asking) -> None:
        self._homes = homes
        self._wholes = wholes
        self._asking = asking
        self.let_go: Callable[[bytes, packed.Index], None] = lambda token, rows: None
        """Called with rows of a part elsewhere that have their home here now."""
        self._begun = 0
        self._awaited: dict[bytes, Counter[int]] = {}  # by the token of the whole: rows, how often they are looked at
        self._came: dict[tuple[str, int, bytes], dict[int, int]] = {}  # by name, generation, token: numbers then, now

    def rows(self, request: pm.Announce) -> pm.Announced:
        """Rows come whose home has died. Raises Closed, Corrupt, LimitExceeded, SchemaMismatch, ProtocolMismatch."""
        whole, known, numbers = self._rows(request)
        self._put(whole, _mapped(_decoded(request.columns), known))
        for node, packed_rows in request.others:
            self._await(whole, node, _known(packed_rows, known))
        self._held_by(whole, request, known)
        self._await_owners(whole, numbers, known)
        left = self._left(whole, numbers, known)
        whole.stream.home.adopted(whole.stream.clock())
        return _announced(request.id, left, known)

    def _left(self, whole: Whole, numbers: list[int], known: dict[int, int]) -> list[int]:
        """Those of these rows that are here still: of the others nobody need keep anything."""
        came = np.array([known[number] for number in numbers], np.int64)
        flags = whole.stream.home.books.rows.there(came).tolist()
        return [number for number, there in zip(numbers, flags, strict=True) if there]

    def _await(self, whole: Whole, node: bytes, rows: packed.Index) -> None:
        """These rows had columns on this node. Without them they are lost, in a while: it may tell of them still."""

        def lacking(there: packed.Index) -> packed.Index:
            stored = whole.stream.home.books.rows
            stored.expect(there, node, still=False)
            return np.setdiff1d(there, stored.ever_by_node(there).get(node, packed.NOTHING))

        if node:
            stored = whole.stream.home.books.rows
            stored.expect(rows[stored.there(rows)], node)
        self._look_later(whole, rows, lacking, AWAITED_S if node else 0.0)

    def _await_owners(self, whole: Whole, numbers: list[int], known: dict[int, int]) -> None:
        """Of the rows that came, those are nobody's of which something is stored on who is no member: this node does
        not know it yet, or it has died. Then somebody may tell of a replica still, or they are lost in a while."""
        loop, home = asyncio.get_running_loop(), whole.stream.home
        until = loop.time() + AWAITED_S

        def dead(rows: packed.Index) -> packed.Index:
            return np.intersect1d(rows, home.books.rows.dead(self._stores))

        def hide(rows: packed.Index, *, hidden: bool) -> None:
            home.books.progress.hide(home.books.rows.places(rows), hidden=hidden)

        def look(rows: packed.Index) -> None:
            if not self._wholes.there(whole):
                return
            rows = rows[home.books.rows.there(rows)]
            hide(rows, hidden=False)
            left = dead(rows)
            if loop.time() < until and len(left):
                hide(left, hidden=True)
                loop.call_later(_LOOK_S, look, left)
            else:
                home.lose_rows(left, whole.stream.clock())
            if len(left) < len(rows):
                home.adopted(whole.stream.clock())

        rows = np.intersect1d(dead(np.array([known[number] for number in numbers], np.int64)), home.books.idle())
        if len(rows):
            hide(rows, hidden=True)
            loop.call_later(_LOOK_S, look, rows)

    def _stores(self, node: bytes, shard: int) -> bool:
        return node == self._wholes.node or self._asking.stores(node, shard)

    def _look_later(
        self, whole: Whole, rows: packed.Index, lost: Callable[[packed.Index], packed.Index], s: float
    ) -> None:
        """Lose those of these rows in so many seconds that are `lost` then."""
        if not len(rows):
            return
        awaited = self._awaited.setdefault(whole.token, Counter())
        awaited.update(rows.tolist())

        def look() -> None:
            awaited.subtract(rows.tolist())
            for row in [row for row in rows.tolist() if awaited[row] <= 0]:
                del awaited[row]
            if self._wholes.there(whole):
                home = whole.stream.home
                home.lose_rows(lost(rows[home.books.rows.there(rows)]), whole.stream.clock())

        asyncio.get_running_loop().call_later(s, look)

    def awaited(self, whole: Whole) -> packed.Index:
        """Rows of which it is not known yet whether all of them is somewhere: they stay here until then."""
        return np.array(list(self._awaited.get(whole.token, ())), np.int64)

    async def moved(self, request: pm.Announce) -> pm.Announced:
        """Rows come whose home this is now, from the one they had. They are without columns, and so nobody's, until
        those know of it that hold some. Raises as `rows`."""
        whole, known, numbers = self._rows(request)
        columns = _mapped(_decoded(request.columns), known)
        news = {number: known[number] for number in numbers}
        await asyncio.gather(*(self._tell(whole, request, news, node) for node in self._holders(columns, request)))
        self._put(whole, columns)
        for node, packed_rows in request.others:
            whole.stream.home.books.rows.remember(_known(packed_rows, known), [node])
        self._held_by(whole, request, known)
        self._await_owners(whole, numbers, known)
        self.let_go(request.token, np.array(numbers, np.int64))
        whole.stream.home.adopted(whole.stream.clock())
        return _announced(request.id, numbers, known)

    def _rows(self, request: pm.Announce) -> tuple[Whole, dict[int, int], list[int]]:
        """The stream, which numbers of rows have come to be which, and those of them that were announced."""
        whole = self._wholes.opened_as(request.name, request.settings, request.generation)
        stream = whole.stream
        known = self._came.setdefault((whole.name, whole.generation, request.token), {})
        numbers = block_rows(request.block)
        new = np.array([number not in known for number in numbers.tolist()], np.bool_)
        were, came = adopt(stream.home, renumbered(request.block, numbers[new], numbers[new]), stream.clock())
        if request.token == stream.token:
            stream.home.found(were.tolist())
        known.update(zip(were.tolist(), came.tolist(), strict=True))
        return whole, known, [number for number in numbers.tolist() if number in known]

    def _held_by(self, whole: Whole, request: pm.Announce, known: dict[int, int]) -> None:
        rows = np.array([known[number] for number in block_rows(request.block).tolist() if number in known], np.int64)
        stored = whole.stream.home.books.rows
        columns = [name for _, _, ref, _ in _decoded(request.columns) for name in ref.columns]
        for node in request.holders:
            stored.add_spare(rows[stored.there(rows)], node, columns)

    def _holders(self, columns: Columns, request: pm.Announce) -> set[bytes]:
        stored = {node for _, _, ref, _ in columns for node, _ in ref.shards()}
        return {*stored, *request.holders} - {self._wholes.node}

    async def _tell(self, whole: Whole, request: pm.Announce, news: dict[int, int], node: bytes) -> None:
        loop, here, begun = asyncio.get_running_loop(), whole.here, self._begun
        until = loop.time() + _HEARD_S
        were, came = np.array(list(news), np.int64), np.array(list(news.values()), np.int64)
        while self._asking.knows(node) or (self._asking.awaits(node) and loop.time() < until):
            message = pm.Moved(
                self._asking.next_id(),
                token=request.token,
                were=were.tobytes(),
                part=here.token,
                whole=here.whole,
                mark=here.mark,
                rows=came.tobytes(),
            )
            try:
                await self._asking.tell(node, message, Done)
                return
            except PeerUnavailable:
                await asyncio.sleep(_BETWEEN_S)
            if self._begun != begun:
                raise PeerUnavailable("this node begins anew: others had taken it for dead")

    def columns(self, request: pm.AnnounceColumns) -> pm.Announced:
        """Columns come, of which those are taken whose rows are here. Raises ProtocolMismatch."""
        whole = self._wholes.named(request.name)
        if whole is None:
            return pm.Announced(request.id, b"", b"")
        columns = _decoded(request.columns)
        known = self._came.get((whole.name, whole.generation, request.token), {})
        there = sorted({row for rows, _, _, _ in columns for row in rows.tolist() if row in known})
        there = self._left(whole, there, known)
        if there:
            mapped = _mapped(columns, known)
            self._put(whole, mapped)
            stored = whole.stream.home.books.rows
            for node in request.holders:
                for rows, _, ref, _ in mapped:
                    stored.add_spare(rows[stored.there(rows)], node, ref.columns)
            whole.stream.home.adopted(whole.stream.clock())
        return _announced(request.id, there, known)

    def _put(self, whole: Whole, columns: Columns) -> None:
        home = whole.stream.home
        lost: list[packed.Index] = []
        for rows, task, ref, lengths in columns:
            lacking, there = home.books.rows.lack(rows, ref.columns), home.books.rows.there(rows)
            home.books.rows.remember(rows[there & ~lacking], {node for node, _ in ref.shards()})
            at = np.flatnonzero(lacking)
            gone = self._homes.gone(ref[at], anywhere=True) if len(at) else at
            lost.append(rows[at[gone]])
            at = np.delete(at, gone)
            if not len(at):
                continue
            if len(at) < len(rows):
                rows, ref = rows[at], ref[at]
                lengths = {name: values[at] for name, values in lengths.items()}
            self._homes.keep(ref, anywhere=True)
            try:
                put_columns(home, rows, task, ref, lengths)
            except BaseException as error:
                self._homes.forget(ref)
                if not isinstance(error, Corrupt):
                    raise
                log.warning("columns of stream %r that were announced are not taken: %s", whole.name, error)
        missed = np.unique(np.concatenate([packed.NOTHING, *lost]))
        home.lose_rows(missed[home.books.rows.there(missed)], whole.stream.clock())  # once all know that hold others

    def begin_anew(self) -> None:
        """What had come is gone, and may come again."""
        self._begun += 1
        self._awaited.clear()
        self._came.clear()

    def forget(self, whole: Whole) -> None:
        """The stream was dropped."""
        self._awaited.pop(whole.token, None)
        for key in [key for key in self._came if key[:2] == (whole.name, whole.generation)]:
            del self._came[key]


def _mapped(columns: Columns, known: dict[int, int]) -> Columns:
    """The columns of the rows that are known, for these rows by their numbers now."""
    were = np.array(sorted(known), np.int64)
    return some_columns(columns, were, np.array([known[number] for number in were.tolist()], np.int64))


def _known(packed_rows: bytes, known: dict[int, int]) -> packed.Index:
    """What the numbers of these rows are now, of those that have come."""
    return np.array([known[row] for row in packed.int64("rows", packed_rows).tolist() if row in known], np.int64)


def _decoded(columns: Encoded) -> Columns:
    found: Columns = []
    for rows, task, encoded, lengths in columns:
        ref = BatchRef.decode(encoded)
        found.append((packed.numbers("rows", rows, len(ref)), task, ref, packed.lengths(lengths, ref)))
    return found


def _announced(identifier: int, were: list[int], known: dict[int, int]) -> pm.Announced:
    came = [known[number] for number in were]
    return pm.Announced(identifier, np.array(were, np.int64).tobytes(), np.array(came, np.int64).tobytes())
