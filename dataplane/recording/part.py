"""A part of a recording: a file of the rows and the media of one commit, before they are in a Parquet file.

    magic (16 bytes) | bytes of the rows (8) | bytes of the media (8) | checksum (8) | rows | media

Rows and media are Arrow IPC streams. The checksum is the xxh3-64 of both. A torn or changed part raises Corrupt.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from dataplane.errors import Corrupt
from dataplane.recording import manifest

_MAGIC = b"dataplane/part\x01\n"
_HEAD = struct.Struct("<16sQQQ")


def write(path: Path, rows: Any, media: Any) -> None:
    """Write a part from two `pyarrow.Table`. The part is on disk on return. Raises LimitExceeded, Misuse, Corrupt."""
    sink = _Sink()

    def fill(file: Any) -> None:
        sink.file = file
        file.write(bytes(_HEAD.size))
        sizes = []
        for table in (rows, media):
            before = sink.size
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            sizes.append(sink.size - before)
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, *sizes, sink.checksum.intdigest()))

    manifest.write(path, fill)


def read(path: Path) -> tuple[Any, Any]:
    """The rows and the media of a part, as two `pyarrow.Table`. Raises Corrupt if it is damaged or cannot be read,
    and FileNotFoundError if there is none."""
    try:
        with pa.OSFile(str(path)) as file:  # into Arrow's memory pool, whose pages are mapped already
            data = file.read_buffer()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Corrupt(f"{path} can not be read: {error.strerror or error}", path=str(path)) from None
    if data.size >= _HEAD.size:
        magic, rows, media, checksum = _HEAD.unpack(data.slice(0, _HEAD.size))
        body = data.slice(_HEAD.size)
        if magic == _MAGIC and rows + media == body.size and xxhash.xxh3_64_intdigest(body) == checksum:
            return _decoded(path, body.slice(0, rows)), _decoded(path, body.slice(rows))
    raise Corrupt(f"{path} is torn, or was changed", path=str(path))


class _Sink:
    """A file object for Arrow's writer. Writes buffers without a copy, and adds them to the checksum."""

    closed = False

    def __init__(self) -> None:
        self.file: Any = None
        self.size = 0
        self.checksum = xxhash.xxh3_64()

    def write(self, data: Any) -> None:
        """Write a `pyarrow.Buffer` or bytes."""
        self.checksum.update(data)
        self.file.write(data)
        self.size += data.size if isinstance(data, pa.Buffer) else len(data)

    def tell(self) -> int:
        """The number of bytes written, without the part's header."""
        return self.size

    def flush(self) -> None:
        """Do nothing: `manifest.write` syncs the whole file."""


def _decoded(path: Path, data: Any) -> Any:
    try:
        with pa.ipc.open_stream(data) as stream:
            return stream.read_all()
    except (pa.ArrowException, ValueError, OSError) as error:
        raise Corrupt(f"{path} holds no table: {error}", path=str(path)) from error
