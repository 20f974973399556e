"""Writes a stream to a file, and restores a stream from it.

The leader sends metadata block by block; this process reads and writes the columns. The leader keeps a snapshot
meanwhile, so the file has the stream at one moment. A stream that is being restored cannot be opened before it is
complete. Rows that are stored once and referred to several times, like the images of a prompt, are written once, and
are stored once after a restore.

Invariant: memory holds one block of metadata, and about `PIECE` bytes of columns (or one row, if that is larger) in
decoded and encoded form.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dataplane.batch.field import is_text
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments, checkpointfile
from dataplane.client.checkpointfile import BLOCK, COLUMNS, END, HEAD, TABLE, CheckpointReader, CheckpointWriter
from dataplane.client.connection import Connection
from dataplane.client.ownership import unstage
from dataplane.client.reader import Getter
from dataplane.client.writer import ShardWriter
from dataplane.errors import Corrupt, DataplaneError, Freed, LimitExceeded, Misuse, SchemaMismatch
from dataplane.stream import requests as r
from dataplane.stream.page import PAGE, Index
from dataplane.stream.snapshot_format import Head
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream

PIECE = 32 << 20
"""The most bytes of columns that are read or written at a time; at most one `_SHARE`-th of the node's memory."""

_SHARE = 8


class _Heading(msgspec.Struct, frozen=True, array_like=True):
    name: str
    head: Head


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    """The header of the columns of some rows (numbers, int64). `task`: the task for which their producer leased the
    rows. `tables`: for each table that follows, the table row of each row, int64; empty if the order is the same."""

    rows: bytes
    task: int
    tables: list[bytes]


@dataclass(frozen=True, slots=True)
class _Writing:
    """The destination of columns, the means to read them, and the bytes of a piece."""

    file: CheckpointWriter
    getter: Getter
    writer: ShardWriter
    piece: int
    timeout_s: float


