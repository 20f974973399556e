"""What this node holds for homes elsewhere (`stream.mirror`), and what becomes of it when one of them dies: its rows
are announced to the homes that take its place, and go on there.

What always holds: what was brought to a home is kept here from before the home is asked until the home has said that it
is over, or the stream is dropped; what a home says of rows is not applied before the answers are, that tell their
numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import DataplaneError, LeaseExpired, PeerUnavailable, ProtocolMismatch
from dataplane.node.spread.adopting import Adopting
from dataplane.node.spread.moves import Moves
from dataplane.node.spread.wholes import Part, Whole, Wholes
from dataplane.node.streams import packed
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes
from dataplane.stream.block import Block
from dataplane.stream.books import MOVED, OVER
from dataplane.stream.facts import Arrival
from dataplane.stream.mirror import Mirror, measured
from dataplane.stream.moving import Columns, renumbered, some_columns
from dataplane.stream.patch import Patch
from dataplane.stream.progress import ACKED, EXPIRED
from dataplane.stream.settings import MAX_TASKS
from dataplane.stream.snapshot import block_of
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

log = logging.getLogger(__name__)

_ROWS = 1024  # that one message announces
_AWAY = 1 << 14  # parts that are remembered
_TRIES = 5
_BETWEEN_S = 0.5
_LANDED_S = 10.0
_UNSURE_S = 10.0  # in which an old home says whether it has rows that had moved


class Held:
    """A part elsewhere, and what is here of its rows."""

    def __init__(self, whole: Whole, part: Part, homes: Homes) -> None:
        self.whole = whole
        self.part = part
        self.mirror = Mirror(whole.settings, part.mark, homes.released)
        self.flying: set[asyncio.Future[None]] = set()
        self.over = False
        """Whether nothing is kept here any more, whatever comes."""


class Brought:
    """What a home is being asked to take. One of the methods is called once it has."""

    def __init__(self, held: Held, ref: BatchRef, released: Callable[[list[Patch]], None]) -> None:
        self._held = held
        self._released = released
        self._ref = ref
        self.kept = False

    def append(self, first: int, request: m.Append) -> None:
        """The home has taken the rows, as from this number on."""
        self.kept = True
        if self._held.over:  # this node has begun anew: nobody needs it
            self._released([Patch(self._ref, len(self._ref))])
            return
        arrival = Arrival(
            request.groups or None,
            packed.int64("versions", request.versions),
            request.tags,
            packed.lengths(request.lengths, self._ref),
        )
        now = self._held.whole.stream.clock()
        self._held.mirror.append(first, self._ref, request.keys, request.digest, arrival, now)

    def extend(self, rows: packed.Index, request: m.Extend) -> None:
        """The home has taken the columns."""
        self.kept = True
        if self._held.over:  # this node has begun anew: nobody needs it
            self._released([Patch(self._ref, len(self._ref))])
            return
        holds = packed.int64("holds", request.holds)
        lengths = packed.lengths(request.lengths, self._ref)
        self._held.mirror.extend(rows, self._ref, lengths, np.where(holds > 0, holds, -1) if len(holds) else -1)


class Mirrors:
    """Those of one node."""

    def __init__(self, homes: Homes, wholes: Wholes, asking: Asking, adopting: Adopting) -> None:
        self._homes = homes
        self._wholes = wholes
        self._asking = asking
        self._adopting = adopting
        adopting.let_go = self.let_go
        self._moves = Moves()
        self._held: dict[bytes, Held] = {}
        self._announcing: set[Held] = set()
        self._away: dict[bytes, int] = {}  # by token of parts whose node had gone: up to which row others have them
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def bringing(self, whole: Whole, part: Part, ref: BatchRef) -> Iterator[Brought]:
        """While the home of this part is asked to take what `ref` means. Raises Freed, Corrupt where it is gone."""
        self._homes.keep(ref)
        with self.flying(whole, part) as held:
            brought = Brought(held, ref, self._homes.released)
            try:
                yield brought
            finally:
                if not brought.kept:
                    self._homes.forget(ref)

    @contextmanager
    def flying(self, whole: Whole, part: Part) -> Iterator[Held]:
        """While numbers of rows are on their way, what their home, this part, says of rows waits."""
        held = self._held.get(part.token)
        if held is None:
            held = self._held[part.token] = Held(whole, part, self._homes)
        flying: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.flying.add(flying)
        try:
            yield held
        finally:
            held.flying.discard(flying)
            flying.set_result(None)
            if not held.flying and not held.over and not self._wholes.alive(part):
                self._give_up(held)
            if not held.flying and held in self._announcing:
                self._announce_soon(held)
            self._tidy(held)

    async def settled(self, request: pm.Settled) -> m.Done:
        """A home says what became of rows. Raises ProtocolMismatch; LeaseExpired to a home that was taken for dead and
        does not know yet: its rows are others' now."""
        for token, task, rows, state, others in request.settled:
            numbers = packed.int64("rows", rows)
            if len(numbers) and numbers.min() <= self._away.get(token, -1):
                raise LeaseExpired("these rows have another home, which delivers them again")
            if not MOVED <= task < MAX_TASKS or (task >= 0 and state not in (ACKED, EXPIRED)):
                raise ProtocolMismatch(f"rows that are in state {state} for task {task}")
            for _, of in others:
                packed.int64("rows", of)
        tokens = {settled[0] for settled in request.settled}
        flying = [f for token in tokens if token in self._held for f in self._held[token].flying]
        await self._landed(flying, request)
        for token, task, rows, state, others in request.settled:
            if task < 0:
                self._moves.over(token, packed.int64("rows", rows))
            held = self._held.get(token)
            if held is None:
                continue
            numbers = np.unique(packed.int64("rows", rows))
            if task == OVER:
                held.mirror.over(numbers)
            elif 0 <= task < len(held.whole.settings.tasks):
                held.mirror.settle(task, numbers, state)
                held.mirror.note_others(numbers, {node: packed.int64("rows", of) for node, of in others})
            self._tidy(held)
        return m.Done(request.id)

    # when rows move

    async def moved(self, request: pm.Moved) -> m.Done:
        """Rows have another home, under other numbers. Raises ProtocolMismatch; PeerUnavailable where that home is no
        member, yet: what is here of its rows would be announced elsewhere at once."""
        were = packed.int64("rows", request.were)
        came = packed.numbers("rows", request.rows, len(were))
        if not (were[1:] > were[:-1]).all() or len(np.unique(came)) != len(came) or (came < 0).any():
            raise ProtocolMismatch("rows that move are not in order, or come to be one")
        old = self._held.get(request.token)
        if old is not None:
            await self._landed(old.flying, request)
        if old is not None and not self._asking.knows(request.node):
            raise PeerUnavailable(f"node {request.node.hex()} is no member here, yet")
        if self._moves.refused((request.token, request.part, request.since)):
            raise PeerUnavailable("these rows are at their old home again: their new one was taken for dead")
        if old is not None:
            part = Part(request.node, request.part, request.whole, request.mark)
            here = np.isin(were, old.mirror.all())
            self._bring_over(old, part, were, came)
            self._moves.note(old.part, part.token, were[here], came[here])
            self._tidy(old)
        return m.Done(request.id)

    async def _landed(self, flying: Iterable[asyncio.Future[None]], request: pm.Fenced) -> None:
        """Wait until these are done. Raises PeerUnavailable where that takes too long, since a member that lies may
        keep one from ever being done, and where the asking node is taken for dead meanwhile."""
        waiting = list(flying)
        if not waiting:
            return
        _, late = await asyncio.wait(waiting, timeout=_LANDED_S)
        if late:
            raise PeerUnavailable("what is under way of these rows is not done; ask again")
        self._asking.check(request)

    async def unmoved(self, request: pm.Unmoved) -> pm.Returned:
        """Rows are at their old home again: what was done of them at the new one. Raises ProtocolMismatch."""
        move = (request.token, request.to, request.began)
        self._moves.refuse(move)
        await self._landed([future for held in self._of(request.to) for future in held.flying], request)
        # All at once from here: as soon as they are noted no more, who waits for that announces what is left of them.
        part, were, came = self._moves.take_back(move, packed.int64("rows", request.rows))
        there = self._of(request.to)
        if part is None or not there:
            return pm.Returned(request.id, [])
        order = np.argsort(came)
        were, came = were[order], came[order]
        done = [
            (task, were[np.searchsorted(came, rows)].tobytes(), state)
            for held in there
            for task, rows, state in held.mirror.done(came)
        ]
        for held in there:
            self._bring_over(held, part, came, were)
            self._tidy(held)
        return pm.Returned(request.id, done)

    def _of(self, token: bytes) -> list[Held]:
        """What is here of rows of this part, if its node lives, and if not."""
        return [held for held in (*self._held.values(), *self._announcing) if held.part.token == token]

    def _bring_over(self, old: Held, part: Part, were: packed.Index, came: packed.Index) -> None:
        """What is here of these rows is mirrored for this part from now on, under the numbers that they have there."""
        mirror, now = old.mirror, old.whole.stream.clock()
        brought, added = mirror.brought(were), mirror.added()
        with self.flying(old.whole, part) as there:
            if len(brought):
                block, columns = mirror.block(brought, now), mirror.columns(brought)
                self._mirror(there, block, columns, brought, came[np.isin(were, brought)], mirror.others(brought))
            for rows, task, ref, lengths in some_columns(added, were, came):
                self._homes.keep_too(ref)
                there.mirror.extend(rows, ref, lengths, task)
        mirror.over(were)

    def take_over(self, held: Held, were: packed.Index, came: packed.Index) -> None:
        """Rows of the part here have their home elsewhere now: what is stored here of them is mirrored from now on."""
        books = held.whole.stream.home.books
        rows = books.rows.by_node(were).get(self._wholes.node, packed.NOTHING)
        if len(rows):
            chosen = came[np.isin(were, rows)]
            block, columns = block_of(books, rows, held.whole.stream.clock()), measured(books, rows)
            others = books.rows.by_node(rows)
            others.pop(self._wholes.node, None)
            self._mirror(held, block, columns, rows, chosen, others)

    def _mirror(
        self,
        held: Held,
        block: Block,
        columns: Columns,
        were: packed.Index,
        came: packed.Index,
        others: Mapping[bytes, packed.Index],
    ) -> None:
        if held.over:
            return
        new = ~np.isin(came, held.mirror.brought(came))  # the others' home has told of them first
        were, came = were[new], came[new]
        taken = some_columns(columns, were, came)
        for _, _, ref, _ in taken:
            self._homes.keep_too(ref)
        held.mirror.take(renumbered(block, were, came), taken, held.whole.stream.clock())
        held.mirror.note_others(came, {node: came[np.isin(were, rows)] for node, rows in others.items()})

    def let_go(self, token: bytes, rows: packed.Index) -> None:
        """Rows of this part have their home here now."""
        held = self._held.get(token)
        if held is not None:
            held.mirror.over(rows)
            self._tidy(held)

    def _tidy(self, held: Held) -> None:
        if not len(held.mirror) and not held.flying and self._held.get(held.part.token) is held:
            del self._held[held.part.token]

    def dropped(self, whole: Whole) -> None:
        """The stream was dropped."""
        for token in [part.token for part in whole.parts.values()]:
            self._moves.forget(token)
        for held in [held for held in self._held.values() if held.whole is whole]:
            held.mirror.clear()
            self._tidy(held)

    # when a home dies

    def gone(self, node: bytes) -> None:
        """The node is no member any more, or has begun anew: its homes are others now."""
        self._moves.gone(node)
        for held in [held for held in self._held.values() if held.part.node == node]:
            self._give_up(held)
            if not held.flying:  # else who brings something sees to it
                self._announce_soon(held)

    def _give_up(self, held: Held) -> None:
        """The home of these rows is no more: what is here of them is to be announced."""
        if self._held.get(held.part.token) is held:
            del self._held[held.part.token]
            self._announcing.add(held)
            held.whole.stream.wake()

    def _announce_soon(self, held: Held) -> None:
        task = asyncio.get_running_loop().create_task(self._announce(held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def coming(self, whole: Whole) -> tuple[int, int]:
        """How many rows and bytes are about to come to a new home."""
        sizes = [held.mirror.size for held in self._announcing if held.whole is whole]
        return sum(rows for rows, _ in sizes), sum(nbytes for _, nbytes in sizes)

    async def _announce(self, held: Held) -> None:
        self._away[held.part.token] = held.mirror.last
        while len(self._away) > _AWAY:
            del self._away[next(iter(self._away))]
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNSURE_S):
                await self._moves.settled(held.part.token)
        for again in range(_TRIES):
            try:
                await self._announce_rows(held)
                await self._announce_columns(held)
                break
            except DataplaneError as error:
                log.warning("rows of stream %r could not be announced to a new home: %s", held.whole.name, error)
                if not self._wholes.there(held.whole):
                    break
                await asyncio.sleep(_BETWEEN_S * (again + 1))
        self._part_with(held)

    def _part_with(self, held: Held) -> None:
        """Nothing of this is kept here any more; what has come to another home is kept for that."""
        held.mirror.clear()
        self._announcing.discard(held)
        held.whole.stream.wake()

    async def _announce_rows(self, held: Held) -> None:
        rows, places = held.mirror.places()
        if not len(rows):
            return
        for node, positions in self._wholes.homes(held.whole, places).items():
            for first in range(0, len(positions), _ROWS):
                await self._announce_some(held, node, rows[positions[first : first + _ROWS]])

    async def _announce_some(self, held: Held, node: bytes, rows: packed.Index) -> None:
        whole, now = held.whole, held.whole.stream.clock()
        block, columns = held.mirror.block(rows, now), held.mirror.columns(rows)
        columns, gone = self._there(columns)
        asked = pm.Announce(
            self._asking.next_id(),
            name=whole.name,
            settings=whole.settings,
            generation=whole.generation,
            token=held.part.token,
            block=block,
            columns=encoded(columns),
            others=[(other, of.tobytes()) for other, of in (*held.mirror.others(rows).items(), (b"", gone))],
            holders=[self._wholes.node] if self._keeps(columns) else [],
        )
        if node == self._wholes.node:
            self._adopting.rows(asked)
        else:
            part = await self._wholes.part(whole, node)
            with self.flying(whole, part) as there:
                reply = await self._asking.tell(node, asked, pm.Announced)
                were, came = packed.int64("rows", reply.were), packed.int64("rows", reply.rows)
                self._mirror(there, block, columns, were, came, held.mirror.others(rows))
        held.mirror.announced(rows)

    def _there(self, columns: Columns) -> tuple[Columns, packed.Index]:
        """Those of these columns that are somewhere still, and the rows of the others."""
        found: Columns = []
        lost = [packed.NOTHING]
        for rows, task, ref, lengths in columns:
            gone = self._homes.gone(ref)
            lost.append(rows[gone])
            at = np.delete(np.arange(len(rows)), gone)
            if len(at):
                found.append((rows[at], task, ref[at], {name: values[at] for name, values in lengths.items()}))
        return found, np.unique(np.concatenate(lost))

    def _keeps(self, columns: Columns) -> bool:
        """Whether all of these columns that others stored are kept here too."""
        others = [key for _, _, ref, _ in columns for key in ref.shards() if key[0] != self._wholes.node]
        return bool(others) and all(self._homes.replica(key) is not None for key in others)

    async def _announce_columns(self, held: Held) -> None:
        """Columns of rows that were appended from elsewhere: whoever has the rows by now takes them, and those that
        nobody has yet are announced again."""
        for again in range(_TRIES):
            columns = held.mirror.added()
            if not columns:
                return
            await asyncio.sleep(_BETWEEN_S * again / _TRIES)
            holders = [self._wholes.node] if self._keeps(columns) else []
            asked = pm.AnnounceColumns(
                self._asking.next_id(),
                name=held.whole.name,
                token=held.part.token,
                columns=encoded(columns),
                holders=holders,
            )
            parts = await self._wholes.parts(held.whole)
            await asyncio.gather(*(self._announce_to(held, part, asked, columns) for part in parts))

    async def _announce_to(self, held: Held, part: Part, asked: pm.AnnounceColumns, columns: Columns) -> None:
        if part.node == self._wholes.node:
            answer = self._adopting.columns(asked)
            were = packed.int64("rows", answer.were)
        else:
            with self.flying(held.whole, part) as there:
                answer = await self._asking.tell(part.node, asked, pm.Announced)
                were, came = packed.int64("rows", answer.were), packed.int64("rows", answer.rows)
                for rows, task, ref, lengths in some_columns(columns, were, came) if not there.over else ():
                    self._homes.keep_too(ref)
                    there.mirror.extend(rows, ref, lengths, task)
        held.mirror.announced_columns(were)

    def begin_anew(self) -> None:
        """This node was taken for dead: homes elsewhere have lost what is kept here for them."""
        for held in (*self._held.values(), *self._announcing):
            held.over = True
            held.mirror.clear()
        self._held.clear()
        self._announcing.clear()
        self._away.clear()
        self._moves.begin_anew()
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """The node stops."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def encoded(columns: Columns) -> list[tuple[bytes, int, bytes, dict[str, bytes]]]:
    """Columns for a message."""
    return [
        (rows.tobytes(), task, ref.encode(), {name: values.tobytes() for name, values in lengths.items()})
        for rows, task, ref, lengths in columns
    ]
