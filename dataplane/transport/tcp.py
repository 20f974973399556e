"""Bytes over plain sockets, several connections at once, out of the arena or a file, and into the arena (`sockets`).

A channel is the socket itself. The bytes are not encrypted; on an untrusted network, use an encrypted one such as
WireGuard.

The kernel sends pages, not copies, so it may send bytes written after the call. Therefore a reader needs the
confirmation, which it does not get once the offer has ended.

A connection is for one read: kept ones would use up the connections of `channels`, four for each reader.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from dataplane.transport.channels import DataChannel, Transport
from dataplane.transport.offers import OfferedMemory
from dataplane.transport.sockets import IDLE_S, receive, send

STREAMS = 4
"""Connections that one read uses, if it has as many pieces."""


class Tcp(Transport):
    """The transport. `host`: the address to listen on, at any port; `told`: the address for others, if it differs."""

    name = "tcp"
    streams = STREAMS
    at_once = 1 << 10
    kept = 0
    patience_s = 0.0
    sends_files = True

    def _prepare(self) -> None:
        """Does nothing: no library is needed."""

    def _channel(self, stream: socket.socket) -> DataChannel:
        return _TcpChannel(stream)


class _TcpChannel(DataChannel):
    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def give(self, offered: OfferedMemory, ranges: Sequence[tuple[int, int]]) -> None:
        self._stream.settimeout(IDLE_S)
        mapped = offered.map() if len(ranges) > 1 and not offered.on_disk else None
        send(self._stream, offered.memory, mapped, ranges, lambda: offered.over)

    def take(self, into: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        self._stream.settimeout(IDLE_S)
        receive(self._stream, into, ranges)

    def close(self) -> None:
        """The socket is its owner's."""
