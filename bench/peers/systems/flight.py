"""Arrow Flight: a server keeps record batches in memory, and parts are put and got by DoPut and DoGet over loopback
TCP.

Each array is one record batch of bytes; the token of a part has the header with dtypes and shapes. This is faster than
lists of lists, and permits rows of different shapes.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyarrow import flight

from bench.peers.systems.packed import pack
from bench.peers.work import Columns, part

SCHEMA = pa.schema([("bytes", pa.uint8())])


class Server:
    """A Flight server on a free port."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._store = _Store("grpc://127.0.0.1:0")
        self.address = {"location": f"grpc://127.0.0.1:{self._store.port}"}
        threading.Thread(target=self._store.serve, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._store.shutdown()


class _Store(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._kept: dict[bytes, list[Any]] = {}

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self._kept[descriptor.command] = [chunk.data for chunk in reader]

    def do_get(self, context: Any, ticket: Any) -> Any:
        return flight.RecordBatchStream(pa.Table.from_batches(self._kept[ticket.ticket], SCHEMA))

    def do_action(self, context: Any, action: Any) -> list[Any]:
        self._kept.pop(action.body.to_pybytes(), None)
        return []


class Door:
    """A Flight client."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._client = flight.connect(address["location"])

    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Put a stream for each part, with a record batch for each array."""
        tokens = []
        for i in range(parts):
            header, buffers = pack(part(columns, i, parts))
            command = f"{name}/{i}".encode()
            writer, reader = self._client.do_put(flight.FlightDescriptor.for_command(command), SCHEMA)
            for buffer in buffers:
                writer.write_batch(pa.record_batch([pa.array(buffer)], schema=SCHEMA))
            writer.done_writing()
            reader.read()
            writer.close()
            tokens.append(json.dumps([command.decode(), base64.b64encode(header).decode()]))
        return tokens

    def get(self, token: str) -> Columns:
        """Arrays over the memory of the received batches."""
        command, header = json.loads(token)
        arrays = [c.data.column(0).to_numpy() for c in self._client.do_get(flight.Ticket(command.encode()))]
        return _rows(base64.b64decode(header), arrays)

    def drop(self, tokens: Sequence[str]) -> None:
        """Let the server remove the parts."""
        for token in tokens:
            list(self._client.do_action(flight.Action("drop", json.loads(token)[0].encode())))

    def close(self) -> None:
        """Close the client."""
        self._client.close()


def _rows(header: bytes, arrays: list[Any]) -> Columns:
    columns: Columns = {}
    following = iter(arrays)
    for name, (ragged, rows) in json.loads(header).items():
        made = [next(following).view(dtype).reshape(shape) for dtype, shape in rows]
        columns[name] = made if ragged else made[0]
    return columns
