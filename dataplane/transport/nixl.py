"""Moves bytes by NIXL: the reader reads the owner's registered memory itself, by RDMA if both hosts have it.

Each end of a channel is an agent of its own, without NIXL's progress thread, which never sleeps: an agent makes
progress when it is polled. For each read the owner maps and registers the requested memory, and sends the reader its
location and the agent's metadata for it (some hundred bytes with the remote keys) over the channel's socket. The reader
forgets them afterwards.

NIXL signals neither the end of a transfer nor a peer's request: both are polled for, some thousand times a second,
during a read and never between reads. The owner polls less often at first: nine channels that poll all the time take a
processor from the copying threads, and with RDMA, or on one host, it has no part in the transfer.

The owner of the memory cannot stop a one-sided read. So when an offer ends, its readers are asked to stop, over the
socket, and after that, or after half a second, the memory is deregistered: a network card then refuses further reads,
and bytes that a reader on the same host (cma) may still get are never confirmed, and so discarded. Registering whole
segments once would be faster, and wrong: the arena punches holes into free extents, and a card that has pinned pages
would go on reading those that are no longer in the file.

UCX chooses the network, as set in the environment: UCX_TLS, UCX_NET_DEVICES.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np

from dataplane.transport.channels import DataChannel, Transport, agree, heard, mapped, tell, told
from dataplane.transport.offers import OfferedMemory
from dataplane.transport.sockets import IDLE_S

_PIECE = 32 << 20  # bytes of a transfer, between checks that the offer has not ended
_MOST = 4096  # ranges of a transfer
_PAUSE_S = 50e-6  # between looks
_REST_S, _SOON_S = 1e-3, 0.05  # between the owner's polls, for the first `_SOON_S`
_STOP_S = 2.0  # for a transfer that was given up; then its agent is closed, which ends it
_WHERE = struct.Struct("<Q")


class Nixl(Transport):
    """The transport."""

    name = "nixl"

    def _prepare(self) -> None:
        _agent(_library())

    def _channel(self, stream: socket.socket) -> DataChannel:
        return _NixlChannel(stream)


def _library() -> Any:
    """The API. Raises OSError if it is not installed. The package `nixl` would choose among variants by importing
    torch, which a node does not need."""
    failed: ImportError | None = None
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            failed = failed or error
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return library
    raise OSError(f"NIXL is not installed: pip install rollout-dataplane[nixl] ({failed})") from failed


def _version(library: Any) -> str:
    try:
        return metadata.version(library.__name__)
    except metadata.PackageNotFoundError:  # built from source
        return "unknown"


def _agent(library: Any) -> Any:
    """A new agent with UCX. Raises OSError."""
    try:
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        return library.nixl_agent(f"dataplane-{secrets.token_hex(8)}", config)
    except Exception as error:  # NIXL's errors have no base of their own
        raise OSError(f"NIXL can not start: {error!r}") from error


class _NixlChannel(DataChannel):
    def __init__(self, stream: socket.socket) -> None:
        library = _library()
        agree(stream, _version(library))
        self._stream = stream
        self._agent: Any = _agent(library)

    def give(self, offered: OfferedMemory, ranges: Sequence[tuple[int, int]]) -> None:
        first, last = ranges[0][0], max(stop for _, stop in ranges)
        with _errors(), mapped(offered.memory) as source:
            start = source.ctypes.data
            with self._registered(start + first, last - first) as registered:
                tell(self._stream, _WHERE.pack(start))
                tell(self._stream, self._agent.get_partial_agent_metadata(registered, True))
                began = time.monotonic()
                while not heard(self._stream, _REST_S if time.monotonic() - began < _SOON_S else 0.0):
                    self._agent.get_new_notifs()
                    if time.monotonic() - began >= _SOON_S:
                        time.sleep(_PAUSE_S)

    def take(self, into: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        (there,) = _WHERE.unpack(told(self._stream))
        about = told(self._stream)
        first, last = ranges[0][0], max(stop for _, stop in ranges)
        with _errors():
            here = np.frombuffer(into, np.uint8).ctypes.data
            owner = self._agent.add_remote_agent(about)
            try:
                with self._registered(here + first, last - first):
                    for part in _parts(ranges):
                        self._transfer(owner, *(self._described(base, part) for base in (here, there)))
            finally:
                self._agent.remove_remote_agent(owner)

    def _transfer(self, owner: str, here: Any, there: Any) -> None:
        transfer = self._agent.initialize_xfer("READ", here, there, owner)
        try:
            state = [self._agent.transfer(transfer)]

            def done() -> bool:
                if state[0] == "PROC":
                    state[0] = self._agent.check_xfer_state(transfer)
                return bool(state[0] != "PROC")

            try:
                until = time.monotonic() + IDLE_S
                self._look(lambda: done() or heard(self._stream) or time.monotonic() > until)
            finally:
                until = time.monotonic() + _STOP_S
                self._look(lambda: done() or time.monotonic() > until)
            heard(self._stream)
            if state[0] != "DONE":
                raise OSError("NIXL could not read")
        finally:
            transfer.release()

    @contextmanager
    def _registered(self, address: int, size: int) -> Iterator[Any]:
        registered = self._agent.register_memory([(address, size, 0, "")], "DRAM")
        try:
            yield registered
        finally:
            self._agent.deregister_memory(registered)

    def _described(self, base: int, ranges: Sequence[tuple[int, int]]) -> Any:
        places = np.array([(base + start, stop - start, 0) for start, stop in ranges], np.uint64)
        return self._agent.get_xfer_descs(places, "DRAM")

    def _look(self, done: Callable[[], bool]) -> None:
        while not done():
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        self._agent = None


@contextmanager
def _errors() -> Iterator[None]:
    """Convert NIXL's errors to those that a channel may raise."""
    try:
        yield
    except (OSError, EOFError, ValueError):
        raise
    except Exception as error:  # NIXL's errors have no base of their own
        raise OSError(f"NIXL: {error!r}") from error


def _parts(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    part: list[tuple[int, int]] = []
    left = _PIECE
    for start, stop in ranges:
        while start < stop:
            end = min(stop, start + left)
            part.append((start, end))
            left -= end - start
            start = end
            if not left or len(part) == _MOST:
                yield part
                part, left = [], _PIECE
    if part:
        yield part