async def write(stream: AsyncStream, path: str | os.PathLike[str], timeout: float) -> None:
    """Write the stream to a file. Raises as `AsyncStream.checkpoint`."""
    timeout_s, piece = arguments.seconds(timeout), min(PIECE, stream._connection.welcome.capacity // _SHARE)
    with CheckpointWriter(_path(path)) as file:
        to = _Writing(file, stream._getter, stream._writer, piece, timeout_s)
        taken = await stream.ask(r.TakeSnapshot(), r.SnapshotTaken)
        try:
            file.frame(HEAD, msgspec.msgpack.encode(_Heading(stream.name, taken.head)))
            for page in taken.pages:
                async for found in _blocks(stream, taken.snapshot, page * PAGE, PAGE):
                    file.frame(BLOCK, found.block)
                    for rows, task, ref in found.columns:
                        await _write_columns(to, rows, task, ref)
            file.frame(END, b"")
            await to.writer.in_thread(PIECE, file.commit)
        except Freed:  # the snapshot has ended, and its columns were freed: this request raises the reason
            await stream.ask(r.ReadSnapshot(snapshot=taken.snapshot, first=0, count=1), r.SnapshotRows)
            raise
        finally:
            stream.tell(r.ReleaseSnapshot(snapshot=taken.snapshot))


async def _blocks(stream: AsyncStream, snapshot: int, first: int, count: int) -> AsyncIterator[r.SnapshotRows]:
    """Read the rows with `count` numbers from `first` on, in parts that each fit a message."""
    try:
        yield await stream.ask(r.ReadSnapshot(snapshot=snapshot, first=first, count=count), r.SnapshotRows)
        return
    except LimitExceeded:
        if count == 1:
            raise
    half = count // 2
    for start, size in ((first, half), (first + half, count - half)):
        async for found in _blocks(stream, snapshot, start, size):
            yield found


async def _write_columns(to: _Writing, rows: Index, task: int, ref: BatchRef) -> None:
    """Write the columns of these rows in as few pieces as possible."""
    if len(rows) == 1 or ref.stored_nbytes <= to.piece:
        try:
            tables = [table async for table in _tables(to, ref)]
        except LimitExceeded:  # their shards do not fit the node's memory at once
            if len(rows) == 1:
                raise
        else:
            told = _Columns(rows.tobytes(), task, [index for index, _ in tables])
            to.file.frame(COLUMNS, msgspec.msgpack.encode(told))
            for _, table in tables:
                await to.writer.in_thread(table.size, to.file.frame, TABLE, table)
            return
    half = len(rows) // 2
    await _write_columns(to, rows[:half], task, ref[:half])
    await _write_columns(to, rows[half:], task, ref[half:])


async def _tables(to: _Writing, ref: BatchRef) -> AsyncIterator[tuple[bytes, Any]]:
    """The row index (empty for the rows' order) and encoded table of each column. Pins the shards of one column at a
    time."""
    for once, index in ref.distinct():
        for name in once.columns:
            batch = await to.getter.get(once.select(name), to.timeout_s)
            table = await to.writer.in_thread(once.nbytes, checkpointfile.encoded_table, batch)
            del batch
            yield b"" if index is None else index.tobytes(), table


async def read(
    connection: Connection,
    writer: ShardWriter,
    path: str | os.PathLike[str],
    name: str | None,
    replicas: int | None,
    timeout: float,
) -> str:
    """Restore the stream in the file, under this name or its own. Returns the name. Raises as `AsyncPlane.restore`."""
    with CheckpointReader(_path(path)) as file:
        heading = _decoded(file, HEAD, _Heading, file.frame())
        if not is_text(heading.name) or not heading.name:
            raise file.corrupt("names no stream")
        name = heading.name if name is None else name
        settings = heading.head.settings
        if replicas is not None:
            settings = msgspec.structs.replace(settings, replicas=arguments.replicas(replicas))
        try:
            asked = rm.RestoreStream(
                connection.next_id(), name, msgspec.structs.replace(heading.head, settings=settings)
            )
            opened = await connection.request(asked, rm.Opened, 0.0)
        except Corrupt as error:
            raise file.corrupt(f"holds {error}") from None
        staging = f"{rm.STAGED}{secrets.token_hex(8)}"
        to = _Restoring(connection, writer, file, opened.stream, staging, timeout, settings.replicas)
        try:
            await _fill(to)
            await connection.request(rm.PublishRestored(connection.next_id(), opened.stream), m.Done, 0.0)
        except BaseException as error:
            with suppress(DataplaneError):
                connection.check()
                connection.tell(rm.DropStream(connection.next_id(), opened.stream))
            unstage(connection, to.staging)
            if isinstance(error, SchemaMismatch) or (isinstance(error, Corrupt) and not error.path):
                raise file.corrupt(f"has an invalid stream: {error}") from error
            raise
    return name


@dataclass(frozen=True, slots=True)
class _Restoring:
    """A restore in progress: its file, and the stream that it fills."""

    connection: Connection
    writer: ShardWriter
    file: CheckpointReader
    stream: bytes
    staging: str
    timeout: float
    replicas: int


async def _fill(to: _Restoring) -> None:
    file, connection = to.file, to.connection
    while True:
        kind, payload = await to.writer.in_thread(PIECE, file.frame)
        if kind == BLOCK:
            await connection.request(rm.RestoreRows(connection.next_id(), to.stream, payload), m.Done, 0.0)
        elif kind == COLUMNS:
            columns = _decoded(file, COLUMNS, _Columns, (kind, payload))
            tables = [await to.writer.in_thread(PIECE, file.table) for _ in columns.tables]
            try:
                rows = np.frombuffer(columns.rows, np.int64)
                orders = [np.frombuffer(index, np.int64) if index else None for index in columns.tables]
            except ValueError as error:
                raise file.corrupt(f"has rows without a number: {error}") from None
            for table, order in zip(tables, orders, strict=True):
                if len(rows) != (table.num_rows if order is None else len(order)) or table.num_rows > len(rows):
                    raise file.corrupt(f"has {table.num_rows} rows of columns for {len(rows)} rows")
            await _restore_columns(to, rows, columns.task, list(zip(tables, orders, strict=True)))
        elif kind != END or not file.ended:
            raise file.corrupt("is no checkpoint: a frame is out of place")
        else:
            return


async def _restore_columns(to: _Restoring, rows: Index, task: int, tables: Sequence[tuple[Any, Index | None]]) -> None:
    """Put the tables, each with the order of its rows, and assign them as columns to these rows of the stream."""
    whole: BatchRef | None = None
    for table, order in tables:
        planned = await to.writer.plan(_columns(table), ())
        ref = await to.writer.write(planned, to.staging, to.timeout)
        try:
            part_ref = ref if order is None else ref[order]
            whole = part_ref if whole is None else whole.union(part_ref)
        except (Misuse, IndexError) as error:
            raise to.file.corrupt(f"has rows that its tables have not: {error}") from None
    if whole is None:
        raise to.file.corrupt("has columns without a table")
    spares = [] if to.replicas == 1 else await to.writer.replicate(whole, to.replicas, to.timeout, staged=True)
    request = rm.RestoreColumns(
        to.connection.next_id(), to.stream, to.staging, whole.encode(), rows.tobytes(), task, spares
    )
    await to.connection.request(request, m.Done, 0.0)


def _columns(table: Any) -> dict[str, Any]:
    """The columns of a table that was validated when it was read."""
    from dataplane.batch import arrow_in  # as in `encoded_table`

    return dict(arrow_in.columns_of(table, checked=True))


def _decoded(file: CheckpointReader, wanted: int, kind: Any, frame: tuple[int, bytes]) -> Any:
    try:
        if frame[0] != wanted:
            raise ValueError(f"a frame of kind {frame[0]} where {wanted} was due")
        return msgspec.msgpack.decode(frame[1], type=kind)
    except (msgspec.MsgspecError, ValueError, Misuse) as error:
        raise file.corrupt(f"is no checkpoint: {error}") from error


def _path(path: Any) -> str | os.PathLike[str]:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise Misuse(f"a checkpoint is in a file with a path, not {path!r}")
    try:
        os.fsencode(path)
    except ValueError:
        raise Misuse(f"no file can be called {path!r}") from None
    return path
