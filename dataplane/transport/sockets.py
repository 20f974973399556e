"""Ranges of memory through a blocking socket, each in the cheapest way: `sendfile` for large ones, gathering for small
ones.

A call for each range costs more than the bytes of a small one do. So those below `SMALL` are gathered, up to `_BATCH`
bytes at a time, sent as one, and scattered by the receiver. The bytes on the wire are the same either way: those of all
ranges, in order. Of 16,384 separate rows of 1 KiB, on one machine over loopback: one `sendfile` and `recv_into` each
took 299 ms, `sendmsg` and `recvmsg_into` of 1,024 at a time 55, copying into one buffer and out of it 27. A large range
is sent in calls of megabytes in which the system waits: with Python's own waiting before each part, a receiver took 100
ms of processor time for 288 MiB, and 75 this way.

Invariant: functions here run in threads, and end within a second of being told to (`over`), or when the socket is
shut down.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SMALL = 128 << 10
"""Bytes of a range below which it is gathered."""

IDLE_S = 20.0
"""Seconds without progress after which a step or a transfer between authenticated ends is given up."""

_BATCH = 1 << 20  # bytes that are gathered at a time
_CHUNK = 8 << 20  # bytes sent or received by one call, between checks whether to continue
_WAKE = 1 << 20  # received bytes that wake a thread which waits for more than twice as many
_TIMEVAL = struct.Struct("ll")
_LOOK_S = 0.1  # seconds between checks whether a connection is still wanted

ByteRange = tuple[int, int]
"""The start and the stop of a range."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of a file in memory: a readable descriptor, an offset and a size in bytes."""

    fd: int
    offset: int
    size: int


def connect(host: str, port: int, timeout_s: float, over: Callable[[], bool]) -> socket.socket:
    """A connection, by the first of a name's addresses that answers. Raises OSError, and so within `_LOOK_S` of
    being cancelled: a host that is gone does not answer at all."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in found[:-1]:
        try:
            return _connect(family, address, timeout_s, over)
        except TimeoutError:
            raise
        except OSError:  # try its next address
            continue
    return _connect(found[-1][0], found[-1][4], timeout_s, over)


def _connect(family: int, address: tuple[Any, ...], timeout_s: float, over: Callable[[], bool]) -> socket.socket:
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
        error, left_s = stream.connect_ex(address), timeout_s
        while error == errno.EINPROGRESS and not poller.poll(_LOOK_S * 1000):
            left_s -= _LOOK_S
            if left_s <= 0 or over():
                raise TimeoutError("no answer")
        error = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if error == errno.EINPROGRESS else error
        if error:
            raise OSError(error, os.strerror(error))
        stream.settimeout(timeout_s)
    except BaseException:
        stream.close()
        raise
    return stream


def runs(ranges: Sequence[ByteRange]) -> Iterator[Sequence[ByteRange]]:
    """The ranges that are sent together: a large one by itself, small ones as many as fit a batch."""
    first = size = 0
    for i, (start, stop) in enumerate(ranges):
        count = stop - start
        if i > first and (count >= SMALL or size + count > _BATCH or size >= SMALL):
            yield ranges[first:i]
            first, size = i, 0
        size = size + count if count < SMALL else _BATCH
    if first < len(ranges):
        yield ranges[first:]


def send(
    stream: socket.socket,
    memory: Memory,
    mapped: mmap.mmap | None,
    ranges: Sequence[ByteRange],
    over: Callable[[], bool],
) -> None:
    """Send these ranges of the memory; small ones from the mapping, if there is one. Raises OSError, EOFError if the
    file has ended."""
    base = memory.offset % mmap.ALLOCATIONGRANULARITY
    for run in runs(ranges):
        if over():
            raise EOFError("the offer has ended")
        if mapped is None or run[0][1] - run[0][0] >= SMALL:
            for start, stop in run:
                _send_file(stream, memory, start, stop - start, over)
            continue
        with memoryview(mapped) as view:
            parts = [view[base + start : base + stop] for start, stop in run]
            gathered = b"".join(parts)
            for part in parts:
                part.release()
        stream.sendall(gathered)


def mapping(memory: Memory) -> mmap.mmap:
    """The memory, mapped for gathering. Raises OSError, ValueError if the file is too short."""
    aligned = memory.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    return mmap.mmap(memory.fd, memory.offset - aligned + memory.size, prot=mmap.PROT_READ, offset=aligned)


def _send_file(stream: socket.socket, memory: Memory, offset: int, count: int, over: Callable[[], bool]) -> None:
    with _blocking(stream, socket.SO_SNDTIMEO):
        while count:
            if over():
                raise EOFError("the offer has ended")
            sent = os.sendfile(stream.fileno(), memory.fd, memory.offset + offset, min(count, _CHUNK))
            if not sent:
                raise EOFError("the memory ended")
            offset, count = offset + sent, count - sent


def receive(stream: socket.socket, into: memoryview, ranges: Sequence[ByteRange]) -> None:
    """Fill these ranges. Raises OSError, EOFError if the stream has ended."""
    scratch: memoryview | None = None
    for run in runs(ranges):
        if len(run) == 1:
            with into[run[0][0] : run[0][1]] as part:
                _fill(stream, part)
            continue
        if scratch is None:
            scratch = memoryview(bytearray(_BATCH))
        count = sum(stop - start for start, stop in run)
        _fill(stream, scratch[:count])
        done = 0
        for start, stop in run:
            into[start:stop] = scratch[done : done + stop - start]
            done += stop - start


def _fill(stream: socket.socket, into: memoryview) -> None:
    """Fill it, in few calls: the system wakes the thread only when much of a chunk has arrived."""
    done, least = 0, 1
    with _blocking(stream, socket.SO_RCVTIMEO):
        while done < len(into):
            left = len(into) - done
            wakes = _WAKE if left > 2 * _WAKE else 1  # an early end in the last bytes would go unnoticed
            if wakes != least:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes)
                least = wakes
            most = min(_CHUNK, left - _WAKE) if wakes > 1 else left
            count = stream.recv_into(into[done : done + most], 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError(f"the stream ended {left} bytes early")
            done += count


@contextmanager
def _blocking(stream: socket.socket, way: int) -> Iterator[None]:
    """Let the system wait in calls in this direction, for Python's timeout; Python itself would wait before each
    part."""
    timeout_s = stream.gettimeout()
    seconds, part = divmod(timeout_s or 0.0, 1.0)
    stream.settimeout(None)
    try:
        stream.setsockopt(socket.SOL_SOCKET, way, _TIMEVAL.pack(int(seconds), int(part * 1e6)))
        yield
    except BlockingIOError:
        raise TimeoutError("the other end takes or sends nothing") from None
    finally:
        stream.settimeout(timeout_s)


def exactly(stream: socket.socket, count: int, timeout_s: float = IDLE_S) -> bytes:
    """Receive exactly `count` bytes within `timeout_s` in all. Raises OSError, EOFError."""
    data = bytearray(count)
    ends, done = time.monotonic() + timeout_s, 0
    with memoryview(data) as view:
        while done < count:
            stream.settimeout(max(0.001, ends - time.monotonic()))
            more = stream.recv_into(view[done:])
            if not more:
                raise EOFError("the stream ended")
            done += more
            if time.monotonic() > ends:
                raise TimeoutError("no request arrived in time")
    return bytes(data)
