"""The control channel without a key, on loopback: spoken with processes of this node's own user alone.

Everybody on a host can connect to a port on loopback, and ZeroMQ can not say who did. So where there is no key this
process owns the TCP connections: it asks the kernel whose the other end of each is (`wire.owner`), closes what is not
its own user's, and only then passes bytes between the connection and ZeroMQ, which listens, and connects, at sockets
that no other process reaches. The same holds for connections that this node makes: another user may listen at the port
of a node that has died.

Rejected (decision 0032): a key for each user in a file, which nodes with other directories do not find; to ask ZeroMQ
for the descriptor of a message's connection, which may be another's by then.

What always holds: not a byte goes to or comes from ZeroMQ before the other end is known to be this user's, and the
connection was open all the time between.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable

from dataplane.wire.local import peer
from dataplane.wire.owner import owner

log = logging.getLogger(__name__)

_MOST = 8192  # connections of one end
_SEEN_S, _LOOK_S = 2.0, 0.005  # to be accepted by the process that listens; between looks
_BACKLOG = 128
_TOLD = 64  # users that the log tells of
_AGAIN_S = 0.1  # until it is tried again to accept, where descriptors are short


def private_name() -> str:
    """A name for a socket that is in no directory, for this process: what listens there looks at who comes."""
    return f"dataplane-{os.getpid()}-{secrets.token_hex(8)}"


def listening(address: str) -> socket.socket:
    """A socket that listens at tcp://HOST:PORT. Raises OSError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """Its tcp://HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


# Whose a connection is


async def settled_owner(connected: socket.socket) -> int | None:
    """As `owner`, once the process at the other end has accepted the connection; None where it does not, or has
    gone."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _SEEN_S
    while True:
        try:
            uid = owner(connected)
        except OSError:
            return None
        if uid is not None or loop.time() > until:
            return uid
        await asyncio.sleep(_LOOK_S)


# Passing bytes on


class _End(asyncio.Protocol):
    """One of two ends; what comes at one goes out at the other, and both close together. `gone(self)` is called when it
    is closed."""

    def __init__(self, gone: Callable[[_End], None]) -> None:
        self._gone = gone
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()

    def join(self, other: _End) -> None:
        """Pass bytes on to `other` from now on."""
        self.other = other
        for data in self._early:
            self.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self.other is None:  # some Pythons read although `connection_made` paused it (gh-103607)
            self._early.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()
        self.transport = self.other = None
        self._gone(self)


Open = Callable[[socket.socket], Awaitable[socket.socket | None]]


class Relay:
    """Accepts connections, and passes on what is said on each to another, that `other(accepted)` opens: None for who is
    not to be heard. To be used from one event loop."""

    def __init__(self, listener: socket.socket, other: Open) -> None:
        self._listener = listener
        self._other = other
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[_End] = set()
        self._open = True
        listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        while self._open:
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # out of descriptors, most likely
                self._loop.remove_reader(self._listener.fileno())
                self._pause()
                return
            if len(self._tasks) + len(self._ends) // 2 >= _MOST:
                accepted.close()
                continue
            accepted.setblocking(False)
            left = [accepted]
            task = self._loop.create_task(self._join(left))
            self._tasks.add(task)
            task.add_done_callback(lambda task, left=left: self._joined(task, left))  # type: ignore[misc]

    def _joined(self, task: asyncio.Task[None], left: list[socket.socket]) -> None:
        self._tasks.discard(task)
        for each in left:  # it was cancelled before it began
            each.close()

    def _pause(self) -> None:
        """Who comes waits, until it is tried again to accept."""
        self._loop.call_later(_AGAIN_S, self._accept_again)

    def _accept_again(self) -> None:
        if not self._open:
            return
        try:
            self._loop.add_reader(self._listener.fileno(), self._accept)
        except OSError:
            self._pause()

    async def _join(self, left: list[socket.socket]) -> None:
        """Join who was accepted with another. `left`: what no end owns yet."""
        ends: list[_End] = []
        try:
            other = await self._other(left[0])
            if other is not None:
                left.append(other)
                while left:
                    ends.append(await self._end(left[0]))
                    del left[0]
        except OSError as error:
            log.debug("a connection on loopback: %s", error)
        finally:
            for each in left:
                each.close()
            if left:
                _abort(ends)
        if len(ends) < 2:
            return
        ends[0].join(ends[1])
        ends[1].join(ends[0])
        for one in ends:
            if one.transport is None or one.transport.is_closing():  # it has gone meanwhile
                one.connection_lost(None)
            else:
                one.transport.resume_reading()

    async def _end(self, connected: socket.socket) -> _End:
        end = _End(self._ends.discard)
        await self._loop.create_connection(lambda: end, sock=connected)
        if end.transport is not None:  # not gone meanwhile
            self._ends.add(end)
        return end

    def close(self) -> None:
        """Accept nobody more, and end what is there."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        _abort(self._ends)
        self._ends.clear()


def _abort(ends: Iterable[_End]) -> None:
    for end in ends:
        if end.transport is not None:
            end.transport.abort()


def heard_at(listener: socket.socket, name: str) -> Relay:
    """Others who connect to the listener, if they are this user's, are heard by ZeroMQ, which listens at this name."""

    told: set[int] = set()  # who was refused; the log has one line of each

    async def open_to(accepted: socket.socket) -> socket.socket | None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        uid = owner(accepted)
        if uid != os.getuid():
            if uid is not None and uid not in told and len(told) < _TOLD:
                told.add(uid)
                log.warning("user %d was refused: without a key other users of this host are not heard", uid)
            return None
        return await _connected(socket.AF_UNIX, "\0" + name)

    return Relay(listener, open_to)


def reached_by(name: str, address: str) -> Relay:
    """What ZeroMQ says to this name goes to tcp://HOST:PORT, if a process of this user listens there on loopback."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    told: set[int] = set()

    async def open_to(accepted: socket.socket) -> socket.socket | None:
        if peer(accepted)[0] != os.getpid():
            return None
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        if not ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback:
            raise OSError(errno.ENETUNREACH, "without a key others are on this host alone")
        connected = await _connected(family, where)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            uid = await settled_owner(connected)
        except BaseException:
            connected.close()
            raise
        if uid == os.getuid():
            return connected
        connected.close()
        if uid is not None and uid not in told and len(told) < _TOLD:
            told.add(uid)
            log.warning("user %d listens at %s, and is not spoken to without a key", uid, address)
        return None

    try:
        return Relay(listener, open_to)
    except BaseException:
        listener.close()
        raise


async def _connected(family: int, where: object) -> socket.socket:
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connected, where)  # type: ignore[arg-type]
    except BaseException:
        connected.close()
        raise
    return connected
