"""One offer: its requested bytes, its readers, and its end.

Invariants: no byte is granted twice, and none outside the offer. Once `end` has returned, no reader reads, and no
reader is told any more that its bytes are valid (`confirm`).
"""

from __future__ import annotations

import mmap
import socket
import threading
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.transport.sockets import Memory, mapping

Asked: TypeAlias = npt.NDArray[np.int64]
"""[n, 2]: the start and the stop of each range."""

DONE = b"\x01"
"""The byte that a reader sends when it has all bytes, and receives back if the offer was still valid."""


class OfferedMemory:
    """Offered memory, and the connections that read it. Used by the threads of its transport."""

    def __init__(self, memory: Memory, *, on_disk: bool = False) -> None:
        """`on_disk`: the memory is a file on disk, which may be truncated: reading it through a mapping would be
        fatal."""
        self.memory = memory
        self.on_disk = on_disk
        self._taken: Asked = np.empty((0, 2), np.int64)
        self._streams: set[socket.socket] = set()
        self.over = False
        """Whether the offer has ended."""
        self._left = threading.Condition()
        self._mapped: mmap.mmap | None = None

    def map(self) -> mmap.mmap:
        """The memory, mapped once for all readers, until the offer ends."""
        with self._left:
            if self._mapped is None:
                self._mapped = mapping(self.memory)
            return self._mapped

    def take(self, stream: socket.socket, ranges: npt.ArrayLike) -> bool:
        """Reserve these ranges, (start, stop) each and none empty, for this connection, which must `leave` later.
        Returns False if the offer has ended, or another connection has reserved a part of them."""
        asked: Asked = np.asarray(ranges, np.int64).reshape(-1, 2)
        with self._left:
            taken = np.concatenate([self._taken, asked])
            taken = taken[np.argsort(taken[:, 0], kind="stable")]
            inside = len(asked) and asked.min() >= 0 and asked.max() <= self.memory.size
            if self.over or not inside or (taken[:-1, 1] > taken[1:, 0]).any() or (asked[:, 0] >= asked[:, 1]).any():
                return False
            self._taken = _joined(taken)
            self._streams.add(stream)
            return True

    def confirm(self, stream: socket.socket) -> None:
        """Confirm to the reader that its bytes are the offered ones, and leave the offer, atomically: the offer may end
        before this returns, and the connection then serves another. Raises EOFError if the offer has ended."""
        with self._left:
            if self.over:
                raise EOFError("the offer has ended")
            self._streams.discard(stream)
            self._left.notify_all()
            stream.sendall(DONE)

    def leave(self, stream: socket.socket) -> None:
        """This connection does not use the memory any more."""
        with self._left:
            self._streams.discard(stream)
            self._left.notify_all()

    def end(self, patience_s: float) -> None:
        """End the offer: when this returns, no reader reads the memory. Readers are asked to stop, and disconnected if
        they still read after `patience_s`."""
        with self._left:
            self.over = True
            for how, wait_s in ((socket.SHUT_WR, patience_s), (socket.SHUT_RDWR, None)):
                for stream in self._streams:
                    with suppress(OSError):
                        stream.shutdown(how)
                if self._left.wait_for(lambda: not self._streams, wait_s):
                    break
        if self._mapped is not None:
            self._mapped.close()


def _joined(taken: Asked) -> Asked:
    """The ranges, with adjacent ones merged, so that sequential requests take little memory."""
    starts = np.concatenate([[True], taken[1:, 0] != taken[:-1, 1]])
    return np.stack([taken[starts, 0], taken[np.append(starts[1:], True), 1]], axis=1)
