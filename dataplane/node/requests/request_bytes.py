"""The memory of requests that wait in a node, and of replies that wait to be received: one bound over all clients.

A client's requests wait for memory, for rows, for other nodes; each keeps its message until then. The bound of one
client is `MAX_WAITING_BYTES` of `wire.messages`; that of all clients is here. A request beyond either is refused and
may be repeated later. Each client has a share of its own, so a client with small requests is always served.

Invariant: at most the bound is kept, plus the share of each client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import LimitExceeded
from dataplane.wire.messages import MAX_WAITING_BYTES

MAX_ALL = 256 << 20
"""Bytes, approximately, that requests of all clients keep."""

SHARE = 256 << 10
"""Bytes that each client may keep whatever the others do."""

REQUEST = 4096
"""Bytes that each request is assumed to keep besides its message: a task, and the objects that it waits with."""

SMALL = 512
"""Bytes of a message whose values are included in `REQUEST`."""

_VALUE, _ITEM, _ENTRY = 64, 8, 64  # bytes, at least, of a value, of its place in a list, and in a dict
_LARGE = 64 << 10  # bytes of a request that count as a large block of the heap
_FLAT = {int, float, bool, type(None)}
_TEXTS = {str, bytes}


class Waits:
    """The waiting bytes of all clients of a node."""

    def __init__(
        self, bound: int = MAX_ALL, share: int = SHARE, *, freed: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        """`freed` is called with the size of each large request that is no longer kept."""
        self.bound = bound
        self.freed = freed
        self.share = share
        self.nbytes = 0
        """The bytes of all clients."""

    def client(self) -> ClientUsage:
        """The account of a new client."""
        return ClientUsage(self)


class ClientUsage:
    """The waiting bytes of one client."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self.nbytes = 0

    def take(self, nbytes: int, most: int = MAX_WAITING_BYTES) -> None:
        """Keep so many bytes more, at most `most` in all. Raises LimitExceeded."""
        waits, own = self._waits, self.nbytes + nbytes
        if own > waits.share:
            _bound("bytes of requests that wait", most, own)
            _bound("bytes of all clients' requests that wait", waits.bound, waits.nbytes + nbytes)
        self.nbytes = own
        waits.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Keep so many bytes less."""
        self.nbytes -= nbytes
        self._waits.nbytes -= nbytes
        if nbytes > _LARGE:
            self._waits.freed(nbytes)

    @contextmanager
    def keep(self, nbytes: int) -> Iterator[None]:
        """A context in which so many bytes of a reply are kept. Only the bound of all clients applies: a client
        cannot prevent that many replies come at once. Raises LimitExceeded."""
        self.take(nbytes, self._waits.bound)
        try:
            yield
        finally:
            self.give_back(nbytes)


def _bound(what: str, limit: int, asked: int) -> None:
    if asked > limit:
        text = f"{asked} is more than {limit}: {what}; ask again when some have been answered"
        raise LimitExceeded(text, what=what, asked=asked, limit=limit)


def footprint(value: Any, most: int) -> int:
    """Approximately the bytes that a message's values take in this process. Beyond `most` it stops counting."""
    total, left = 0, [value]
    while left and total <= most:
        each = left.pop()
        total += _VALUE
        match each:
            case str() | bytes():
                total += len(each)
            case np.ndarray():
                total += each.nbytes
            case list() | tuple():
                total += _ITEM * len(each)
                kinds = set(map(type, each))
                if kinds <= _FLAT:
                    total += _VALUE // 2 * len(each)
                elif kinds <= _TEXTS:
                    total += _VALUE * len(each) + sum(map(len, each))
                else:
                    left.extend(each)
            case dict():
                total += _ENTRY * len(each)
                left += [list(each), list(each.values())]
            case msgspec.Struct():
                left.extend(getattr(each, name) for name in each.__struct_fields__)
    return total
