"""Streams over hosts: each node has a part of every stream that it has to do with, and knows the others' parts.

A part is a home (`node.streams.homes`), with a token, numbers and made keys of its own. The node that is the home of a
stream's name settles with what settings it is made; which part a row is in, its group does (`cluster.placement`).

What always holds: parts of one name are parts of one stream; a name that is used again after it was dropped is another
stream, of a later generation, and what comes of an earlier one is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from dataplane.cluster.membership import Membership
from dataplane.cluster.placement import Index, Placement
from dataplane.errors import Closed, DataplaneError, Misuse
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes, Stream
from dataplane.stream.settings import Settings
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

_DROPPED = 4096  # names that are remembered as dropped
_UNKNOWN = "there is no stream {!r}; name its tasks to make it"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stream: on which node, its token, that by which the whole is asked for there, and its mark."""

    node: bytes
    token: bytes
    whole: bytes
    mark: str


class Whole:
    """A stream over hosts, as one node knows it. `stream` is the part that is here."""

    def __init__(self, stream: Stream, generation: int, here: bytes) -> None:
        self.name = stream.name
        self.stream = stream
        self.settings = stream.home.settings
        self.generation = generation
        self.token = secrets.token_bytes(8)
        self.here = Part(here, stream.token, self.token, stream.home.books.keys.mark)
        self.parts = {here: self.here}
        self._turns: dict[Hashable, list[Any]] = {}

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        """One at a time of those who ask for the same, in the order in which they came. Cancelled, it takes no turn."""
        lock, waiting = self._turns.setdefault(who, [asyncio.Lock(), 0])
        self._turns[who][1] = waiting + 1
        try:
            async with lock:
                yield
        finally:
            self._turns[who][1] -= 1
            if not self._turns[who][1]:
                del self._turns[who]


