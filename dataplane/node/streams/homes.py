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
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch.links import shard_of
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Rows
from dataplane.clock import Clock
from dataplane.errors import Closed, Corrupt, Freed, LimitExceeded, Misuse, OwnerDied
from dataplane.store.store import Store
from dataplane.stream.figures import figures
from dataplane.stream.home import Home
from dataplane.stream.page import Index
from dataplane.stream.patch import Patch
from dataplane.stream.settings import Settings
from dataplane.stream.table import Over
from dataplane.wire import messages as m

if TYPE_CHECKING:
    from dataplane.node.streams.telling import Telling

MAX_STREAMS = 4096
MAX_MOVED = 1 << 20
"""Rows of a stream whose new homes are remembered, the last ones."""

_MAX_BYTES = 1 << 44  # that one reference may claim: sums of such stay numbers that a message can hold
_MARK = 5  # bytes of a stream's mark
_LOOK_S = 0.5  # how often samplers that judge by age are asked again


class Stream:
    """A home, its name and its clock. `token` is how its clients and its rows name it."""

    def __init__(self, name: str, settings: Settings, mark: str, homes: Homes, clock: Clock) -> None:
        self.name = name
        self.token = secrets.token_bytes(8)
        self.home = Home(settings, homes.released, self._changed, mark)
        self.clock = clock
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._moving: dict[int, None] = {}
        self._moved: dict[int, tuple[bytes, int]] = {}

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

    # rows that have another home, of a stream that is over several hosts

    @contextmanager
    def moving(self, rows: Index) -> Iterator[None]:
        """These rows are on their way to another home."""
        self._moving.update(dict.fromkeys(rows.tolist()))
        try:
            yield
        finally:
            for row in rows.tolist():
                self._moving.pop(row, None)
            self._changed()

    def moved(self, token: bytes, were: Index, came: Index) -> None:
        """These rows are rows of another part now."""
        self._moved.update(zip(were.tolist(), ((token, number) for number in came.tolist()), strict=True))
        while len(self._moved) > MAX_MOVED:
            del self._moved[next(iter(self._moved))]

    async def still(self, rows: Index) -> None:
        """When this returns none of these rows is on its way."""
        while not self._moving.keys().isdisjoint(rows.tolist()):
            await self.changed()

    def elsewhere(self, identifier: int, rows: Index) -> m.Elsewhere | None:
        """Where these rows are, if not all of them are here."""
        if not self._moved or not any(row in self._moved for row in rows.tolist()):
            return None
        found = [self._moved.get(row, (self.token, row)) for row in rows.tolist()]
        tokens = list(dict.fromkeys(token for token, _ in found))
        origins = [(t, np.array([at for at, (token, _) in enumerate(found) if token == t], np.int64)) for t in tokens]
        numbers = np.array([number for _, number in found], np.int64)
        return m.Elsewhere(identifier, [(token, at.tobytes()) for token, at in origins], numbers.tobytes())

    def begin_anew(self, node: bytes) -> None:
        """As `Home.begin_anew`."""
        self.home.begin_anew(node, self._moving, self.clock())

    @property
    def has_moved(self) -> bool:
        """Whether rows have moved, or do now."""
        return bool(self._moved or self._moving)

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
        self.elsewhere: Callable[[bytes, int], bool] = lambda node, shard: False
        """Whether this shard is another node's of the cluster, which keeps itself what it has of a stream's rows."""
        self.keep_elsewhere: Callable[[Iterable[BatchRef]], Awaitable[Callable[[], None]]] | None = None
        """Has other nodes hold what they store of references; see `node.spread.holds`."""
        self.replica: Callable[[ShardKey], int | None] = lambda _: None
        """The number here of another node's shard that is kept here too; see `node.shards.replicas`."""
        self.dropped: Callable[[], None] = lambda: None
        """Called when a stream has gone, with all that it held."""
        self.telling: Telling | None = None
        """Tells other nodes what becomes of rows that they store columns of."""
        self._by_name: dict[str, Stream] = {}
        self._by_token: dict[bytes, Stream] = {}
        self.since = 0
        """The first shard that streams can count on: of before this node began anew, they count on nothing."""
        self._needed: Counter[ShardKey] = Counter()
        self._whole: set[ShardKey] = set()
        self._spent: defaultdict[ShardKey, list[tuple[tuple[int, ...], Rows]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, name: str, settings: Settings | None, *, limits: bool = True) -> Stream:
        """The stream of this name, made if it is not there. `limits`: whether its home keeps them; else others do.
        Raises Misuse where it is there, with other settings."""
        stream = self._by_name.get(name)
        if stream is None:
            if settings is None:
                raise Misuse(f"there is no stream {name!r}; name its tasks to make it")
            stream = self.unnamed(name, settings, secrets.token_hex(_MARK), limits=limits)
            self._by_name[name] = stream
        elif settings is not None and settings != stream.home.settings:
            raise Misuse(f"the stream {name!r} was made with {stream.home.settings}, and this asks for {settings}")
        return stream

    def unnamed(self, name: str, settings: Settings, mark: str, *, limits: bool = True) -> Stream:
        """A new stream that nobody can open before it is `named`. Raises LimitExceeded."""
        if len(self._by_token) >= MAX_STREAMS:
            raise LimitExceeded("so many streams", what="streams", asked=MAX_STREAMS + 1, limit=MAX_STREAMS)
        stream = Stream(name, settings, mark, self, self._clock)
        if not limits:
            stream.home.unlimit()
        if self.telling is not None:
            stream.home.books.tell = partial(self._tell, self.telling, stream)
        self._by_token[stream.token] = stream
        return stream

    def _tell(self, telling: Telling, stream: Stream, task: int, rows: Index, state: int) -> None:
        telling.note(stream.token, stream.home.books.rows, task, rows, state)

    @property
    def noted(self) -> int:
        """How many times something came up that other nodes are to be told."""
        return 0 if self.telling is None else self.telling.noted

    async def told(self) -> None:
        """When this returns, they have been told what had come up."""
        if self.telling is not None:
            await self.telling.told()

    def lose(self, node: bytes) -> None:
        """Another node has died, or has begun anew: what streams have of it is gone, but for what it stored since."""

        def there(where: bytes, shard: int) -> bool:
            return where == self._node or self.elsewhere(where, shard_of(shard))

        for stream in list(self._by_token.values()):
            stream.home.books.rows.forget_spare(node)
            stream.home.lose(there, stream.clock())

    def begin_anew(self, since: int) -> None:
        """Others took this node for dead: no rows are here any more, and what was stored before the shard `since` is of
        no use to streams."""
        self.since = since
        for stream in list(self._by_token.values()):
            stream.begin_anew(self._node)

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

    def find(self, token: bytes) -> Stream:
        """The stream of this token. Raises Closed where it was dropped."""
        stream = self._by_token.get(token)
        if stream is None:
            raise Closed("the stream was dropped")
        return stream

    def drop(self, stream: Stream) -> None:
        """Free all of a stream."""
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

    def keep(self, ref: BatchRef, *, anywhere: bool = False) -> None:
        """Rows of a stream are about to need what `ref` means, of which what is stored elsewhere is on nodes that are
        there, or `anywhere`. Raises Freed, Corrupt, OwnerDied where it is gone."""
        _check_bytes(ref.stored_nbytes)
        for (node, shard), selected in ref.footprint().items():
            if node != self._node:
                if anywhere or self.replica((node, shard)) is not None or self.elsewhere(node, shard_of(shard)):
                    continue
                raise OwnerDied(f"node {node.hex()} has died, or was taken for dead: put this again", node=node.hex())
            if shard_of(shard) < self.since and not anywhere:
                raise OwnerDied("this node was taken for dead after this was put: put it again", node=node.hex())
            for columns, rows in selected:
                self._store.require(shard, columns, rows)
        self.keep_too(ref)

    def keep_stored(self, shard: int, nbytes: int) -> None:
        """As `keep`, of all of a shard that was stored here just now, of so many bytes of values."""
        _check_bytes(nbytes)
        self._needed[self._node, shard] += 1

    def gone(self, ref: BatchRef, *, anywhere: bool = False) -> Index:
        """Which of these rows can not be kept, as `keep` says: who stored something of them has died."""
        try:
            self.keep(ref, anywhere=anywhere)
        except (OwnerDied, Freed, Corrupt):
            if len(ref) == 1:
                return np.zeros(1, np.int64)
            half = len(ref) // 2
            first, second = (self.gone(each, anywhere=anywhere) for each in (ref[:half], ref[half:]))
            return np.concatenate((first, half + second))
        self.forget(ref)
        return np.empty(0, np.int64)

    def keep_too(self, ref: BatchRef) -> None:
        """Somebody else needs what rows of a stream need now, whatever becomes of those."""
        self._needed.update(ref.shards())

    def forget(self, ref: BatchRef) -> None:
        """They do not, after all; or somebody else does no more."""
        self._needed.subtract(ref.shards())
        self._free(ref.shards())

    def free(self, ref: BatchRef) -> None:
        """No row came to need what this means."""
        self.keep_too(ref)
        self.released([Patch(ref, len(ref))])

    def released(self, patches: Iterable[Patch]) -> None:
        """No row needs these any more."""
        for patch in patches:
            for key, selected in patch.ref.footprint().items():
                if self._number(key) is not None:
                    self._spent[key].extend(selected)
            self._needed.subtract(patch.ref.shards())
            self._free(patch.ref.shards())

    def thinned(self, over: Iterable[Over]) -> None:
        """No row of a table needs these cells any more. They are freed now if nobody else needs something of where they
        are stored, else with the last of it."""
        for each in over:
            whole = each.written.ref
            for key, selected in each.ref.footprint().items():
                number = self._number(key)
                if number is None:
                    continue
                if each.done or not each.written.exact or self._needed[key] > 1:
                    self._spent[key].extend(selected)
                    continue
                for columns, rows in selected:
                    self._store.free_part(number, columns, rows, hollow=True)
            if each.done:
                self._needed.subtract(whole.shards())
                self._free(whole.shards())

    def _free(self, shards: Iterable[ShardKey]) -> None:
        for key in shards:
            if self._needed[key] <= 0:
                del self._needed[key]
                spent = self._spent.pop(key, ())
                number = self._number(key)
                if key in self._whole:
                    self._whole.discard(key)
                    self._store.free([number] if number is not None else [])
                if number is not None:
                    for columns, rows in spent:
                        self._store.free_part(number, columns, rows)

    def unscope(self, ref: BatchRef) -> None:
        """What `ref` means is under no scope any more: rows of streams keep it."""
        self._store.unscope(number for node, number in ref.shards() if node == self._node)

    def _number(self, key: ShardKey) -> int | None:
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
