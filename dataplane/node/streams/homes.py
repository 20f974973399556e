"""The streams of a node: their homes, by name, and the bytes that their rows keep.

A stream owns what is appended to it: the columns of an append or extend are freed when no row needs them any more.
The same stored rows may come twice, in two streams or in one, as what one stream delivers is appended to the next;
then they are freed when the last has done with them.

What always holds: a part of a shard that a stream's row needs is there; what no row needs is freed at once; time
enters a home here alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from dataplane.batch.links import link_of
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Rows
from dataplane.clock import Clock
from dataplane.errors import Closed, LimitExceeded, Misuse, OwnerDied
from dataplane.store.freeings import Cause
from dataplane.store.store import Store
from dataplane.stream.figures import figures
from dataplane.stream.home import Home
from dataplane.stream.patch import Patch
from dataplane.stream.settings import Settings
from dataplane.table.written import Over

MAX_STREAMS = 4096

_MAX_SPENT = 1 << 12  # parts of a shard that are freed before others of it may be
_MAX_BYTES = 1 << 44  # that one reference may claim: sums of such stay numbers that a message can hold
_MARK = 5  # bytes of a stream's mark
_LOOK_S = 0.5  # how often samplers that judge by age are asked again


class Stream:
    """A home, its name and its clock. `token` is how its clients and its rows name it."""

    def __init__(self, name: str, settings: Settings, mark: str, homes: Homes, clock: Clock) -> None:
        self.name = name
        self.token = secrets.token_bytes(8)
        self._homes = homes
        self.home = Home(settings, self._released, self._changed, mark)
        self.clock = clock
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def _released(self, patches: Iterable[Patch]) -> None:
        self._homes.released(patches, self.name)

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self.schedule()

    async def changed(self) -> None:
        """Wait until rows may have become ready."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:  # cancelled: who asks again and again must not be remembered each time
                self._waiting.remove(future)

    def wake(self) -> None:
        """Who waits for a change looks again."""
        self._changed()

    def schedule(self) -> None:
        """See to it that the home is told when time has passed that it waits for."""
        due = self.home.next_tick()
        if self.home.watches_age:
            due = min(due, self.clock() + _LOOK_S) if due is not None else self.clock() + _LOOK_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self.clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.home.tick(self.clock())
        self.schedule()

    def end(self) -> None:
        """The stream is no more."""
        self.home.drop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Homes:
    """All streams of a node."""

    def __init__(self, node: bytes, store: Store, clock: Clock) -> None:
        self._node = node
        self._store = store
        self._clock = clock
        self.replica: Callable[[ShardKey], int | None] = lambda _: None
        """The number here of another node's shard that is kept here too; see `node.shards.replicas`."""
        self.dropped: Callable[[], None] = lambda: None
        """Called when a stream has gone, with all that it held."""
        self.ending: Callable[[Stream], None] = lambda _: None
        """Called with a stream that is about to go."""
        self._by_name: dict[str, Stream] = {}
        self._by_token: dict[bytes, Stream] = {}
        self._needed: Counter[ShardKey] = Counter()
        self._whole: set[ShardKey] = set()
        self._spent: defaultdict[ShardKey, list[tuple[tuple[int, ...], Rows]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_name)

    def all(self) -> list[Stream]:
        """Those that have names."""
        return list(self._by_name.values())

    def now(self) -> float:
        """The clock of the homes."""
        return self._clock()

    def open(self, name: str, settings: Settings | None) -> Stream:
        """The stream of this name, made if it is not there. Raises Misuse where it is there, with other settings."""
        stream = self._by_name.get(name)
        if stream is None:
            if settings is None:
                raise Misuse(f"there is no stream {name!r}; name its tasks to make it")
            if settings.durable:
                raise Misuse(f"the stream {name!r} can't be durable here: start the node with --data-dir DIR")
            stream = self.unnamed(name, settings, secrets.token_hex(_MARK))
            self._by_name[name] = stream
        elif settings is not None and settings != stream.home.settings:
            raise Misuse(f"the stream {name!r} was made with {stream.home.settings}, and this asks for {settings}")
        return stream

    def unnamed(self, name: str, settings: Settings, mark: str) -> Stream:
        """A new stream that nobody can open before it is `named`. Raises LimitExceeded."""
        if len(self._by_token) >= MAX_STREAMS:
            raise LimitExceeded("so many streams", what="streams", asked=MAX_STREAMS + 1, limit=MAX_STREAMS)
        stream = Stream(name, settings, mark, self, self._clock)
        self._by_token[stream.token] = stream
        return stream

    def free_parts(self, parts: Iterable[tuple[int, Sequence[int], Rows]]) -> None:
        """Who put these lets go of them: of shards that rows of streams or tables need with the last need, of others
        now. Raises ValueError, IndexError for no part of a shard; LimitExceeded."""
        for shard, columns, rows in parts:
            key = self._node, shard
            if self._needed[key] <= 0:
                self._store.free_part(shard, columns, rows, hollow=True)
                continue
            self._store.check_part(shard, columns, rows)
            if len(self._spent[key]) >= _MAX_SPENT:
                what = "parts of a shard that are freed while streams need others"
                raise LimitExceeded(f"more than {_MAX_SPENT} {what}", what=what, limit=_MAX_SPENT)
            self._spent[key].append((tuple(columns), rows))

    def free_replica(self, key: ShardKey, columns: tuple[int, ...], rows: Rows | None) -> None:
        """A part of a replica here was freed at its first, or all of it: it goes when rows of streams need it no
        more."""
        number = self.replica(key)
        if number is None:
            return
        if self._needed[key] > 0:
            if rows is None:
                self._whole.add(key)
            else:
                self._spent[key].append((columns, rows))
            return
        del self._needed[key]
        if rows is None:
            self._store.free([number])
        else:
            self._store.free_part(number, columns, rows)

    def check_free(self, name: str) -> None:
        """Raises Misuse where there is a stream of this name."""
        if name in self._by_name:
            raise Misuse(f"there is a stream {name!r} already; drop it first, or name another")

    def named(self, stream: Stream) -> None:
        """From now on the stream can be opened by its name. Raises Misuse where another has it."""
        self.check_free(stream.name)
        self._by_name[stream.name] = stream

    def has(self, token: bytes) -> bool:
        """Whether there is a stream of this token."""
        return token in self._by_token

    def has_named(self, name: str) -> bool:
        """Whether there is a stream of this name."""
        return name in self._by_name

    def relink(self, ref: BatchRef) -> None:
        """Rows of an earlier life need what `ref` means: have the links again by which it names shards that are here,
        each until its last need. Raises Freed, Corrupt."""
        for key in ref.shards():
            number = self.number(key)
            if number is not None and link_of(number):
                self._store.relink(number)
                self._whole.add(key)

    def recovered(self, shards: Mapping[int, ShardKey]) -> None:
        """These shards here, each with its name, are of an earlier life, and rows that need them have said so: nobody
        else owns a part of one. Free what no row needs; the rest goes with the last need."""
        self._whole.update(shards.values())
        self._free([key for key in shards.values() if not self._needed[key]])

    def find(self, token: bytes) -> Stream:
        """The stream of this token. Raises Closed where it was dropped."""
        stream = self._by_token.get(token)
        if stream is None:
            raise Closed("the stream was dropped")
        return stream

    def drop(self, stream: Stream) -> None:
        """Free all of a stream."""
        self.ending(stream)
        del self._by_token[stream.token]
        if self._by_name.get(stream.name) is stream:
            del self._by_name[stream.name]
        stream.end()
        self.dropped()

    def leave(self, client: Hashable) -> None:
        """A client has gone."""
        for stream in self._by_name.values():
            stream.home.leave(client, self._clock())
            stream.schedule()

    # the bytes

    def keep(self, ref: BatchRef) -> None:
        """Rows of a stream of this node alone are about to need what `ref` means. Raises Freed, Corrupt; OwnerDied for
        what another node stored."""
        _check_bytes(ref.stored_nbytes)
        for (node, shard), selected in ref.footprint().items():
            if node != self._node:
                raise OwnerDied(
                    f"this was put on node {node.hex()}, which has ended, or is another host's: put it again",
                    node=node.hex(),
                )
            for columns, rows in selected:
                self._store.require(shard, columns, rows)
        self.keep_too(ref)

    def need(self, ref: BatchRef) -> tuple[ShardKey, ...]:
        """A partition's rows, wherever it is led, are about to need what is here of `ref`: the shards of that. Raises
        Freed, Corrupt, LimitExceeded."""
        _check_bytes(ref.stored_nbytes)
        found = []
        for key, selected in ref.footprint().items():
            number = self.number(key)
            if number is not None:
                for columns, rows in selected:
                    self._store.require(number, columns, rows)
                found.append(key)
        self._needed.update(found)
        return tuple(found)

    def unneed(self, shards: Iterable[ShardKey]) -> None:
        """One need less of each of these shards; what is freed of those that have none left is what was freed
        before."""
        shards = tuple(shards)
        self._needed.subtract(shards)
        self._free(shards)

    def done(self, ref: BatchRef, shards: Iterable[ShardKey]) -> None:
        """No row of the partition needs what is in these shards of `ref` any more: free it, once nobody else does."""
        shards = tuple(shards)
        footprint = ref.footprint()
        for key in shards:
            if self.number(key) is not None:
                self._spent[key].extend(footprint[key])
        self.unneed(shards)

    def thin(self, ref: BatchRef) -> None:
        """No row of a table needs these cells any more, each of which is stored by itself. They are freed now if nobody
        else needs something of where they are stored, else with the last of it."""
        for key, selected in ref.footprint().items():
            number = self.number(key)
            if number is not None and self._needed[key] > 1:
                self._spent[key].extend(selected)
            elif number is not None:
                for columns, rows in selected:
                    self._store.free_part(number, columns, rows, hollow=True)

    def keep_stored(self, shard: int, nbytes: int) -> None:
        """As `keep`, of all of a shard that was stored here just now, of so many bytes of values."""
        _check_bytes(nbytes)
        self._needed[self._node, shard] += 1

    def keep_too(self, ref: BatchRef) -> None:
        """Add a need of each shard."""
        self._needed.update(ref.shards())

    def forget(self, ref: BatchRef) -> None:
        """Drop a need of each shard; free what was freed before of those that have none left."""
        self._needed.subtract(ref.shards())
        self._free(ref.shards())

    def free(self, ref: BatchRef) -> None:
        """No row came to need what this means."""
        self.keep_too(ref)
        self.released([Patch(ref, len(ref))])

    def released(self, patches: Iterable[Patch], stream: str = "") -> None:
        """No row needs these any more, of the stream of this name if it is one's."""
        freeings = self._store.freeings
        before, freeings.cause = freeings.cause, Cause("stream", stream) if stream else freeings.cause
        try:
            for patch in patches:
                for key, selected in patch.ref.footprint().items():
                    if self.number(key) is not None:
                        self._spent[key].extend(selected)
                self._needed.subtract(patch.ref.shards())
                self._free(patch.ref.shards())
        finally:
            freeings.cause = before

    def thinned(self, over: Iterable[Over]) -> None:
        """No row of a table here needs these cells any more."""
        for each in over:
            if not each.done and each.written.exact:
                self.thin(each.ref)
                continue
            for key, selected in each.ref.footprint().items():
                if self.number(key) is not None:
                    self._spent[key].extend(selected)
            if each.done:
                self.unneed(each.written.ref.shards())

    def _free(self, shards: Iterable[ShardKey]) -> None:
        for key in shards:
            if self._needed[key] <= 0:
                del self._needed[key]
                spent = self._spent.pop(key, ())
                number = self.number(key)
                if key in self._whole:
                    self._whole.discard(key)
                    self._store.free([number] if number is not None else [])
                if number is not None:
                    for columns, rows in spent:
                        self._store.free_part(number, columns, rows)

    def unscope(self, ref: BatchRef) -> None:
        """What `ref` means is under no scope any more: rows of streams keep it."""
        self._store.unscope(number for node, number in ref.shards() if node == self._node)

    def number(self, key: ShardKey) -> int | None:
        """The number of a shard here, be it a replica of another's; None where it is not."""
        return key[1] if key[0] == self._node else self.replica(key)

    def free_scope(self, scope: str) -> None:
        """Free what was put under a scope; what rows of streams need of it, when they do no more."""
        for number in self._store.scope(scope):
            key = (self._node, number)
            if self._needed[key] > 0:
                self._whole.add(key)
                self._store.unscope([number])
            else:
                del self._needed[key]
        self._store.free_scope(scope)

    def free_unhanded(self, numbers: Iterable[int], holder: str) -> None:
        """Free those of these shards that this holder put, under no scope, and that no row needs."""
        own = [number for number in numbers if self._needed[self._node, number] <= 0]
        self._store.free(number for number in own if self._store.put_by(number) == (holder, ""))

    def figures(self, after: str | None = None, most: int = MAX_STREAMS) -> dict[str, Any]:
        """The figures of the first streams by name, of those after this name; at most so many."""
        names = sorted(name for name in self._by_name if after is None or name > after)[:most]
        return {name: figures(self._by_name[name].home, self._clock()) for name in names}

    def close(self) -> None:
        """The node stops."""
        for stream in list(self._by_token.values()):
            self.drop(stream)


def _check_bytes(nbytes: int) -> None:
    if nbytes > _MAX_BYTES:
        what = "bytes of an append"
        raise LimitExceeded(f"more than {_MAX_BYTES} {what}", what=what, asked=_MAX_BYTES + 1, limit=_MAX_BYTES)
