"""The channel between processes of one host: a unix stream socket that carries messages and descriptors.

asyncio's streams cannot pass descriptors, so the channel reads and writes its socket itself when the event loop reports
that it is ready; that also saves a copy. uvloop gains little: a request and reply of 200 bytes take 102 microseconds
with asyncio, 87 with uvloop in both processes.

The end that sends replies (`paced`) limits its unsent bytes: while more than `_PAUSE_AT` bytes wait to be sent, it
reads no more requests, and a reply that is not made at once first waits for `room`, in order. So only messages that are
sent without waiting for room can reach the hard bound, even if many requests of a slow receiver are answered at once.
The other end always reads: if each end waited for the other, neither would continue.

Invariants: `closed` is called once, with the reason, and nothing is delivered after it. Unsent bytes are bounded: a
peer that lets more accumulate is disconnected. A message that cannot be decoded, or whose receiver raises, delays no
other message. Descriptors that were not taken are closed. Of a partial message at most `MAX_FRAME` bytes and one read
are kept, and none after the end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dataplane.errors import DataplaneError, PeerUnavailable, ProtocolMismatch, Unauthenticated
from dataplane.log_lines import error_line
from dataplane.wire.boundary import refusal
from dataplane.wire.framing import Framer, frame
from dataplane.wire.messages import Message

log = logging.getLogger(__name__)

_OWN = "start a node as this user, and put its address into DATAPLANE_ADDRESS"
_READ = 256 << 10
_MAX_DESCRIPTORS = 64  # the most in one send; the kernel takes 253
_BESIDE = socket.CMSG_LEN(4 * _MAX_DESCRIPTORS)  # the bytes of so many descriptors as ancillary data
_MAX_UNSENT = 16 << 20  # bytes
_TOGETHER = 128 << 10  # the most bytes of messages in one send: as many as a socket takes at once
_PAUSE_AT = 1 << 20  # with more unsent bytes, no requests are read and no replies are made
_SLICE_S = 0.02  # after that long with requests of one client, the node turns to the others
_SHORT_OF = (errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS)  # a resource is used up that may be free again soon
_AGAIN_S = 0.01
_CONNECT_S = 5.0  # timeout for a node that is too busy to accept
_SCHEME = "unix://"
_UCRED = struct.Struct("3i")  # pid, uid, gid: socket(7), SO_PEERCRED
_TIMEVAL = struct.Struct("ll")


def parse_address(address: str) -> Path:
    """The socket's path of an address `unix:///path`. Raises ValueError for any other."""
    if not is_address(address):
        raise ValueError(f"{address!r} is no address of a node; one looks like unix:///run/dataplane/node.sock")
    return Path(address.removeprefix(_SCHEME))


def is_address(text: str) -> bool:
    """Whether this is the address of a node."""
    return text.startswith(_SCHEME + "/")


def format_address(path: Path) -> str:
    """The address of the node that listens at `path`."""
    return f"{_SCHEME}{path}"


def listen(path: Path, backlog: int = 128) -> socket.socket:
    """A non-blocking listening socket at `path`, mode 0600. Raises OSError if the path exists."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path, limit_s: float | None = None) -> socket.socket:
    """A non-blocking socket connected to the node at `path`. Waits up to `limit_s` (5 s if None) for a busy node to
    accept.

    Raises PeerUnavailable if none listens, Unauthenticated if the socket is another user's.
    """
    # The kernel's timeout. Python's own would make the socket non-blocking, and a full backlog an immediate error.
    seconds = _CONNECT_S if limit_s is None else limit_s
    limit = _TIMEVAL.pack(int(seconds), max(1, int(seconds % 1 * 1e6)))  # zero would be no limit
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connected.connect(str(path))
            _, uid = peer(connected)
            if uid != os.getuid():
                users = f"the node at {path} is user {uid}'s, this process {os.getuid()}'s"
                raise Unauthenticated(f"{users}: {_OWN}", peer=str(uid))
            connected.setblocking(False)
        except BaseException:
            connected.close()
            raise
    except PermissionError:
        raise Unauthenticated(f"the node at {path} is another user's: {_OWN}", peer=str(path)) from None
    except OSError as error:
        address = format_address(path)
        raise PeerUnavailable(f"no node answers at {address}: {error.strerror or error}", address=address) from None
    return connected


def peer(connected: socket.socket) -> tuple[int, int]:
    """The process and user at the other end, from the kernel."""
    pid, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class _Descriptors(list[int]):
    """The channel's own descriptors, to be closed once they are sent."""

    def close(self) -> None:
        while self:
            os.close(self.pop())


