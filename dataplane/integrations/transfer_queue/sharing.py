"""Writes columns to a table; large values that this process has written before become references to the stored rows.

A table keeps the shards that its rows refer to for as long as one of them needs it, so rows that share a value only
need the same reference. Values that were cleared meanwhile are written again.

Invariants: a column is a reference as a whole or stored as a whole; if some of its rows are new, equal rows are
stored once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from dataplane.batch.concat import concat
from dataplane.batch.dedupe import digests
from dataplane.batch.layout import Index
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Values
from dataplane.clock import Deadline
from dataplane.errors import Freed, OwnerDied, PeerUnavailable

T = TypeVar("T")

LEAST = 16 << 10
"""The smallest value that is looked up, in bytes."""

TENSOR, FEW = 256 << 10, 16
"""The smallest tensor that is looked up, in bytes, and the largest number of rows of a put with such tensors."""

_ENTRIES = 1 << 14  # about a kilobyte each

_encode = msgspec.msgpack.Encoder().encode


class LocationCache(Generic[T]):
    """The locations of the values that this process has put, by content: at most `entries`, the last used ones.
    Threads may share it; a forked child begins with the entries of its parent.

    verl puts each response of a prompt separately, each with the same images. One process puts all responses of a
    prompt, so the index is local to a process. It has digests and locations, not values, and keeps nothing alive: a
    location whose rows were freed is removed when that is noticed, and the value is stored again.

    A value is a whole row of a field, as it is about to be stored. Values of `LEAST` bytes or more are looked up;
    tensors only from `TENSOR` bytes, and in puts of a few rows: those of large batches are rarely repeated, and hashing
    them takes as long as storing them. Columns of objects whose rows share parts are not looked up.

    Invariants: if several threads put equal values at once, one of them stores the value and the others wait for it; a
    thread that waits has no unfinished value for which another thread waits. Values count as equal if their xxh3-128
    digests and their stored fields are.

    Rejected: an index in the node, by digests that clients send: a client could replace another's value.
    """

    def __init__(self, entries: int = _ENTRIES) -> None:
        self._most = entries
        self._places: OrderedDict[bytes, T] = OrderedDict()
        self._coming: dict[bytes, Future[None]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def claim(self, keys: Iterable[bytes], wait_s: float) -> Iterator[dict[bytes, T]]:
        """A context with the locations of those of these values that are known. Within it, the caller stores the others
        and calls `learn`. A second thread that needs one of the others waits until the context ends, or until its own
        timeout, after which it stores the value too."""
        if self._pid != os.getpid():  # a forked child has none of the threads that claimed or lock
            self._pid, self._lock, self._coming = os.getpid(), threading.Lock(), {}
        wanted, until = dict.fromkeys(keys), Deadline.after(wait_s)
        mine: Future[None] = Future()
        while (coming := self._begin(wanted, mine, anyhow=not until.remaining_s)) is not None:
            with suppress(TimeoutError):
                coming.result(until.remaining_s)
        try:
            with self._lock:
                known = {key: self._places[key] for key in wanted if key in self._places}
            yield known
        finally:
            with self._lock:
                for key in [key for key in wanted if self._coming.get(key) is mine]:
                    del self._coming[key]
            mine.set_result(None)

    def _begin(self, wanted: Iterable[bytes], mine: Future[None], *, anyhow: bool) -> Future[None] | None:
        """Claim the unknown values; or, if another thread has claimed some of them, claim none and return the future to
        wait for."""
        with self._lock:
            unknown = [key for key in wanted if key not in self._places]
            theirs = next((self._coming[key] for key in unknown if key in self._coming), None)
            if theirs is not None and not anyhow:
                return theirs
            for key in wanted:
                if key in self._places:
                    self._places.move_to_end(key)
            self._coming.update(dict.fromkeys(unknown, mine))
            return None

    def learn(self, places: Mapping[bytes, T]) -> None:
        """Record the locations of stored values."""
        with self._lock:
            for key, place in places.items():
                self._places[key] = place
                self._places.move_to_end(key)
            while len(self._places) > self._most:
                self._places.popitem(last=False)

    def forget(self, places: Mapping[bytes, T]) -> None:
        """Remove these locations of values."""
        with self._lock:
            for key, place in places.items():
                if self._places.get(key) is place:
                    del self._places[key]


def keys_of(values: Values, *, tensors: bool) -> list[bytes | None] | None:
    """The key of each row that is looked up; None for other rows, and None if no row is. `tensors`: each row is a
    tensor."""
    least = TENSOR if tensors else LEAST
    if values.nbytes < least or (tensors and values.rows > FEW) or _indexed(values):
        return None
    large = np.flatnonzero(_sizes(values) >= least)
    if not len(large):
        return None
    kind = _encode(values.field)
    found: list[bytes | None] = [None] * values.rows
    for row, digest in zip(large.tolist(), digests(values.take(large)), strict=True):
        found[row] = kind + digest
    return found


def _indexed(values: Values) -> bool:
    """Whether rows already share parts within this put: the content of a row is not in its own bytes then."""
    return values.index is not None or any(map(_indexed, values.children))


def _sizes(values: Values) -> Index:
    """The bytes of each row."""
    if values.offsets is not None:
        return np.diff(values.offsets) * values.field.item_nbytes
    sizes = np.full(values.rows, 0 if values.data is None else values.field.item_nbytes, np.int64)
    for flags, child in zip(values.presence, values.children, strict=True):
        sizes[flags] += _sizes(child)
    return sizes


R = TypeVar("R")

Keys = Mapping[str, Sequence[bytes | None]]
"""For each field the key of each row's value, None for values that are not looked up; only for fields with a key."""

