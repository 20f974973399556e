"""A plain copier between two hosts: several sockets with a thread each. The kernel copies the bytes.

It measures the rate of a handwritten loop. It repeatedly sends the same warm memory and receives into the same warm
memory, without requests and look-ups. There is one process at each end.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from bench.namespaces import End, enter

_CHUNK = 8 << 20


def _memory(size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("copier")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 1
    return fd, memory


def _each(sockets: list[socket.socket], work: Any) -> None:
    threads = [threading.Thread(target=work, args=(i, stream)) for i, stream in enumerate(sockets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(end: End, pipe: Connection, size: int, streams: int) -> None:
    """The sending end. It sends all bytes at each message of the pipe."""
    enter(end[0])
    fd, _ = _memory(size)
    share = size // streams
    with socket.create_server((end[1] or "127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        sockets = [listener.accept()[0] for _ in range(streams)]

    def send(i: int, stream: socket.socket) -> None:
        done = 0
        while done < share:
            done += os.sendfile(stream.fileno(), fd, i * share + done, min(_CHUNK, share - done))

    while pipe.recv():
        _each(sockets, send)


def _take(end: End, pipe: Connection, size: int, streams: int) -> None:
    """The receiving end. It sends the seconds of each copy to the pipe."""
    enter(end[0])
    _, memory = _memory(size)
    share, view = size // streams, memoryview(memory)
    address = pipe.recv()
    sockets = [socket.create_connection(address) for _ in range(streams)]

    def receive(i: int, stream: socket.socket) -> None:
        done = 0
        while done < share:
            most = min(_CHUNK, share - done)
            done += stream.recv_into(view[i * share + done :][:most], 0, socket.MSG_WAITALL)

    while pipe.recv():
        began = time.perf_counter()
        pipe.send(None)
        _each(sockets, receive)
        pipe.send(time.perf_counter() - began)


class Copier:
    """A copier of `size` bytes from one end to the other over `streams` sockets. A context manager."""

    def __init__(self, source: End, target: End, size: int, streams: int) -> None:
        self._size = size // streams * streams
        context = get_context("spawn")
        self._from, theirs = context.Pipe()
        self._to, other = context.Pipe()
        self._processes = [
            context.Process(target=_serve, args=(source, theirs, self._size, streams), daemon=True),
            context.Process(target=_take, args=(target, other, self._size, streams), daemon=True),
        ]

    def __enter__(self) -> Copier:
        for process in self._processes:
            process.start()
        self._to.send(self._from.recv())
        return self

    def rate(self) -> float:
        """Copy all bytes once. Returns the bytes a second."""
        self._to.send(True)
        self._to.recv()
        self._from.send(True)
        return self._size / float(self._to.recv())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for pipe, process in ((self._from, self._processes[0]), (self._to, self._processes[1])):
            if kind is None:
                pipe.send(False)
                process.join(10)
            process.kill()
            process.join()