def _done(descriptors: Sequence[int]) -> None:
    if isinstance(descriptors, _Descriptors):
        descriptors.close()


class LocalChannel:
    """One end of a connected socket, which it owns. Used from its event loop only.

    `received(message)` is called for each message; it may take descriptors with `take_descriptors`. `closed(error)`
    is called when the other side has closed the connection (None) or has violated the protocol. It returns whether it
    keeps the socket, which is closed otherwise.
    """

    def __init__(
        self,
        connected: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        received: Callable[[Any], None],
        closed: Callable[[DataplaneError | None], bool],
        *,
        descriptors: bool = False,
        refused: Callable[[bytes, DataplaneError], bool] | None = None,
        paced: bool = True,
    ) -> None:
        """`descriptors`: whether to accept any. `refused(body, error)` is called with a message that cannot be
        decoded; it sends the answer, if any, and returns whether the channel continues. `paced`: whether to stop
        reading while more than `_PAUSE_AT` bytes wait to be sent. Only one end may be paced: two could both stop
        reading and wait for each other."""
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._decoder = decoder
        self._received = received
        self._closed = closed
        self._framer = Framer()
        self._takes_descriptors = descriptors
        self._refused = refused
        self._paced = paced
        self.size = 0
        """Bytes of the message that was received last."""
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._half_sent = False
        self._all_sent: asyncio.Future[None] | None = None
        self._gathering = False  # sent messages wait for more to go with them
        self._writing = False
        self._messages: Iterator[bytes] = iter(())
        self._paused = False
        self._rooms: deque[asyncio.Future[None]] = deque()
        self.broken = False
        """Whether the other side has stopped receiving: the last messages have not reached it."""
        self._open = True
        self._loop.add_reader(connected.fileno(), self._readable)

    @property
    def open(self) -> bool:
        return self._open

    @property
    def full(self) -> bool:
        """Whether too many bytes are unsent to make further replies."""
        return self._unsent_bytes > _PAUSE_AT

    @property
    def quiet(self) -> bool:
        """Whether messages are sent and received at once, without waiting for others."""
        return self._open and not (self._gathering or self._unsent or self._paused)

    def read(self) -> None:
        """Deliver the messages that have arrived. For callers outside of the event loop, while it does not run."""
        if self._open:
            self._readable()

    async def room(self) -> bool:
        """Wait until there is room for one more message. The caller must send it before it awaits anything else.
        Returns whether it had to wait. First come, first served. A closed channel always has room."""
        if not (self.full or self._rooms) or not self._open:
            return False
        future: asyncio.Future[None] = self._loop.create_future()
        self._rooms.append(future)
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # its turn had come: pass it on
                self._let_in()
            raise
        return True

    async def drain(self) -> None:
        """Wait until everything is sent, or the channel is closed."""
        if self._unsent and self._open:
            if self._all_sent is None:
                self._all_sent = self._loop.create_future()
            await asyncio.shield(self._all_sent)

    def _let_in(self) -> None:
        """If nothing is unsent, end `drain`. If there is room, wake the first task that waits in `room`; its
        send calls this again. If none waits, read requests again."""
        if self._all_sent is not None and not (self._unsent and self._open):
            self._all_sent.set_result(None)
            self._all_sent = None
        while self._rooms and not (self.full and self._open):
            future = self._rooms.popleft()
            if not future.done():
                future.set_result(None)
                if self._open:
                    return
        if self._paused and not self.full:
            self._paused = False
            self._loop.call_soon(self._deliver)
            self._read_on()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message now or, if the socket is full, as soon as possible. A closed channel drops it. Raises
        LimitExceeded and Misuse for one that cannot be sent.

        The descriptors stay the caller's, which may close them afterwards: the channel duplicates those that wait.
        """
        if self._open:
            self.post(frame(message), descriptors)

    def post(self, framed: bytes, descriptors: Sequence[int] = ()) -> None:
        """As `send`, for a message that was framed already."""
        if not self._open:
            return
        data = memoryview(framed)
        self._unsent_bytes += len(data)
        before = len(self._unsent)
        while len(descriptors) > _MAX_DESCRIPTORS:  # these go with the first byte
            self._unsent.append((data[:1], descriptors[:_MAX_DESCRIPTORS]))
            data, descriptors = data[1:], descriptors[_MAX_DESCRIPTORS:]
        self._unsent.append((data, descriptors))
        added = len(self._unsent) - before
        if self._gathering and not descriptors and self._unsent_bytes < _TOGETHER:
            return
        self._flush()
        if descriptors:
            self._keep_descriptors(min(added, len(self._unsent)))
        if self._unsent_bytes > _MAX_UNSENT:
            self.close(ProtocolMismatch("the other side does not read its messages"))

    def gather(self) -> None:
        """Collect the messages sent until the next step of the event loop, and send them together."""
        if not self._gathering:
            self._gathering = True
            self._loop.call_soon(self._gathered)

    def _gathered(self) -> None:
        self._gathering = False
        if self._unsent and self._open and not self._writing:
            self._flush()

    def _join_unsent(self) -> None:
        """Merge the first waiting messages into one block of bytes, up to the first message with descriptors."""
        joined: list[memoryview] = []
        nbytes = 0
        while self._unsent and not self._unsent[0][1] and (not joined or nbytes + len(self._unsent[0][0]) <= _TOGETHER):
            joined.append(self._unsent.popleft()[0])
            nbytes += len(joined[-1])
        if joined:
            self._unsent.appendleft((memoryview(b"".join(joined)) if len(joined) > 1 else joined[0], ()))

    def _keep_descriptors(self, last: int) -> None:
        """Duplicate the descriptors of the last messages, which wait. By the time they are sent, the caller may have
        closed its descriptors, and their numbers may be those of other files."""
        for at in range(len(self._unsent) - last, len(self._unsent)):
            data, descriptors = self._unsent[at]
            kept = _Descriptors()
            try:
                kept.extend(map(os.dup, descriptors))
            except OSError as error:
                kept.close()
                self.close(PeerUnavailable(f"no descriptors are left to pass: {error.strerror}"))
                return
            self._unsent[at] = (data, kept)

    def _drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            _done(descriptors)
        self._unsent.clear()

    def _flush(self) -> None:
        while self._unsent and self._open:
            if len(self._unsent) > 1:
                self._join_unsent()
            data, descriptors = self._unsent[0]
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], list(descriptors))
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._watch(self._loop.add_writer, self._flush)
                self._let_in()
                return
            except (BrokenPipeError, ConnectionResetError):  # the peer has gone; its last messages are still to be read
                self._drop_unsent()
                self._unsent_bytes, self._half_sent, self.broken = 0, False, True
                break
            except OSError as error:
                if error.errno in _SHORT_OF:
                    self._loop.call_later(_AGAIN_S, self._flush)
                else:
                    self.close(PeerUnavailable(f"the connection broke: {error.strerror}"))
                return
            _done(descriptors)
            self._unsent_bytes -= sent
            self._half_sent = sent < len(data)
            if self._half_sent:
                self._unsent[0] = (data[sent:], ())
            else:
                self._unsent.popleft()
        if self._writing and self._open:
            self._writing = False
            self._loop.remove_writer(self._socket.fileno())
        self._let_in()

    def _watch(self, watch: Callable[[int, Callable[[], None]], None], then: Callable[[], None]) -> None:
        """Have the event loop call `then` when the socket is ready. If the system refuses that, close the channel."""
        try:
            watch(self._socket.fileno(), then)
        except OSError as error:
            self.close(PeerUnavailable(f"the connection can not be watched: {error.strerror}"))

    def _readable(self) -> None:
        try:
            if self._takes_descriptors:
                data, beside, flags, _ = self._socket.recvmsg(_READ, _BESIDE)
                for level, kind, passed in beside:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        self._descriptors.extend(array("i", passed[: len(passed) // 4 * 4]))
                if flags & socket.MSG_CTRUNC:
                    self.close(
                        PeerUnavailable("this process has no file descriptors left for shared memory: ulimit -n")
                    )
                    return
            else:
                data = self._socket.recv(_READ)  # the kernel closes descriptors that were not asked for
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _SHORT_OF:
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(_AGAIN_S, self._read_on)
            else:
                self.close(PeerUnavailable(f"the connection broke: {error.strerror}"))
            return
        if not data:
            self.close(None)
            return
        self._messages = self._framer.feed(data)
        self._deliver()

    def _read_on(self) -> None:
        if self._open and not self._paused:
            self._watch(self._loop.add_reader, self._readable)

    def _deliver(self) -> None:
        """Deliver the received messages. A paced channel stops while too many bytes of replies are unsent, and goes on
        in the next step of the event loop after `_SLICE_S`. The replies are sent together."""
        if self._paused:
            return
        gathers = not self._gathering
        self._gathering = True
        until = self._loop.time() + _SLICE_S
        try:
            for body in self._messages if self._open else ():
                if not self._hand_over(body):
                    return
                stops = self.full or self._rooms
                if self._paced and (stops or self._loop.time() > until):
                    self._paused = True
                    self._loop.remove_reader(self._socket.fileno())
                    if not stops:
                        self._loop.call_soon(self._let_in)
                    return
        except ProtocolMismatch as error:  # an invalid length
            self._refuse(b"", error)
        finally:
            if gathers:
                self._gathered()

    def _hand_over(self, body: bytes) -> bool:
        """Deliver a message. Returns whether the channel continues."""
        self.size = len(body)
        try:
            message = self._decoder.decode(body)
        except Exception as error:  # the boundary: the sender's values may fail any check
            return self._refuse(body, refusal(error))
        try:
            self._received(message)
        except DataplaneError as error:
            self.close(error)
        except Exception as error:  # the boundary: else the following messages would lie here until more come
            log.error("handling a message from %s failed: %s", self._received, error_line(error))
            self.close(ProtocolMismatch("a message cannot be handled; the log has the reason"))
        return self._open

    def _refuse(self, body: bytes, error: DataplaneError) -> bool:
        if self._refused is not None and self._refused(body, error):
            return True
        self.close(error if isinstance(error, ProtocolMismatch) else ProtocolMismatch(f"not a message: {error}"))
        return False

    def take_descriptors(self, count: int) -> list[int]:
        """The next `count` descriptors that came; the caller closes them. Raises ProtocolMismatch if too few came."""
        if count > len(self._descriptors):
            raise ProtocolMismatch(f"{count} descriptors were announced and {len(self._descriptors)} came")
        return [self._descriptors.popleft() for _ in range(count)]

    def detach(self) -> tuple[socket.socket, bytes]:
        """Close the channel but not its socket. Returns the socket, which is still connected and now the caller's, and
        the rest of a partially sent message, which must be sent before anything else.

        Whole messages that wait are dropped; callers of requests among them get `Closed`. `drain` sends them before.
        """
        self._gathered()
        rest = bytes(self._unsent[0][0]) if self._half_sent else b""
        self._leave_loop()
        return self._socket, rest

    def close(self, error: DataplaneError | None = None) -> None:
        """Close the socket, and call `closed` with the reason. Unsent messages are dropped. Idempotent."""
        if self._gathering:
            self._gathered()
        if self._open:
            self._leave_loop()
            if not self._closed(error):
                self._socket.close()

    def _leave_loop(self) -> None:
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._drop_unsent()
        self._framer.clear()  # else the memory of a partial message stays until the next collection of cycles
        self._messages = iter(())
        self._let_in()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
