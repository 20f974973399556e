"""Bytes by UCX, through `ucxx`: the owner sends tagged messages, the reader receives them where they belong.

Each end of a lane has a context, a worker and an endpoint of its own. Their addresses are told over the lane's socket,
and so is a random tag, that nobody else can name: a message is received if it bears the tag that is next. Long stretches
travel as they lie, in messages of `_PIECE` bytes; runs of short ones are packed into messages of `_PACK`. Some messages
are under way at a time, and the next follow as they arrive.

What carries them is UCX's choice, that the environment steers: UCX_TLS, UCX_NET_DEVICES. The PyPI build of UCX has tcp
and shared memory alone; one that is built with verbs has RDMA. Endpoints handle errors (else UCX would wait for a peer
that has died), which costs one thing: reading from another process's memory (cma), that UCX has only without.

What always holds: a lane that was closed has no request that could write: its endpoint was closed by force, and what it
had begun is complete, as cancelled.
"""

from __future__ import annotations

import importlib
import secrets
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dataplane.transport.base import Memory
from dataplane.transport.lanes import Bytes, Lane, Lanes, heard, mapped, tell, told

_PIECE = 8 << 20  # bytes of a message
_UNDER_WAY = 4  # messages
_SMALL, _PACK = 64 << 10, 1 << 20  # stretches of fewer bytes are packed, into so many
_LOOK_MS = 1000  # between looks, where nothing is told
_STOPS = 1000  # looks at what was cancelled, `_STOP_NS` apart, before it is given up
_STOP_NS = 1_000_000


class Ucx(Lanes):
    """See the module."""

    name = "ucx"

    def _prepare(self) -> None:
        _library()

    def _lane(self, stream: socket.socket) -> Lane:
        return _UcxLane(stream)


def _library() -> Any:
    """The bindings. Raises OSError where they are not there."""
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise OSError(f"ucxx is not installed: pip install rollout-dataplane[ucx] ({error})") from error


class _UcxLane(Lane):
    def __init__(self, stream: socket.socket) -> None:
        self._ucx = _library()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._stream = stream
        self._endpoint: Any = None
        with self._errors():
            context = self._ucx.UCXContext(feature_flags=(self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP))
            self._worker = self._ucx.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            tell(stream, self._worker.address.tobytes())
            mine = secrets.token_bytes(8)
            tell(stream, mine)
            address = self._ucx.UCXAddress.create_from_buffer(told(stream))
            self._tag = int.from_bytes(mine) ^ int.from_bytes(told(stream))
            self._endpoint = self._worker.create_endpoint_from_worker_address(address, True)

    def give(self, memory: Memory, stretches: Sequence[tuple[int, int]]) -> None:
        with self._errors(), mapped(memory) as source:
            under_way: deque[Any] = deque()
            for piece in _pieces(stretches):
                if len(under_way) == _UNDER_WAY:
                    self._finish(under_way.popleft())
                parts = [source[start:stop] for start, stop in piece]
                sent = parts[0] if len(parts) == 1 else np.concatenate(parts)
                under_way.append(self._endpoint.tag_send(self._array(sent), self._next()))
            while under_way:
                self._finish(under_way.popleft())
            self._wait(lambda: heard(self._stream))

    def take(self, into: memoryview, stretches: Sequence[tuple[int, int]]) -> None:
        with self._errors():
            target = np.frombuffer(into, np.uint8)
            under_way: deque[tuple[Any, Bytes, list[tuple[int, int]]]] = deque()
            for piece in _pieces(stretches):
                if len(under_way) == _UNDER_WAY:
                    self._arrived(target, *under_way.popleft())
                (first, last), length = (piece[0][0], piece[-1][1]), sum(stop - start for start, stop in piece)
                buffer = target[first:last] if len(piece) == 1 else np.empty(length, np.uint8)
                under_way.append((self._endpoint.tag_recv(self._array(buffer), self._next()), buffer, piece))
            while under_way:
                self._arrived(target, *under_way.popleft())

    def _arrived(self, target: Bytes, request: Any, buffer: Bytes, piece: list[tuple[int, int]]) -> None:
        self._finish(request)
        if len(piece) > 1:
            at = 0
            for start, stop in piece:
                target[start:stop] = buffer[at : at + stop - start]
                at += stop - start

    def _next(self) -> Any:
        self._tag = (self._tag + 1) % 2**64
        return self._ucx.UCXXTag(self._tag)

    def _finish(self, request: Any) -> None:
        self._wait(lambda: request.completed)
        request.check_error()

    def _wait(self, done: Any) -> None:
        """Let UCX work until it is done. Raises EOFError where the other end goes meanwhile."""
        poller = select.poll()
        poller.register(self._stream, select.POLLIN)
        poller.register(self._worker.epoll_file_descriptor, select.POLLIN)
        while not done():
            if self._worker.progress_once() or done() or not self._worker.arm():
                continue
            told = [fd for fd, _ in poller.poll(_LOOK_MS)]
            if self._stream.fileno() in told and heard(self._stream):
                poller.unregister(self._stream)  # the reader has everything: what is left is UCX's own

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._ucx.UCXError as error:
            raise OSError(f"UCX: {error}") from None

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close_blocking(_STOP_NS, _STOPS)
            del endpoint
        self._worker = None


def _pieces(stretches: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """What goes into each message: a part of one stretch, or several short stretches."""
    packed: list[tuple[int, int]] = []
    size = 0
    for start, stop in stretches:
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
