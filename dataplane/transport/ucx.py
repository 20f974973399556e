"""Moves bytes by UCX, through `ucxx`: the owner sends tagged messages, the reader receives them in place.

Each end of a channel has a context, a worker and an endpoint of its own. Their addresses are exchanged over the
channel's socket, and so is a random secret tag: a message is received if it has the next tag. Long ranges are sent in
place, short ones are packed. A few messages are in progress at a time. The owner announces each on the socket, and the
reader posts no other: so each begun message completes, even if a read ends early, as long as both ends live; both drain
before they close. (ucxx cancels incomplete messages, but leaks the worker of one that had begun. That happens only for
peers that vanish, and at most `_MOST_LOST` times.)

UCX chooses the network, as set in the environment: UCX_TLS, UCX_NET_DEVICES. The PyPI build of UCX has tcp and shared
memory alone; one that is built with verbs has RDMA. Endpoints handle errors (else UCX would wait for a peer that has
died), which excludes reads of another process's memory (cma).

Invariants: a channel that was closed has no request that could write: each is complete, or was cancelled with its
endpoint.
"""

from __future__ import annotations

import importlib
import re
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.transport.channels import Bytes, DataChannel, Transport, agree, heard, mapped, tell, told
from dataplane.transport.offers import OfferedMemory
from dataplane.transport.sockets import IDLE_S, exactly

_UNDER_WAY = 4  # messages
_PIECE = 8 << 20  # bytes of a message
_SMALL, _PACK = 64 << 10, 1 << 20  # ranges of fewer bytes are packed, into so many
_COMES = b"\x03"  # the owner sends it on the socket before each message
_LOOK_MS = 1000  # between reads, if no notification comes
_STOP_S, _PAUSE_S = 2.0, 50e-6  # for messages under way when a read ends early, and between looks at them
_LAST_WORDS = 64
_CONNECT_S = 10.0
_MOST_LOST = 32


class Ucx(Transport):
    """The transport."""

    name = "ucx"

    def __init__(self, host: str, told: str = "") -> None:
        super().__init__(host, told)
        self._lost = 0

    def _prepare(self) -> None:
        _library()

    def _channel(self, stream: socket.socket) -> DataChannel:
        if self._lost >= _MOST_LOST:
            raise OSError(
                f"UCX: {self._lost} ends of connections were lost with peers that vanished; start the node again"
            )
        return _UcxChannel(stream, self._lose)

    def _lose(self) -> None:
        self._lost += 1


def _library() -> Any:
    """The bindings. Raises OSError if they are not installed."""
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise OSError(f"ucxx is not installed: pip install rollout-dataplane[ucx] ({error})") from error


def carries_rdma() -> bool:
    """Whether the installed UCX was built with verbs, and finds a device."""
    try:
        about = _library().UCXContext().info
    except Exception:  # any failure to start: UCX is then not available
        return False
    return bool(re.search(r"component +\d+ *: *(ib|mlx)", about))


@dataclass(frozen=True, slots=True)
class _Message:
    """A message in flight, and the owner of its bytes: the request alone does not keep them."""

    request: Any
    buffer: Bytes


