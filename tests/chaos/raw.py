"""A client that speaks to a node byte by byte, and may say what no client of ours would."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyReply, decoder
from dataplane.wire.framing import Framer, frame

_decoder = decoder(AnyReply)


class Raw:
    """A connected socket. Blocking, with a limit of ten seconds for everything."""

    def __init__(self, address: str, *, greet: bool = True) -> None:
        self.descriptors: list[int] = []
        """What the node passed, in order."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(Path(address.removeprefix("unix://"))))  # which waits where many come at once
        self.socket.settimeout(60)
        self._framer = Framer()
        self._replies: list[Any] = []
        self._id = 0
        if greet:
            self.ask(m.Hello(self.next(), m.MAJOR, m.MINOR, "raw", False))
            for descriptor in self.descriptors:  # of a ring for its events
                os.close(descriptor)
            self.descriptors.clear()

    def next(self) -> int:
        self._id += 1
        return self._id

    def send(self, *messages: m.Message) -> None:
        self.socket.sendall(b"".join(map(frame, messages)))

    def hear(self) -> Any:
        """The next message. Raises EOFError where the node has closed the connection."""
        while not self._replies:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 64)
                self.descriptors += descriptors
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._replies += [_decoder.decode(body) for body in self._framer.feed(data)]
        return self._replies.pop(0)

    def ask(self, message: m.Message) -> Any:
        self.send(message)
        return self.hear()

    def is_cut_off(self) -> bool:
        """Whether the node closes the connection, after whatever else it says."""
        try:
            while True:
                self.hear()
        except EOFError:
            return True
        except TimeoutError:
            return False

    def put(self, nbytes: int = 64, *, scope: str = "", layout: bytes | None = None) -> int:
        payload = bytes(nbytes)
        reply = self.ask(sm.PutShard(self.next(), payload, layout or one_column(nbytes), scope, 5.0))
        assert isinstance(reply, sm.ShardStored), reply
        return reply.shard

    def reserve(self, *sizes: int) -> list[int]:
        reply = self.ask(sm.Reserve(self.next(), list(sizes), 5.0))
        assert isinstance(reply, sm.Reserved), reply
        return [shard for shard, *_ in reply.extents]

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def one_column(nbytes: int, rows: int | None = None, offset: int = 0, width: int = 1, name: str = "x") -> bytes:
    """The layout of a dense column of bytes."""
    rows = nbytes if rows is None else rows
    field = Field("dense", "uint8", (width,) if width != 1 else ())
    return ShardLayout(((name, ColumnLayout(field, rows, rows, ((offset, rows * width),))),)).encode()


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def token(stream: Any) -> bytes:
    return bytes(stream._inner._token)


def int64s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)
