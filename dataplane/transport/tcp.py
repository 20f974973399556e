"""Bytes over plain sockets, several connections at once, out of the arena or a file, and into the arena (`sockets`).

A channel is the socket itself. The bytes travel in the clear; where the network is not trusted, put them into one that
is (WireGuard, for one).

The kernel sends pages, not copies, so it may send bytes written after the call. Hence the confirmation: a reader whose
offer has ended does not get it.

A connection is for one read: kept ones would take places of `channels`' connections, four for each reader.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from dataplane.transport.base import Memory
from dataplane.transport.channels import DataChannel, Transport
from dataplane.transport.offers import OfferedMemory
from dataplane.transport.sockets import receive, send

STREAMS = 4
"""Connections that one read uses, if it has as many pieces."""

_IDLE_S = 20.0  # seconds without a byte after which a connection is given up


class Tcp(Transport):
    """The transport. `host`: where to listen, on any port; `told`: the address for others, if it differs."""

    name = "tcp"
    streams = STREAMS
    at_once = 1 << 10
    kept = 0
    patience_s = 0.0

    def _prepare(self) -> None:
        """Nothing can be missing."""

    def _channel(self, stream: socket.socket) -> DataChannel:
        return _TcpChannel(stream)

    def offer_file(self, file: Memory) -> bytes:
        return self._offer(OfferedMemory(file, on_disk=True))


class _TcpChannel(DataChannel):
    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def give(self, offered: OfferedMemory, ranges: Sequence[tuple[int, int]]) -> None:
        self._stream.settimeout(_IDLE_S)
        mapped = offered.map() if len(ranges) > 1 and not offered.on_disk else None
        send(self._stream, offered.memory, mapped, ranges, lambda: offered.over)

    def take(self, into: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        self._stream.settimeout(_IDLE_S)
        receive(self._stream, into, ranges)

    def close(self) -> None:
        """The socket is its owner's."""
