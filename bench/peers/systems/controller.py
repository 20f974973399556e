"""A single controller, as in many trainers. Producers send it pickled batches. It unpickles and cuts them, and pickles
each part for its consumer in every phase. All bytes pass through this process, over local sockets.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.work import Columns, part


class Server:
    """The controller. It handles one request at a time, like a driver process."""

    def __init__(self, told: dict[str, Any]) -> None:
        path = Path(told["scratch"]) / "controller"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._kept: dict[str, Columns] = {}
        self._busy = threading.Lock()
        self.address = {"path": str(path)}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                what, name, *more = json.loads(_receive(connection))
                with self._busy:
                    if what == "put":
                        self._kept[name] = pickle.loads(_receive(connection))
                        _send(connection, b"kept")
                    elif what == "get":
                        _send(connection, pickle.dumps(part(self._kept[name], *more), pickle.HIGHEST_PROTOCOL))
                    else:
                        self._kept.pop(name, None)
                        _send(connection, b"dropped")

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class Door:
    """A worker's connection to the controller."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address["path"])

    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Send the whole batch to the controller."""
        _send(self._connection, json.dumps(["put", name]).encode())
        _send(self._connection, pickle.dumps(columns, pickle.HIGHEST_PROTOCOL))
        _receive(self._connection)
        return [json.dumps([name, i, parts]) for i in range(parts)]

    def get(self, token: str) -> Columns:
        """Receive a part from the controller."""
        _send(self._connection, json.dumps(["get", *json.loads(token)]).encode())
        columns: Columns = pickle.loads(_receive(self._connection))
        return columns

    def drop(self, tokens: Sequence[str]) -> None:
        """Let the controller remove the batches."""
        for name in {json.loads(token)[0] for token in tokens}:
            _send(self._connection, json.dumps(["drop", name]).encode())
            _receive(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(8, "little"))
    connection.sendall(message)


def _receive(connection: socket.socket) -> bytearray:
    size = int.from_bytes(_exactly(connection, 8), "little")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    message = bytearray(size)
    view = memoryview(message)
    while view:
        taken = connection.recv_into(view)
        if not taken:
            raise EOFError
        view = view[taken:]
    return message
