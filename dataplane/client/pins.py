"""The pins of this process on shards, and the connection that keeps them.

A pin is dropped by a finalizer, when the last view of its shard is. The finalizer may run in any thread, at any moment,
even within the same code. So nothing here blocks, or takes a lock that is not reentrant. A plane that is closed while
views exist leaves its socket here. The last view closes the socket.

Invariants: each pin is dropped once. A forked child has separate pins for the views that it inherits, and sends nothing
over its parent's connection. If the node grants it no pins, its views cannot be read.

The pins of a child belong to a separate connection, which the parent makes before the fork (`InheritedPins`). Without
them, the bytes of the child's views would change once the parent drops its views.

Rejected: forking before the node has answered. The parent may drop its pins, or end, before the node has pinned the
child's shards, and the child would read wrong bytes.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from dataplane.client import memory
from dataplane.clock import Deadline
from dataplane.config import program
from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyReply, decoder
from dataplane.wire.framing import Framer, frame
from dataplane.wire.local import connect, parse_address

_all: weakref.WeakSet[ClientPins] = weakref.WeakSet()

_used: deque[tuple[object, Callable[[], bool]]] = deque()
"""Pins of memory that a device may still use, the oldest first."""


def drop_later(pin: object, due: Callable[[], bool]) -> None:
    """Drop the pin once `due` returns True. `due` is called now, and when a plane of this process sends a request."""
    _used.append((pin, due))
    _sweep()


def _sweep() -> None:
    """Drop the pins that are due, up to the first that is not. Reentrant."""
    with suppress(IndexError):
        while _used:
            pin, due = _used.popleft()
            if not due():
                _used.appendleft((pin, due))
                return


def let_go(connected: socket.socket) -> None:
    """In a forked child: close this copy of the socket, so that the connection ends with the parent."""
    if connected.fileno() < 0:
        return
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no descriptor is left
        os.close(connected.detach())
        return
    os.dup2(null, connected.fileno(), inheritable=False)
    os.close(null)


class ShardPin:
    """A pin on each of some shards, dropped with the object."""

    __slots__ = ("__weakref__", "shards")

    def __init__(self, shards: Sequence[int]) -> None:
        self.shards = shards


class _Held(weakref.ref[ShardPin]):
    """A weak reference to a pin, with the pinned shards."""

    __slots__ = ("shards",)
    shards: Sequence[int]


class ClientPins:
    """The live pins of one connection. `flush` is called from any thread, to have `take` called soon. An interrupt
    (Ctrl-C) within the finalizer may prevent that, so the connection also checks `dropped` before each request. An
    interrupt loses no pin: a callback without Python code, the first to be called, notes the end of its object."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self.source: tuple[str, bytes] | None = None
        """The node's address, and this client's token; None if children cannot inherit pins."""
        self._flush = flush
        self._lock = threading.RLock()
        self.access = memory.MappingAccess()
        """The mappings of the connection."""
        self._heir: InheritedPins | None = None  # the pins made for a child, during a fork
        self._inherited: frozenset[_Held] = frozenset()  # the pins that `_heir` has too
        self._held: set[_Held] = set()  # the pins that `take` has not returned yet
        self._over: deque[_Held] = deque()  # those of them whose objects have ended
        self._asked = False  # whether `flush` was called since the last `take`
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._sending = False
        _all.add(self)

    def hold(self, *shards: int) -> ShardPin:
        """A pin object for shards that the node has pinned. The pins on all of them are dropped together. Waits while
        another thread forks: the child would have a view without a pin."""
        with _forking:
            pin = ShardPin(shards)
            weakref.finalize(pin, self._drop).atexit = False
            held = _Held(pin, self._over.append)  # called before the finalizer, because it is registered later
            held.shards = shards
            self._held.add(held)
            return pin

    @property
    def live(self) -> int:
        """The number of pins."""
        return len(self._live)

    @property
    def _live(self) -> set[_Held]:
        return self._held.difference(self._over)  # without the lock: a fork must not wait for a thread that drops a pin

    def _drop(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._send()
            elif not self._asked:
                self._asked = True
                self._flush()

    @property
    def dropped(self) -> bool:
        """Whether `take` has dropped pins to return. Drops pins of `drop_later` that are due first."""
        if _used:
            _sweep()
        return bool(self._over)

    def take(self) -> list[int]:
        """Return the numbers of the shards whose pins were dropped since the last call, one for each pin."""
        dropped: list[int] = []
        with self._lock, suppress(IndexError):
            self._asked = False
            while True:  # a finalizer may take some meanwhile
                held = self._over.popleft()
                self._held.discard(held)
                dropped += held.shards
        return dropped

    def before_fork(self, deadline: Deadline) -> None:
        """Make pins for a child if there are views that it could read, and the node answers by the deadline."""
        live = self._live
        if live and self.source is not None:
            self._inherited = frozenset(live)
            self._heir = inherit(*self.source, deadline)

    def after_fork_in_parent(self) -> None:
        """Close the parent's copy of the child's connection."""
        if self._heir is not None and self._heir.connected is not None:
            self._heir.connected.close()
        self._heir = None

    def after_fork_in_child(self) -> None:
        """Release the parent's socket, and continue with that of `_heir`. Forbid reads if the child lacks a pin."""
        parents, heir = self._socket, self._heir
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._flush = lambda: None
        self._socket, self._unsent, self._heir = (heir.connected if heir else None), bytearray(), None
        self._sending = False
        # The heir lacks a pin that a signal handler got meanwhile.
        live = self._live
        self.access.after_fork_in_child(readable=not live or (heir is not None and live <= self._inherited))
        self.source = (self.source[0], heir.token) if self.source and heir and heir.token else None
        if parents is not None:
            let_go(parents)
        self._send()

    def inherit(self, connected: socket.socket, rest: bytes) -> None:
        """Own the socket of a closed plane until the last pin is dropped. `rest`: bytes that must still be sent."""
        with self._lock:
            self._socket = connected
            self._unsent = bytearray(rest)
            self._send()

    def end(self) -> None:
        """Close an inherited socket at the end of the process, which drops all pins."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _send(self) -> None:
        if self._socket is None:
            return
        dropped = self.take()
        if not self._held:
            self._socket.close()
            self._socket = None
            return
        if dropped:
            self._unsent += frame(sm.UnpinShards(dropped))
        if self._sending:  # called by a finalizer within the loop below, which sends the rest
            return
        self._sending = True
        try:
            while self._unsent and self._socket is not None:
                del self._unsent[: self._socket.send(bytes(self._unsent))]
        except OSError:  # the node has ended or does not read; the end of the connection drops all pins
            pass
        finally:
            self._sending = False


_forking = threading.RLock()
"""Held during a fork, one at a time because each sets `_heir`; reentrant, since a signal handler may fork."""


def _before_fork() -> None:
    _forking.acquire()
    deadline = Deadline.after(ANSWER_S)
    for pins in list(_all):
        pins.before_fork(deadline)


def _after_fork_in_parent() -> None:
    for pins in list(_all):
        pins.after_fork_in_parent()
    _forking.release()


def _after_fork_in_child() -> None:
    _forking._at_fork_reinit()  # type: ignore[attr-defined]
    for pins in list(_all):
        pins.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _end_all() -> None:
    for pins in list(_all):
        pins.end()


atexit.register(_end_all)


ANSWER_S = 5.0
"""Seconds for which a fork waits for the nodes of all planes together."""

_READ = 64 << 10
_CONNECT_S = 0.001  # the least timeout of a connect; a node that has ended refuses at once
_decoder = decoder(AnyReply)


@dataclass(frozen=True, slots=True)
class InheritedPins:
    """The connection of a child, and its token, by which the child's children inherit pins. None as the connection
    means that the node has ended, so that its memory cannot change any more."""

    connected: socket.socket | None = None
    token: bytes = b""


def inherit(address: str, token: bytes, deadline: Deadline) -> InheritedPins | None:
    """Make a connection with the same pins as the client with this token. Returns None if the node does not answer by
    the deadline."""
    with suppress(DataplaneError, OSError, msgspec.MsgspecError):
        try:
            connected = connect(parse_address(address), max(deadline.remaining_s, _CONNECT_S))
        except PeerUnavailable as error:
            has_ended = isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)
            return InheritedPins() if has_ended else None
        try:
            own = _inherited(connected, token, deadline) if deadline.remaining_s else b""
            if own:
                connected.setblocking(False)
                return InheritedPins(connected, own)
            connected.close()
        except BaseException:
            connected.close()
            raise
    return None


def _inherited(connected: socket.socket, token: bytes, deadline: Deadline) -> bytes:
    """Let the new client inherit pins. Returns its token; empty if it inherits none. Raises TimeoutError and
    BlockingIOError at the deadline."""
    own = b""
    connected.settimeout(deadline.remaining_s)
    label = f"child of {program()}"
    connected.sendall(frame(m.Hello(1, m.MAJOR, m.MINOR, label, False)) + frame(sm.InheritPins(2, token)))
    framer = Framer()
    while data := connected.recv(_READ):
        connected.settimeout(deadline.remaining_s)  # at zero it does not block
        for body in framer.feed(data):
            reply = _decoder.decode(body)
            if isinstance(reply, m.Welcome):
                own = reply.token
            elif isinstance(reply, m.Failure):
                return b""
            elif isinstance(reply, m.Done):
                return own
    return b""
