"""The values that this process has put, by content, so that a large value that is put again is not stored again.

verl puts each response of a prompt separately, each with the same images. One process puts all responses of a prompt,
so the index is local to a process. It has digests and locations, not values, and keeps nothing alive: a location whose
rows were freed is removed when that is noticed, and the value is stored again.

A value is a whole row of a field, as it is about to be stored. Values of `LEAST` bytes or more are looked up; tensors
only from `TENSOR` bytes, and in puts of a few rows: those of large batches are rarely repeated, and hashing them takes
as long as storing them. Columns of objects whose rows share parts are not looked up.

Invariants: if several threads put equal values at once, one of them stores the value and the others wait for it; a
thread that waits has no unfinished value for which another thread waits. Values count as equal if their xxh3-128
digests and their stored fields are.

Rejected: an index in the node, by digests that clients send: a client could replace another's value.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import msgspec
import numpy as np

from dataplane.batch.dedupe import digests
from dataplane.batch.layout import Index
from dataplane.batch.values import Values
from dataplane.clock import Deadline

T = TypeVar("T")

LEAST = 16 << 10
"""The smallest value that is looked up, in bytes."""

TENSOR, FEW = 256 << 10, 16
"""The smallest tensor that is looked up, in bytes, and the largest number of rows of a put with such tensors."""

_ENTRIES = 1 << 14  # about a kilobyte each

_encode = msgspec.msgpack.Encoder().encode


class LocationCache(Generic[T]):
    """The locations of stored values by their keys: at most `entries`, the last used ones. Threads may share it; a
    forked child begins with the entries of its parent."""

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
        and calls `learn`. Another thread that needs one of those waits until the context ends, or until its timeout,
        after which it stores the value too."""
        self._forked()
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

    def _forked(self) -> None:
        """Reset the lock and claims of threads that do not exist in a forked child."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._coming = os.getpid(), threading.Lock(), {}

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


def keys_of_columns(
    columns: Mapping[str, Values], look: Callable[[str, Values], list[bytes | None] | None]
) -> dict[str, list[bytes | None]]:
    """The result of `look` for each field with a row to look up; computed once for fields that are one object."""
    seen: dict[int, list[bytes | None] | None] = {}
    found: dict[str, list[bytes | None]] = {}
    for name, values in columns.items():
        if id(values) not in seen:
            seen[id(values)] = look(name, values)
        own = seen[id(values)]
        if own is not None:
            found[name] = own
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
