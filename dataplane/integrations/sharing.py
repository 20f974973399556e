"""What this process has put, by content, so that a large value that is put again is not stored again.

verl puts each response of a prompt by itself, and with each the same images. The same process puts all of a prompt's,
so the index is a process's own. It has digests and places, not values, and keeps nothing alive: a place whose rows were
freed meanwhile is forgotten by whoever finds that out, and the value is put anew.

A value is a whole row of a field, as it is about to be stored. Values of `LEAST` bytes or more are looked up, tensors
only from `TENSOR` bytes on and in puts of a few rows: those of large batches hardly ever come again, and reading them
takes as long as storing them. Columns of objects whose rows share parts are not looked up.

Invariants: of equal values that several threads put at once one is stored, and the others wait for it; who waits
has nothing that another waits for. Values are equal where their xxh3-128 is, with the field that they are stored as.

Rejected: an index in the node, by digests that clients name: a client could then give its bytes for another's value.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
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
"""Bytes of a value from which on it is worth a look."""

TENSOR, FEW = 256 << 10, 16
"""Bytes of a tensor from which on it is, and rows of a put up to which it is."""

_ENTRIES = 1 << 14  # about a kilobyte each

_encode = msgspec.msgpack.Encoder().encode


class Known(Generic[T]):
    """Where values are that were put, by their keys: at most `entries`, those that were last used. Threads may share
    it; a forked child begins with what its parent knew."""

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
        """The places of those of these values that are known. The others are the caller's to put, and to `learn`, in
        this context: who claims one of them meanwhile waits for its end, or so long, and then puts it as well."""
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
        """Claim what is not known. Or claim nothing, and what to wait for, where somebody else has claimed some."""
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
        """Threads that a child does not have may have had the lock, and what they put does not come."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._coming = os.getpid(), threading.Lock(), {}

    def learn(self, places: Mapping[bytes, T]) -> None:
        """These values were put, and are there."""
        with self._lock:
            for key, place in places.items():
                self._places[key] = place
                self._places.move_to_end(key)
            while len(self._places) > self._most:
                self._places.popitem(last=False)

    def forget(self, places: Mapping[bytes, T]) -> None:
        """These values are not at these places any more."""
        with self._lock:
            for key, place in places.items():
                if self._places.get(key) is place:
                    del self._places[key]


def keys_of(values: Values, *, tensors: bool, how: bytes = b"", few: int = FEW) -> list[bytes | None] | None:
    """The key of each row that is to be looked up; none of a row that is not, and None where no row is. `tensors`: each
    row is a tensor; `how`: what else makes equal rows different; `few`: rows of tensors up to which they are."""
    least = TENSOR if tensors else LEAST
    if values.nbytes < least or (tensors and values.rows > few) or _indexed(values):
        return None
    large = np.flatnonzero(_sizes(values) >= least)
    if not len(large):
        return None
    kind = how + _encode(values.field)
    found: list[bytes | None] = [None] * values.rows
    for row, digest in zip(large.tolist(), digests(values.take(large)), strict=True):
        found[row] = kind + digest
    return found


def _indexed(values: Values) -> bool:
    """Whether rows share parts of this put already: a row's content is not in its own bytes then."""
    return values.index is not None or any(map(_indexed, values.children))


def _sizes(values: Values) -> Index:
    """The bytes of each row."""
    if values.offsets is not None:
        return np.diff(values.offsets) * values.field.item_nbytes
    sizes = np.full(values.rows, 0 if values.data is None else values.field.item_nbytes, np.int64)
    for flags, child in zip(values.presence, values.children, strict=True):
        sizes[flags] += _sizes(child)
    return sizes
