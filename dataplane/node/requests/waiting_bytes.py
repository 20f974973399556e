"""Bounds the memory of requests that wait in a node, and of replies that their client has not received yet.

A request waits for memory, for rows or for other nodes, and its message stays in memory meanwhile. One bound applies to
each client, `MAX_WAITING_BYTES` of `wire.messages`, and one to all clients together, `MAX_ALL`. A request beyond either
is refused, and may be repeated later. `SHARE` bytes are reserved for each client, so a client with small requests is
always served.

Invariant: the messages take at most `MAX_ALL` bytes, plus `SHARE` for each client.
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
"""The most bytes, approximately, of the waiting requests of all clients."""

SHARE = 256 << 10
"""Bytes of requests that each client may always have waiting, independent of the others."""

REQUEST = 4096
"""Bytes that a waiting request is assumed to take besides its message, mostly for its task."""

SMALL = 512
"""The size of a message up to which its values are counted as part of `REQUEST`."""

_VALUE, _ITEM, _ENTRY = 64, 8, 64  # the least bytes of a value, of an item of a list, and of an entry of a dict
_LARGE = 64 << 10  # the size of a request from which its memory is a large block of the heap
_FLAT = {int, float, bool, type(None)}
_TEXTS = {str, bytes}


class WaitingBytes:
    """The waiting bytes of all clients of a node."""

    def __init__(
        self, bound: int = MAX_ALL, share: int = SHARE, *, freed: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        """`freed` is called with the size of each large request whose memory was released."""
        self.bound = bound
        self.freed = freed
        self.share = share
        self.nbytes = 0
        """The bytes of all clients."""

    def client(self) -> ClientUsage:
        """An empty usage, for a new client."""
        return ClientUsage(self)


class ClientUsage:
    """The waiting bytes of one client."""

    def __init__(self, waits: WaitingBytes) -> None:
        self._waits = waits
        self.nbytes = 0

    def take(self, nbytes: int, most: int = MAX_WAITING_BYTES) -> None:
        """Add `nbytes` to the client's usage. Above `SHARE`, raises LimitExceeded if the usage would be more than
        `most`, or that of all clients more than the bound."""
        waits, own = self._waits, self.nbytes + nbytes
        if own > waits.share:
            _bound("bytes of requests that wait", most, own)
            _bound("bytes of all clients' requests that wait", waits.bound, waits.nbytes + nbytes)
        self.nbytes = own
        waits.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Subtract `nbytes` from the client's usage."""
        self.nbytes -= nbytes
        self._waits.nbytes -= nbytes
        if nbytes > _LARGE:
            self._waits.freed(nbytes)

    @contextmanager
    def keep(self, nbytes: int) -> Iterator[None]:
        """A context in which the `nbytes` of a reply count as the client's usage. Only the bound of all clients
        applies, since a client cannot control how many replies arrive at once. Raises LimitExceeded."""
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
    """The approximate memory of a message's values in this process. Counting stops above `most`."""
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