_known: LocationCache[BatchRef] = LocationCache()
_LONGEST_S = 60.0  # the longest wait for another thread's put of a value


def keys(columns: Mapping[str, Values]) -> dict[str, list[bytes | None]]:
    """The keys of each column with a row to look up, computed once for columns that are one object."""
    seen: dict[int, list[bytes | None] | None] = {}
    for values in columns.values():
        if id(values) not in seen:
            each_is_a_tensor = all(kind.startswith(("=even", "=ragged")) for kind, _ in values.field.children)
            seen[id(values)] = keys_of(values, tensors=each_is_a_tensor)
    return {name: own for name, values in columns.items() if (own := seen[id(values)]) is not None}


def write(call: Callable[..., R], columns: Mapping[str, Values] | None, known_keys: Keys | None = None) -> R:
    """The result of `call(columns, dedupe=, stored=)`, which writes the columns to a table. `known_keys`: the
    columns' `keys` if the caller has them. Raises as `call`."""
    own = keys(columns or {}) if known_keys is None else known_keys
    if not own:
        return call(columns)
    wanted = [key for several in own.values() for key in several if key is not None]
    while True:
        with _known.claim(wanted, _LONGEST_S) as known:
            shared = {name: each for name, several in own.items() if (each := _shared(several, known)) is not None}
            try:
                return _write(call, {**(columns or {}), **shared}, own)
            except (Freed, OwnerDied, PeerUnavailable):  # also if their holder is away
                if not shared:
                    raise
                _known.forget(known)


def with_known(call: Callable[[dict[str, BatchRef]], R], keys_: Keys) -> R | None:
    """The result of `call` with references for the rows of these columns, if all of their values were written
    before. None if they were not, or are gone: then `call` was not called, or changed nothing."""
    if not keys_:
        return call({})
    wanted = [key for several in keys_.values() for key in several if key is not None]
    with _known.claim(wanted, _LONGEST_S) as known:
        shared = {name: each for name, several in keys_.items() if (each := _shared(several, known)) is not None}
        if len(shared) < len(keys_):
            return None
        try:
            return call(shared)
        except (Freed, OwnerDied, PeerUnavailable):
            _known.forget(known)
            return None


def _shared(keys: Sequence[bytes | None], known: Mapping[bytes, BatchRef]) -> BatchRef | None:
    """The stored rows of these values, if all of them are known."""
    refs = [known[key] for key in keys if key is not None and key in known]
    return concat(refs) if len(refs) == len(keys) else None


def _write(call: Callable[..., R], columns: Mapping[str, Any], keys: Keys) -> R:
    new = [name for name in keys if not isinstance(columns[name], BatchRef)]
    if not new:
        return call(columns)

    def stored(ref: BatchRef) -> None:
        for name in new:
            one = ref.select(name).rename({name: "value"})
            _known.learn({key: one[row] for row, key in enumerate(keys[name]) if key is not None})

    looked_up = {name: [key for key in keys[name] if key is not None] for name in new}
    dedupe = [name for name, several in looked_up.items() if len(set(several)) < len(several)]
    return call(columns, dedupe=dedupe, stored=stored)
