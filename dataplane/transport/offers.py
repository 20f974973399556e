"""One offer: which of its bytes were asked for, by whom they are read, and that it ends.

What always holds: no byte is granted twice, and none that is not there; once `end` has returned nobody reads, and a
reader that was not told before that its bytes were as they were offered is never told.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from dataplane.transport.base import Memory

DONE = b"\x01"
"""What a reader says when it has everything, and hears when that was as it was offered."""


class Offered:
    """Memory that is offered, and the connections that read it. Used by the threads of its transport."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._taken: list[tuple[int, int]] = []
        self._streams: set[socket.socket] = set()
        self._over = False
        self._left = threading.Condition()

    def take(self, stream: socket.socket, asked: Sequence[tuple[int, int]]) -> bool:
        """Whether this connection may read these stretches, (start, stop), which then nobody else may. If so, it has
        to `leave`."""
        size = self.memory.size
        with self._left:
            taken = sorted([*self._taken, *asked])
            inside = all(0 <= start < stop <= size for start, stop in asked)
            if self._over or not inside or any(b > c for (_, b), (c, _) in pairwise(taken)):
                return False
            self._taken = taken
            self._streams.add(stream)
            return True

    def confirm(self, stream: socket.socket) -> None:
        """Tell the reader that what it has is what was offered, and leave, at once: the offer may end before this
        returns, and the connection then serves another. Raises EOFError where the offer has ended."""
        with self._left:
            if self._over:
                raise EOFError("the offer has ended")
            self._streams.discard(stream)
            self._left.notify_all()
            stream.sendall(DONE)

    def leave(self, stream: socket.socket) -> None:
        """Nothing of this connection touches the memory any more."""
        with self._left:
            self._streams.discard(stream)
            self._left.notify_all()

    def end(self, patience_s: float) -> None:
        """Nobody reads the memory any more when this returns. Readers are asked to stop, and cut off if they have not
        after so many seconds."""
        with self._left:
            self._over = True
            for how in (socket.SHUT_WR, socket.SHUT_RDWR):
                for stream in self._streams:
                    with suppress(OSError):
                        stream.shutdown(how)
                if self._left.wait_for(lambda: not self._streams, patience_s):
                    return
            self._left.wait_for(lambda: not self._streams)
