"""A stream to a file and back: the node tells its books block by block, and this process reads or writes the columns.

The node keeps a snapshot for as long as it is read, so the file is the stream at one moment, whatever goes on. A stream
that is being restored is opened by nobody before all of it is there. Rows that are stored once and meant several times,
as the images of a prompt are by its responses, are written once and restored so.

What always holds: in memory there is a block of the books, and a piece of the columns of about `PIECE` bytes (or a row,
if that is more) together with its bytes in the file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments
from dataplane.client.checkpointfile import BLOCK, COLUMNS, END, HEAD, TABLE, CheckpointReader, CheckpointWriter
from dataplane.client.connection import Connection
from dataplane.client.getting import Getter
from dataplane.client.writer import Writer
from dataplane.errors import DataplaneError, LimitExceeded, Misuse, ProtocolMismatch, SchemaMismatch
from dataplane.stream.rows import PAGE, Index
from dataplane.stream.snapshot import Block, Head
from dataplane.wire import messages as m

PIECE = 32 << 20
"""Bytes of columns that are read or written at a time."""


class _Heading(msgspec.Struct, frozen=True, array_like=True):
    name: str
    head: Head


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    """Rows, and for which task their columns were brought. Of each table that follows: which of its rows each of these
    rows is (int64; empty: they are its rows, in order)."""

    rows: bytes
    task: int
    tables: list[bytes]


async def write(
    connection: Connection,
    getter: Getter,
    writer: Writer,
    stream: tuple[str, bytes],
    path: str | os.PathLike[str],
    timeout: float,
) -> None:
    """Write the stream of this name and token to the file. Raises as `AsyncStream.checkpoint`."""
    name, token = stream
    timeout, frames = arguments.seconds(timeout), 1
    with CheckpointWriter(_path(path)) as file:
        asked = m.TakeSnapshot(connection.next_id(), token)
        taken = await connection.request(asked, m.SnapshotTaken, 0.0)
        try:
            file.frame(HEAD, msgspec.msgpack.encode(_Heading(name, taken.head)))
            for page in taken.head.pages:
                async for found in _blocks(connection, taken.snapshot, page * PAGE, PAGE):
                    file.frame(BLOCK, msgspec.msgpack.encode(found.block))
                    frames += 1
                    for rows, task, encoded in found.columns:
                        for piece, ref in _pieces(np.frombuffer(rows, np.int64), BatchRef.decode(encoded)):
                            frames += await _write_piece(file, getter, writer, piece, task, ref, timeout)
            file.frame(END, msgspec.msgpack.encode(frames))
            await writer.in_thread(PIECE, file.commit)
        finally:
            with suppress(DataplaneError):
                connection.tell(m.ReleaseSnapshot(taken.snapshot))


async def _blocks(connection: Connection, snapshot: int, first: int, count: int) -> AsyncIterator[m.SnapshotRows]:
    """The rows of these numbers, in as many parts as it takes for each to fit a message."""
    asked = m.ReadSnapshot(connection.next_id(), snapshot, first, count)
    try:
        yield await connection.request(asked, m.SnapshotRows, 0.0)
        return
    except LimitExceeded:
        if count == 1:
            raise
    half = count // 2
    for start, size in ((first, half), (first + half, count - half)):
        async for found in _blocks(connection, snapshot, start, size):
            yield found


def _pieces(rows: Index, ref: BatchRef) -> Iterator[tuple[Index, BatchRef]]:
    """The rows in stretches of at most `PIECE` bytes, or a row if that is more."""
    if len(rows) == 1 or ref.stored_nbytes <= PIECE:
        yield rows, ref
        return
    half = len(rows) // 2
    yield from _pieces(rows[:half], ref[:half])
    yield from _pieces(rows[half:], ref[half:])


async def _write_piece(
    file: CheckpointWriter, getter: Getter, writer: Writer, rows: Index, task: int, ref: BatchRef, timeout: float
) -> int:
    """Write a stretch of rows; how many frames that took."""
    parts = ref.distinct()
    tables = [b"" if index is None else index.tobytes() for _, index in parts]
    file.frame(COLUMNS, msgspec.msgpack.encode(_Columns(rows.tobytes(), task, tables)))
    for once, _ in parts:
        batch = await getter.get(once, timeout)
        await writer.in_thread(once.nbytes, _write_table, file, batch)
    return 1 + len(parts)


def _write_table(file: CheckpointWriter, batch: Batch) -> None:
    import pyarrow as pa  # heavy, and needed only here

    table, sink = batch.to_arrow(), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    file.frame(TABLE, sink.getvalue())


async def read(
    connection: Connection, writer: Writer, path: str | os.PathLike[str], name: str | None, timeout: float
) -> tuple[str, m.Opened]:
    """The stream in the file, restored under this name or its own. Raises as `AsyncPlane.restore`."""
    with CheckpointReader(_path(path)) as file:
        heading = _decoded(file, HEAD, _Heading, file.frame())
        name = heading.name if name is None else name
        asked = m.Restore(connection.next_id(), name, heading.head)
        opened = await connection.request(asked, m.Opened, 0.0)
        staging = f"{m.STAGED}{secrets.token_hex(8)}"
        try:
            await _fill(connection, writer, file, opened.stream, staging, timeout)
            await connection.request(m.Restored(connection.next_id(), opened.stream), m.Done, 0.0)
        except BaseException as error:
            with suppress(DataplaneError):
                connection.check()
                connection.tell(m.End(connection.next_id(), opened.stream, True))
                connection.tell(m.Free(connection.next_id(), [], [], staging))
            if isinstance(error, ProtocolMismatch | SchemaMismatch):
                raise file.corrupt(f"holds what no stream has: {error}") from error
            raise
    return name, opened


async def _fill(
    connection: Connection, writer: Writer, file: CheckpointReader, stream: bytes, staging: str, timeout: float
) -> None:
    frames = 1
    while True:
        kind, payload = await writer.in_thread(PIECE, file.frame)
        match kind:
            case _ if kind == BLOCK:
                block = _decoded(file, BLOCK, Block, (kind, payload))
                await connection.request(m.PutBack(connection.next_id(), stream, block), m.Done, 0.0)
            case _ if kind == COLUMNS:
                columns = _decoded(file, COLUMNS, _Columns, (kind, payload))
                await _put_columns(connection, writer, file, stream, staging, columns, timeout)
                frames += len(columns.tables)
            case _:
                if _decoded(file, END, int, (kind, payload)) != frames or not file.ended:
                    raise file.corrupt("has frames too few or too many")
                return
        frames += 1


async def _put_columns(
    connection: Connection,
    writer: Writer,
    file: CheckpointReader,
    stream: bytes,
    staging: str,
    columns: _Columns,
    timeout: float,
) -> None:
    whole: BatchRef | None = None
    lengths: dict[str, bytes] = {}
    for index in columns.tables:
        planned = await writer.plan(await writer.in_thread(PIECE, _read_table, file), ())
        ref = await writer.write(planned, staging, timeout)
        order = np.frombuffer(index, np.int64) if index else None
        measured = {column.name: column.lengths for column in planned.columns if column.lengths is not None}
        try:
            part = ref if order is None else ref[order]
            whole = part if whole is None else whole.union(part)
        except (Misuse, IndexError) as error:
            raise file.corrupt(f"has rows that its tables have not: {error}") from error
        lengths |= {n: np.asarray(of if order is None else of[order]).tobytes() for n, of in measured.items()}
    if whole is None:
        raise file.corrupt("has columns without a table")
    encoded = whole.encode()
    request = m.PutColumns(connection.next_id(), stream, staging, encoded, columns.rows, columns.task, lengths)
    await connection.request(request, m.Done, 0.0)


def _read_table(file: CheckpointReader) -> Any:
    import pyarrow as pa  # as in `_write_table`

    kind, payload = file.frame()
    if kind != TABLE:
        raise file.corrupt("lacks a table")
    try:
        with pa.ipc.open_stream(payload) as stream:
            table = stream.read_all()
        table.validate()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise file.corrupt(f"has a table that is none: {error}") from error
    return table.combine_chunks()


def _decoded(file: CheckpointReader, wanted: int, kind: Any, frame: tuple[int, bytes]) -> Any:
    try:
        if frame[0] != wanted:
            raise ValueError(f"a frame of kind {frame[0]} where {wanted} was due")
        return msgspec.msgpack.decode(frame[1], type=kind)
    except (msgspec.MsgspecError, ValueError, Misuse) as error:
        raise file.corrupt(f"holds what is no checkpoint: {error}") from error


def _path(path: Any) -> str | os.PathLike[str]:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise Misuse(f"a checkpoint is written to a path, not {path!r}")
    return path