class Wholes:
    """All streams that a node has a part of."""

    def __init__(self, node: bytes, homes: Homes, asking: Asking, membership: Membership) -> None:
        self.node = node
        self.asking = asking
        self._homes = homes
        self._membership = membership
        self._by_name: dict[str, Whole] = {}
        self._by_token: dict[bytes, Whole] = {}
        self._routes: dict[bytes, tuple[Whole, Part]] = {}
        self._dropped: OrderedDict[str, int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._made: list[Callable[[Whole], None]] = []
        self._watchers: list[Callable[[Whole], None]] = []
        self._placement = Placement(membership.members)
        self._epoch = membership.epoch

    @property
    def placement(self) -> Placement:
        """Where homes are now."""
        if self._epoch != self._membership.epoch:
            self._placement, self._epoch = Placement(self._membership.members), self._membership.epoch
        return self._placement

    @property
    def view(self) -> bytes:
        """The members, as two nodes compare them."""
        members = self._membership.members
        return xxhash.xxh3_64_digest(b"".join(n + members[n].since.to_bytes(8, "little") for n in self.placement.nodes))

    def homes(self, whole: Whole, places: list[str | int]) -> dict[bytes, Index]:
        """By node, which of the rows have their homes there that are in these groups, or have these keys."""
        placement = self.placement
        groups = list(dict.fromkeys(places))  # the rows of a prompt have one home
        at = placement.homes(whole.name, groups)
        if len(groups) < len(places):
            of = dict(zip(groups, at.tolist(), strict=True))
            at = np.fromiter(map(of.__getitem__, places), np.int64, len(places))
        if (at == at[0]).all():
            return {placement.nodes[int(at[0])]: np.arange(len(at))}
        return {placement.nodes[number]: np.flatnonzero(at == number) for number in np.unique(at).tolist()}

    def look(self) -> None:
        """Notice, now, if this node was away."""
        self._membership.look()

    # finding

    def whole(self, token: bytes) -> Whole | None:
        """The stream of which this is the token, or that of the part that is here."""
        return self._by_token.get(token)

    def is_part(self, token: bytes) -> bool:
        """Whether this is the token of a part that is here."""
        whole = self._by_token.get(token)
        return whole is not None and whole.stream.token == token

    async def route(self, token: bytes) -> tuple[Whole, Part]:
        """Of which stream this token is, and on which node. Raises Closed where nobody knows it."""
        found = self._routes.get(token)
        if found is not None and found[1].node in self._membership.members:
            return found
        asked = [
            self.asking.tell(node, pm.Locate(self.asking.next_id(), token), pm.Located)
            for node in self._membership.members
            if node != self.node
        ]
        for reply in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(reply, pm.Located) and reply.name:
                whole = await self.open(reply.name, None)
                for part in await self.parts(whole):
                    if part.token == token:
                        return whole, part
        raise Closed("the stream was dropped, or the node that had these rows has died")

    def locate(self, token: bytes) -> str:
        """The name of the stream of which a part of this token is here; empty for none."""
        return self._by_token[token].name if self.is_part(token) else ""

    async def part(self, whole: Whole, node: bytes) -> Part:
        """The part that this node has, which is made if need be. Raises PeerUnavailable, Misuse."""
        known = whole.parts.get(node)
        if known is None:
            closed = whole.stream.home.closed
            request = pm.OpenPart(self.asking.next_id(), whole.name, whole.settings, whole.generation, closed)
            reply = await self.asking.tell(node, request, pm.Part)
            if reply.generation != whole.generation:
                self._later(whole, reply.generation)
            known = self._learn(whole, node, reply)
        return known

    def _learn(self, whole: Whole, node: bytes, reply: pm.Part) -> Part:
        part = whole.parts[node] = Part(node, reply.token, reply.whole, reply.mark)
        self._routes[reply.token] = self._routes[reply.whole] = (whole, part)
        return part

    async def parts(self, whole: Whole) -> list[Part]:
        """The parts on all members that answer, in the order of the nodes' numbers."""
        nodes = sorted(self._membership.members)
        if all(node in whole.parts for node in nodes):
            return [whole.parts[node] for node in nodes]
        found = await asyncio.gather(*(self.part(whole, node) for node in nodes), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, DataplaneError):
                raise each
            if isinstance(each, Misuse):
                raise each
        return [each for each in found if isinstance(each, Part)]

    @property
    def members(self) -> Iterable[bytes]:
        """The nodes that are there."""
        return self._membership.members

    def since(self, node: bytes) -> int:
        """Since when that node has begun; -1 for one that is no member."""
        member = self._membership.members.get(node)
        return -1 if member is None else member.since

    def named(self, name: str) -> Whole | None:
        """The stream of this name, if it is known here."""
        return self._by_name.get(name)

    def there(self, whole: Whole) -> bool:
        """Whether the stream has not been dropped."""
        return self._by_name.get(whole.name) is whole

    def alive(self, part: Part) -> bool:
        """Whether the part's node is a member."""
        return part.node in self._membership.members

    # making

    async def open(self, name: str, settings: Settings | None) -> Whole:
        """The stream of this name, made if it is nowhere. Raises Misuse, PeerUnavailable."""
        whole = self._by_name.get(name)
        if whole is not None:
            self._check(whole, settings)
            return whole
        root = self.placement.home("", name)
        request = pm.OpenPart(self.asking.next_id(), name, settings, 0, False)
        try:
            reply = self.opened(request) if root == self.node else await self.asking.tell(root, request, pm.Part)
        except Misuse:
            if settings is not None:
                raise
            root, reply = await self._found_elsewhere(name)
        whole = self._by_name.get(name) or self._make(name, reply.settings, reply.generation, closed=reply.closed)
        self._check(whole, settings)
        if root != self.node:
            self._learn(whole, root, reply)
        return whole

    def _check(self, whole: Whole, settings: Settings | None) -> None:
        if settings is not None and settings != whole.settings:
            raise Misuse(f"the stream {whole.name!r} was made with {whole.settings}, and this asks for {settings}")

    async def _found_elsewhere(self, name: str) -> tuple[bytes, pm.Part]:
        """The home of the name may be a new one, which has not been told of it yet."""
        others = [node for node in self._membership.members if node != self.node]
        asked = [
            self.asking.tell(node, pm.OpenPart(self.asking.next_id(), name, None, 0, False), pm.Part) for node in others
        ]
        for node, reply in zip(others, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(reply, pm.Part):
                return node, reply
        raise Misuse(_UNKNOWN.format(name))

    def opened_as(self, name: str, settings: Settings, generation: int) -> Whole:
        """The stream, of which there is a part here from now on. Raises Closed, Misuse, LimitExceeded."""
        self.opened(pm.OpenPart(0, name, settings, generation, closed=False))
        return self._by_name[name]

    def opened(self, request: pm.OpenPart) -> pm.Part:
        """The part that is here, made if settings are given. Raises Closed, Misuse, LimitExceeded."""
        whole = self._by_name.get(request.name)
        if whole is not None and 0 < whole.generation < request.generation:
            self._let_go(whole)  # it was dropped, and this node was not told
            whole = None
        if whole is None:
            last = self._dropped.get(request.name, 0)
            if request.settings is None:
                raise Misuse(_UNKNOWN.format(request.name))
            if 0 < request.generation <= last:
                raise Closed("the stream was dropped")
            generation = request.generation or last + 1
            whole = self._make(request.name, request.settings, generation, closed=request.closed)
        self._check(whole, request.settings)
        here, closed = whole.here, whole.stream.home.closed
        return pm.Part(request.id, here.token, here.whole, here.mark, whole.settings, whole.generation, closed)

    async def restored(self, token: bytes, finish: Callable[[], object]) -> None:
        """The stream of this token, which is here alone and has been restored, is one over hosts, once `finish` has
        made it one like others here. Raises Misuse where there is one of its name."""
        stream = self._homes.find(token)
        taken = Misuse(f"there is a stream {stream.name!r} already; drop it first, or name another")
        try:
            await self.open(stream.name, None)
        except Misuse:
            pass
        else:
            raise taken
        finish()
        if stream.name in self._by_name:
            raise taken
        stream.home.unlimit()
        self._enter(stream, self._dropped.get(stream.name, 0) + 1)
        self.moved()

    def _make(self, name: str, settings: Settings, generation: int, *, closed: bool) -> Whole:
        whole = self._enter(self._homes.open(name, settings, limits=False), generation)
        if closed:
            whole.stream.home.close(whole.stream.clock())
        return whole

    def _enter(self, stream: Stream, generation: int) -> Whole:
        whole = self._by_name[stream.name] = Whole(stream, generation, self.node)
        self._by_token[whole.token] = self._by_token[stream.token] = whole
        self._routes[whole.token] = self._routes[stream.token] = (whole, whole.here)
        for watcher in self._made:
            watcher(whole)
        return whole

    # the end

    def _later(self, whole: Whole, generation: int) -> None:
        """Others know a later stream of this name."""
        if generation > whole.generation:
            self._let_go(whole)
        raise Closed("the stream was dropped, and there is another of its name")

    async def drop(self, whole: Whole) -> None:
        """Free all of the stream, on all hosts."""
        self.dropped(whole.name, whole.generation)
        others = [node for node in self._membership.members if node != self.node]
        asked = [
            self.asking.tell(node, pm.DropStream(self.asking.next_id(), whole.name, whole.generation), m.Done)
            for node in others
        ]
        await asyncio.gather(*asked, return_exceptions=True)  # who has not heard will, when the name is used again

    def dropped(self, name: str, generation: int) -> None:
        """The stream was dropped."""
        self._dropped[name] = max(generation, self._dropped.pop(name, 0))
        while len(self._dropped) > _DROPPED:
            self._dropped.popitem(last=False)
        whole = self._by_name.get(name)
        if whole is not None and whole.generation <= generation:
            self._let_go(whole)

    def _let_go(self, whole: Whole) -> None:
        del self._by_name[whole.name]
        for part in whole.parts.values():
            for token in (part.token, part.whole):
                self._routes.pop(token, None)
                self._by_token.pop(token, None)
        self._homes.drop(whole.stream)
        for watcher in self._watchers:
            watcher(whole)

    def watch(
        self, dropped: Callable[[Whole], None] | None = None, made: Callable[[Whole], None] | None = None
    ) -> None:
        """Call `dropped` with every stream that was dropped, and `made` with every one that a part was made of."""
        if dropped is not None:
            self._watchers.append(dropped)
        if made is not None:
            self._made.append(made)

    def gone(self, node: bytes) -> None:
        """The node is no member any more."""
        for whole in self._by_name.values():
            part = whole.parts.pop(node, None)
            if part is not None:
                self._routes.pop(part.token, None)
                self._routes.pop(part.whole, None)

    def moved(self) -> None:
        """Members have come or gone: where a name has another home now, that is told of the stream."""
        for whole in self._by_name.values():
            root = self.placement.home("", whole.name)
            if root not in whole.parts:
                task = asyncio.get_running_loop().create_task(self._tell_root(whole, root))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _tell_root(self, whole: Whole, root: bytes) -> None:
        with suppress(DataplaneError):  # whoever opens the stream asks others too
            await self.part(whole, root)

    async def aclose(self) -> None:
        """The node stops."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def all(self) -> list[Whole]:
        """All streams that are known here."""
        return list(self._by_name.values())
