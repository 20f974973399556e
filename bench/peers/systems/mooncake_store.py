"""Mooncake Store over TCP: a master, a client in the server process that provides memory, and a client in each process.

A part is one key: `put_parts` stores its arrays, and `get_buffer` returns all bytes.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore

from bench.peers.systems.packed import pack, unpack
from bench.peers.work import Columns, part


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _client(address: dict[str, Any], segment: int, buffer: int) -> Any:
    store = MooncakeDistributedStore()
    here = "127.0.0.1"
    code = store.setup(here, "P2PHANDSHAKE", segment, buffer, "tcp", "", address["master"])
    if code:
        raise RuntimeError(f"setup of the store failed with code {code}")
    return store


class Server:
    """The master, and a client that provides memory."""

    def __init__(self, told: dict[str, Any]) -> None:
        master = Path(sys.executable).with_name("mooncake_master")
        port, metrics = _free_port(), _free_port()
        self._master = subprocess.Popen(
            [str(master) if master.exists() else shutil.which("mooncake_master") or "mooncake_master",
             f"--rpc_port={port}", f"--metrics_port={metrics}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _until_listening(port, self._master)
        room = max(told["nbytes"] * 3 // 2, 256 << 20)
        self.address = {"master": f"127.0.0.1:{port}", "buffer": max(told["nbytes"], 64 << 20) + (64 << 20)}
        self._store = _client(self.address, room, 16 << 20)

    def close(self) -> None:
        """End the client and the master."""
        self._store.close()
        self._master.terminate()
        self._master.wait()


def _until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 20
    while time.monotonic() < ends and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"mooncake_master does not listen (exit code {process.poll()})")


class Door:
    """A client that provides no memory."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._store = _client(address, 0, address["buffer"])

    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Put a key for each part."""
        tokens = []
        for i in range(parts):
            header, buffers = pack(part(columns, i, parts))
            key = f"{name}/{i}"
            code = self._store.put_parts(key, *buffers)
            if code:
                raise RuntimeError(f"put of {sum(b.nbytes for b in buffers)} bytes failed with code {code}")
            tokens.append(json.dumps([key, header.decode()]))
        return tokens

    def get(self, token: str) -> Columns:
        """Views of the received buffer."""
        key, header = json.loads(token)
        buffer = self._store.get_buffer(key)
        if buffer is None:
            raise RuntimeError(f"get of {key} gave nothing")
        return unpack(header.encode(), buffer)

    def drop(self, tokens: Sequence[str]) -> None:
        """Remove the keys, even during their read leases."""
        for token in tokens:
            self._store.remove(json.loads(token)[0], True)

    def close(self) -> None:
        """Close the client."""
        self._store.close()
