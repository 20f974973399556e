"""Rows that are here and whose home is another node, since members have come and gone: they move there.

What always holds: a row moves while nobody holds it, and is hidden meanwhile; it is at its new home, and the nodes that
hold its columns know, before anybody is delivered it there; who names it by its old number is told the new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import numpy as np

from dataplane.cluster.membership import MAX_MEMBERS
from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.node.spread.mirrors import Held, Mirrors, encoded
from dataplane.node.spread.moves import Move
from dataplane.node.spread.wholes import Whole, Wholes
from dataplane.node.streams import packed
from dataplane.node.streams.asking import Asking
from dataplane.stream import moving
from dataplane.stream.mirror import measured
from dataplane.stream.progress import ACKED, EXPIRED
from dataplane.stream.snapshot import block_of
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done

log = logging.getLogger(__name__)

_ROWS = 1024  # that move together
_AGAIN_S = 1.0
_BETWEEN_S = 0.05


class Rehoming:
    """The rows of one node that move."""

    def __init__(
        self,
        wholes: Wholes,
        mirrors: Mirrors,
        asking: Asking,
        told: Callable[[], Awaitable[None]],
        awaited: Callable[[Whole], packed.Index],
    ) -> None:
        """`told()` returns once others know what had come up that they are to be told. Of the rows `awaited(whole)` it
        is not known yet whether all of them is somewhere: they do not move."""
        self._told = told
        self._awaited = awaited
        self._wholes = wholes
        self._mirrors = mirrors
        self._asking = asking
        self._task: asyncio.Task[None] | None = None
        self._again = False
        self._still: dict[bytes, bytes] = {}  # by node: the members when it had nothing more to move

    def changed(self) -> None:
        """Members have come or gone."""
        self._again = True
        if len(self._wholes.placement.nodes) > 1 or self._still:
            self._unsettle()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        """Move what is to move; again while some of it is held by somebody, or may come by those who do not know yet
        that members have changed."""
        left = 0
        while self._again or left:
            again, self._again, left = self._again, False, 0
            for whole in self._wholes.all():
                try:
                    left += await self._move(whole)
                except DataplaneError as error:
                    left += 1
                    log.warning("rows of stream %r did not come to their home: %s", whole.name, error)
            if not left and not self._again:
                await self._say_still()
            left = left or again
            await asyncio.sleep(_AGAIN_S)

    # who is done with it

    async def _say_still(self) -> None:
        view = self._wholes.view
        self.still(pm.Still(0, self._wholes.node, members=view))
        others = [node for node in self._wholes.placement.nodes if node != self._wholes.node]
        said = [self._asking.tell(n, pm.Still(self._asking.next_id(), members=view), Done) for n in others]
        await asyncio.gather(*said, return_exceptions=True)  # who has not heard is told again after the next change

    def still(self, said: pm.Still) -> None:
        """A node has nothing more to move."""
        self._still[said.node] = said.members
        if len(self._still) > MAX_MEMBERS:
            del self._still[next(iter(self._still))]
        self._unsettle()

    def _unsettle(self) -> None:
        """Streams end, where they are closed, once nobody has anything to move."""
        view = self._wholes.view
        unsettled = any(self._still.get(node) != view for node in self._wholes.placement.nodes)
        for whole in self._wholes.all():
            home = whole.stream.home
            if home.unsettled != unsettled:
                home.unsettled = unsettled
                home.adopted(whole.stream.clock())

    def begin(self, whole: Whole) -> None:
        """There is a part of this stream here now; where it was restored, with rows whose homes are elsewhere."""
        if whole.stream.home.books.rows.count or not self._still:
            self.changed()
        view = self._wholes.view
        whole.stream.home.unsettled = any(self._still.get(node) != view for node in self._wholes.placement.nodes)

    async def _move(self, whole: Whole) -> int:
        """Move the rows of one stream; how many are to move still."""
        books = whole.stream.home.books
        there = books.rows.all()
        misplaced = {node: rows for node, rows in self._by_home(whole, there).items() if node != self._wholes.node}
        count = sum(map(len, misplaced.values()))
        for node, rows in misplaced.items():
            for first in range(0, len(rows), _ROWS):
                count -= await self._move_some(whole, node, rows[first : first + _ROWS])
        return count

    def _by_home(self, whole: Whole, rows: packed.Index) -> dict[bytes, packed.Index]:
        """The rows by their homes; those without a group or key are at home where they are."""
        placed = whole.stream.home.books.places_of(rows)
        named = [place for place in placed if place is not None]
        if not named:
            return {}
        at = np.flatnonzero([place is not None for place in placed])
        by_node = self._wholes.homes(whole, named)
        return {node: rows[at[positions]] for node, positions in by_node.items()}

    async def _move_some(self, whole: Whole, node: bytes, rows: packed.Index) -> int:
        since, part = self._wholes.since(node), await self._wholes.part(whole, node)
        stream, books = whole.stream, whole.stream.home.books
        rows = np.setdiff1d(np.intersect1d(rows, books.idle()), self._awaited(whole))
        if not len(rows):
            return 0
        books.progress.hide(books.rows.places(rows), hidden=True)
        with stream.moving(rows):
            try:
                # Not while they are taken back: others who do that too would wait for this, and this for them.
                with self._mirrors.flying(whole, part) as there:
                    await self._told()  # what was said of them comes before what is said of them there
                    reply = await self._announce(node, since, self._asked(whole, rows))
                    if self._wholes.there(whole):
                        self._moved(there, rows, reply)
            except BaseException as error:
                done: list[tuple[int, bytes, int]] = []
                if isinstance(error, PeerUnavailable):
                    done = await self._take_back(whole, rows, (stream.token, part.token, since))
                if self._wholes.there(whole):
                    self._keep(whole, rows, done)
                raise
        return len(rows)

    def _asked(self, whole: Whole, rows: packed.Index) -> pm.Announce:
        stream, books = whole.stream, whole.stream.home.books
        return pm.Announce(
            self._asking.next_id(),
            name=whole.name,
            settings=whole.settings,
            generation=whole.generation,
            token=stream.token,
            block=block_of(books, rows, stream.clock()),
            columns=encoded(measured(books, rows)),
            holders=books.rows.spares(rows),
            moved=True,
            others=[(other, of.tobytes()) for other, of in books.rows.past(rows).items()],
        )

    async def _take_back(self, whole: Whole, rows: packed.Index, move: Move) -> list[tuple[int, bytes, int]]:
        """Their new home has died, or begun anew, and may have had them: what was done of them there, as those know who
        store columns of them."""
        done: list[tuple[int, bytes, int]] = []
        others = whole.stream.home.books.rows.ever_by_node(rows).keys() - {self._wholes.node}
        for node in sorted(others):
            while self._asking.knows(node):
                said = pm.Unmoved(self._asking.next_id(), token=move[0], to=move[1], began=move[2], rows=rows.tobytes())
                try:
                    done += (await self._asking.tell(node, said, pm.Returned)).done
                    break
                except PeerUnavailable:
                    await asyncio.sleep(_BETWEEN_S)
        return done

    def _keep(self, whole: Whole, rows: packed.Index, done: list[tuple[int, bytes, int]]) -> None:
        """These hidden rows stay here, but for those of which something was lost meanwhile; and of which tasks are done
        with them, that is known now."""
        stream, books = whole.stream, whole.stream.home.books
        rows = rows[books.rows.there(rows)]
        books.progress.hide(books.rows.places(rows), hidden=False)
        for task, of, state in done:
            if task < len(whole.settings.tasks) and state in (ACKED, EXPIRED):
                moving.done(stream.home, task, np.intersect1d(packed.int64("rows", of), rows), state)
        dead = books.rows.dead(lambda node, shard: node == self._wholes.node or self._asking.stores(node, shard))
        stream.home.lose_rows(np.intersect1d(rows, dead), stream.clock())
        stream.home.adopted(stream.clock())

    async def _announce(self, node: bytes, since: int, asked: pm.Announce) -> pm.Announced:
        """Tell the new home, again and again while it is there: it takes each row once."""
        while True:
            try:
                return await self._asking.tell(node, asked, pm.Announced)
            except PeerUnavailable:
                if self._wholes.since(node) != since:  # it has died, or begun anew
                    raise
                await asyncio.sleep(_BETWEEN_S)

    def _moved(self, there: Held, rows: packed.Index, reply: pm.Announced) -> None:
        were, came = packed.int64("rows", reply.were), packed.int64("rows", reply.rows)
        stream, books = there.whole.stream, there.whole.stream.home.books
        if not books.rows.there(rows).all():
            return  # this node has begun anew meanwhile
        self._mirrors.take_over(there, were, came)
        stream.moved(there.part.token, were, came)
        books.move(were)
        again = np.setdiff1d(rows, were)  # their keys are there already: they were appended again since members changed
        books.progress.hide(books.rows.places(again), hidden=False)
        books.lose(again)
        stream.home.adopted(stream.clock())

    def begin_anew(self) -> None:
        """No rows are here any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._still.clear()

    async def aclose(self) -> None:
        """The node stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