class _UcxChannel(DataChannel):
    def __init__(self, stream: socket.socket, lose: Callable[[], None]) -> None:
        self._ucx = _library()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._stream = stream
        self._lose = lose
        self._endpoint: Any = None
        with self._errors():
            context = self._ucx.UCXContext(feature_flags=(self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP))
            self._worker = self._ucx.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            agree(stream, ".".join(map(str, self._ucx.get_ucx_version())))
            mine = secrets.token_bytes(8)
            tell(stream, mine + self._worker.address.tobytes())
            theirs = told(stream)
            self._tag = int.from_bytes(mine) ^ int.from_bytes(theirs[:8])
            stream.sendall(_COMES)
            exactly(stream, len(_COMES))
            self._connect(self._ucx.UCXAddress.create_from_buffer(theirs[8:]), mine > theirs[:8])

    def _connect(self, address: Any, first: bool) -> None:
        """The ends send each other a byte, one after the other, so that later messages find both connected. Both ends
        make this call, and neither returns half-way."""
        self._endpoint = self._worker.create_endpoint_from_worker_address(address, True)
        tag, byte = self._next(), np.zeros(1, np.uint8)
        arrives = _Message(self._endpoint.tag_recv(self._array(byte), tag), byte)
        if not first:
            self._drain(deque([arrives]), _CONNECT_S)
        one = np.ones(1, np.uint8)
        self._drain(deque([_Message(self._endpoint.tag_send(self._array(one), tag), one), arrives]), _CONNECT_S)
        if not byte[0]:
            self.close()
            raise OSError("UCX: the other end can not be reached")

    def give(self, offered: OfferedMemory, ranges: Sequence[tuple[int, int]]) -> None:
        with self._errors(), mapped(offered.memory) as source:
            under_way: deque[_Message] = deque()
            try:
                for piece in _messages(ranges):
                    while len(under_way) >= _UNDER_WAY:
                        self._first(under_way)
                    parts = [source[start:stop] for start, stop in piece]
                    sent = parts[0] if len(parts) == 1 else np.concatenate(parts)
                    self._stream.sendall(_COMES)
                    request = self._endpoint.tag_send(self._array(sent), self._next())
                    under_way.append(_Message(request, sent))
                    del parts, sent
                while under_way:
                    self._first(under_way)
                self._wait(lambda: heard(self._stream))
            finally:
                self._drain(under_way)

    def take(self, into: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        with self._errors():
            target = np.frombuffer(into, np.uint8)
            under_way: deque[_Message] = deque()
            packed: list[tuple[Bytes, list[tuple[int, int]]]] = []
            try:
                for piece in _messages(ranges):
                    while under_way and under_way[0].request.completed:
                        under_way.popleft().request.check_error()
                    self._wait(lambda: heard(self._stream))
                    self._stream.recv(len(_COMES))
                    if len(piece) == 1:
                        buffer = target[piece[0][0] : piece[0][1]]
                    else:
                        buffer = np.empty(sum(stop - start for start, stop in piece), np.uint8)
                        packed.append((buffer, piece))
                    under_way.append(_Message(self._endpoint.tag_recv(self._array(buffer), self._next()), buffer))
                while under_way:
                    self._first(under_way)
            finally:
                self._drain(under_way)
        for buffer, piece in packed:
            at = 0
            for start, stop in piece:
                target[start:stop] = buffer[at : at + stop - start]
                at += stop - start

    def _drain(self, under_way: deque[_Message], within_s: float = _STOP_S) -> None:
        """Wait a bounded time for begun messages, and let UCX send its queued data to the other end."""
        until = time.monotonic() + within_s
        while under_way and time.monotonic() < until:
            if under_way[0].request.completed:
                under_way.popleft()
            elif not self._worker.progress_once():
                time.sleep(_PAUSE_S)
        if under_way:
            self._lose()
        under_way.clear()
        for _ in range(_LAST_WORDS):
            self._worker.progress_once()

    def _next(self) -> Any:
        self._tag = (self._tag + 1) % 2**64
        return self._ucx.UCXXTag(self._tag)

    def _first(self, under_way: deque[_Message]) -> None:
        """Wait for the first message, and remove it."""
        self._wait(lambda: bool(under_way[0].request.completed))
        under_way.popleft().request.check_error()

    def _wait(self, done: Callable[[], bool]) -> None:
        """Let UCX progress until `done()`. Raises EOFError if the other end goes meanwhile, TimeoutError."""
        until = time.monotonic() + IDLE_S
        poller = select.poll()
        poller.register(self._stream, select.POLLIN)
        poller.register(self._worker.epoll_file_descriptor, select.POLLIN)
        while not done():
            if self._worker.progress_once() or done() or not self._worker.arm():
                continue
            if time.monotonic() > until:
                raise TimeoutError("the other end takes or sends nothing")
            told = [fd for fd, _ in poller.poll(_LOOK_MS)]
            if self._stream.fileno() in told and heard(self._stream):
                poller.unregister(self._stream)  # the reader has everything: the rest is UCX's own

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._ucx.UCXError as error:
            raise OSError(f"UCX: {error}") from None

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close_blocking()
            for _ in range(_LAST_WORDS):  # a cancellation takes effect with the next step
                self._worker.progress_once()
        self._worker = None


def _messages(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The contents of each message: a part of one range, or several short ranges."""
    packed: list[tuple[int, int]] = []
    size = 0
    for start, stop in ranges:
        if stop - start < _SMALL:
            packed.append((start, stop))
            size += stop - start
        if packed and (size >= _PACK or stop - start >= _SMALL):
            yield packed
            packed, size = [], 0
        if stop - start >= _SMALL:
            yield from ([(at, min(stop, at + _PIECE))] for at in range(start, stop, _PIECE))
    if packed:
        yield packed
