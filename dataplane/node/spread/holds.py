"""What nodes keep for each other of what they store, while a third needs it.

A stream's rows may have columns on other nodes than the one that they were appended from, as what one stream delivers
is appended to the next. Who appends asks those nodes to hold the columns, and then tells them the rows' numbers at
their home, whose mirror they are from then on (`node.spread.mirrors`). A snapshot of a stream is held so too, as long
as it is read.

What always holds: what is held stays; it is let go when who asked says so, or is no member any more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.errors import PeerUnavailable, ProtocolMismatch
from dataplane.node.spread.mirrors import Brought, Mirrors
from dataplane.node.spread.wholes import Part, Whole, Wholes
from dataplane.node.streams import packed
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done

_REF_BYTES = 1 << 20  # of encoded references, about, in one message
_GIVEN_UP_S = 60.0  # after which columns whose rows' numbers were not told are let go

_brought = msgspec.msgpack.Decoder(m.Append | m.Extend)


class Holds:
    """What one node holds for others, and has them hold."""

    def __init__(self, homes: Homes, wholes: Wholes, mirrors: Mirrors, asking: Asking) -> None:
        self._homes = homes
        self._wholes = wholes
        self._mirrors = mirrors
        self._asking = asking
        self._numbers = itertools.count(1)
        self._kept: dict[tuple[bytes, int], list[BatchRef]] = {}
        self._told: dict[tuple[bytes, int], asyncio.Future[pm.HeldAs | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # for others

    def hold(self, request: pm.Hold) -> m.Done:
        """Keep what is stored here of these references. Raises Freed, Corrupt, ProtocolMismatch; PeerUnavailable for
        who is no member, yet: that it has gone would not be heard."""
        if not self._asking.knows(request.node):
            raise PeerUnavailable(f"node {request.node.hex()} is no member here, yet")
        refs = [BatchRef.decode(encoded) for encoded in request.refs]
        key = (request.node, request.number)
        if request.part is None:
            for ref in refs:
                self._homes.keep(ref)
                self._kept.setdefault(key, []).append(ref)
            return m.Done(request.id)
        if key in self._told or len(refs) != 1:
            raise ProtocolMismatch("columns of rows are held one reference at a time")
        name, settings, generation, node, token, whole_token, mark = request.part
        whole = self._wholes.opened_as(name, settings, generation)
        part = Part(node, token, whole_token, mark)
        told: asyncio.Future[pm.HeldAs | None] = asyncio.get_running_loop().create_future()
        bringing = self._mirrors.bringing(whole, part, refs[0])
        brought = bringing.__enter__()  # raises where it is gone, and then holds nothing

        async def wait() -> None:
            try:
                async with asyncio.timeout(_GIVEN_UP_S):
                    said = await told
                if said is not None:
                    _keep(brought, said)
            except TimeoutError:
                pass
            finally:
                del self._told[key]
                bringing.__exit__(None, None, None)

        self._told[key] = told
        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return m.Done(request.id)

    def held_as(self, request: pm.HeldAs) -> m.Done:
        """The columns are those of these rows."""
        told = self._told.get((request.node, request.number))
        if told is not None and not told.done():
            told.set_result(request)
        return m.Done(request.id)

    def let_go(self, node: bytes, number: int) -> None:
        """They are not needed."""
        told = self._told.get((node, number))
        if told is not None and not told.done():
            told.set_result(None)
        for ref in self._kept.pop((node, number), ()):
            self._homes.forget(ref)

    def gone(self, node: bytes) -> None:
        """Who asked is no member any more."""
        for key in [key for key in (*self._kept, *self._told) if key[0] == node]:
            self.let_go(*key)

    def begin_anew(self) -> None:
        """Nobody counts on what is held here any more."""
        for key in [*self._kept, *self._told]:
            self.let_go(*key)

    # by others

    async def keep(self, refs: Iterable[BatchRef]) -> Callable[[], None]:
        """Have other nodes hold what they store of these, until what this returns is called. Raises Freed, Corrupt,
        PeerUnavailable."""
        by_node: dict[bytes, list[list[bytes]]] = {}
        for ref in refs:
            encoded = b""
            for node in self._others(ref):
                encoded = encoded or ref.encode()
                batches = by_node.setdefault(node, [[]])
                if sum(map(len, batches[-1])) > _REF_BYTES:
                    batches.append([])
                batches[-1].append(encoded)
        number = next(self._numbers)

        def let_go() -> None:
            for node in by_node:
                self._asking.tell_soon(node, pm.LetGo(self._asking.next_id(), self._wholes.node, number))

        try:
            for node, batches in by_node.items():
                for batch in batches:
                    asked = pm.Hold(self._asking.next_id(), number=number, refs=batch, part=None)
                    await self._asking.tell(node, asked, Done)
        except BaseException:
            let_go()
            raise
        return let_go

    def _others(self, ref: BatchRef) -> list[bytes]:
        return [node for node in dict.fromkeys(node for node, _ in ref.shards()) if node != self._wholes.node]

    @asynccontextmanager
    async def bringing(
        self, whole: Whole, part: Part, ref: BatchRef, spares: Iterable[bytes] = ()
    ) -> AsyncIterator[Numbered]:
        """While the home of this part is asked to take what `ref` means: those hold it that store it, or are `spares`
        that have it too, but for the home itself. Raises Freed, Corrupt, PeerUnavailable."""
        others = [node for node in (*self._others(ref), *spares) if node not in (part.node, self._wholes.node)]
        number, mine = next(self._numbers), Numbered()
        told = (whole.name, whole.settings, whole.generation, part.node, part.token, part.whole, part.mark)
        try:
            for node in others:
                asked = pm.Hold(self._asking.next_id(), number=number, refs=[ref.encode()], part=told)
                await self._asking.tell(node, asked, Done)
            yield mine
        finally:
            for node in others:
                if mine.request is None:
                    self._asking.tell_soon(node, pm.LetGo(self._asking.next_id(), self._wholes.node, number))
                else:
                    says = pm.HeldAs(self._asking.next_id(), self._wholes.node, number, mine.first, mine.request)
                    self._asking.tell_soon(node, says)

    async def aclose(self) -> None:
        """The node stops."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Numbered:
    """What those who hold columns are told of them: the request that the home has done, and what the first row is."""

    def __init__(self) -> None:
        self.first = 0
        self.request: bytes | None = None

    def done(self, request: m.Append | m.Extend, first: int = 0) -> None:
        """The home has done it."""
        self.request, self.first = msgspec.msgpack.encode(request), first


def _keep(brought: Brought, said: pm.HeldAs) -> None:
    request: Any = _brought.decode(said.request)
    if isinstance(request, m.Append):
        brought.append(said.first, request)
    else:
        brought.extend(packed.int64("rows", request.rows), request)
