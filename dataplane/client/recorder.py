"""Records each row of a stream once, when it has all recorded columns: `stream.record`.

A recorder consumes by a separate task of the stream, and acks rows after they are on disk. So rows that are not
recorded yet stay in the stream, also while no recorder runs. The recorder runs in a separate thread, and requests the
next rows before it writes the current ones.

Invariants: a row is in the recording once. A row whose ack failed is delivered again and recognised by its unique name:
the key that the stream generated, or the user's key with the row's number. While the disk is full, rows are skipped and
counted, or left in the stream (`on_full`). Rows that cannot be written for another reason are always skipped.

Rejected: recording rows that all other tasks have acked. A stream frees such rows, so it would have to keep them for a
recorder that may not exist. As a task, the recorder has leases, redelivery and `max_bytes` like other tasks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dataplane.client import arguments
from dataplane.client.background import Background
from dataplane.client.delivery import Delivery
from dataplane.config import parse_size
from dataplane.errors import (
    Backpressure,
    Closed,
    DataplaneError,
    LeaseExpired,
    LimitExceeded,
    Lost,
    Misuse,
    NotReady,
    OutcomeUnknown,
    Retryable,
)
from dataplane.recording import Manifest, RowNames, Writer
from dataplane.recording.names import RESERVED

if TYPE_CHECKING:
    from dataplane.batch.batch import Batch
    from dataplane.batch.ref import BatchRef
    from dataplane.client.plane import AsyncPlane
    from dataplane.client.streams import AsyncStream


log = logging.getLogger(__name__)

TASK = "record"
MAX_FILE_BYTES = "256MiB"
COMPRESSIONS = ("zstd", "snappy", "lz4", "none")

_LEASE_S = 600.0
_WAIT_S = 0.5  # the most seconds of a request for rows; then the recorder checks whether to end
_NOTHING = object()
_LOOK_S = 0.2  # seconds between two requests for the statistics of a stream whose columns are not known yet
_RETRY_S = 1.0  # seconds between two attempts to write to a full disk
_READ_S = 15.0  # seconds to wait for memory; rows that need more are read in halves
_PIECE = 64 << 20  # the most bytes of rows that are read at a time


@dataclass(frozen=True, slots=True)
class RecordingStatistics:
    """Statistics of a recorder. `rows`: rows in the recording. `skipped`: rows that were left out. `repeated`: rows
    that were delivered again after they were recorded. `busy_s`: CPU seconds of the recorder's thread."""

    rows: int
    skipped: int
    repeated: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class How:
    """The options of a recorder."""

    directory: Path
    columns: list[str] | None
    task: str
    rows: int
    max_file_bytes: int
    media: list[str]
    compression: str
    waits: bool


class Recording(Background):
    """A running recorder. `close()`, or the end of a `with` block, records the rows that are ready and ends the
    recorder. `wait()` waits until the stream is closed and all of its rows are recorded."""

    def __init__(self, stream: AsyncStream, how: How) -> None:
        super().__init__(stream._connection, f"recorder of {stream.name!r}")
        self._stream_name, self._how = stream.name, how
        self._rows = self._skipped = self._repeated = 0
        self._busy_s = 0.0
        self._passed: DataplaneError | None = None
        self._singly = 0  # the number of rows to request one at a time, since one of them cannot be read

    @property
    def path(self) -> Path:
        """The directory of the recording."""
        return self._how.directory

    @property
    def error(self) -> BaseException | None:
        """The error that ended the recorder, or the last one that made it skip rows, wait for disk space or keep rows
        in parts. None if there is none."""
        return self._error or self._passed

    def statistics(self) -> RecordingStatistics:
        """The current statistics."""
        return RecordingStatistics(self._rows, self._skipped, self._repeated, self._busy_s)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the stream is closed and all of its rows are recorded, or the recorder was closed. Raises NotReady
        after `timeout` seconds, and the recorder's `error`, such as LimitExceeded if rows were skipped because the disk
        was full."""
        super().wait(timeout)
        if self._passed is not None:
            raise self._passed

    async def _run(self, plane: AsyncPlane, stop: asyncio.Event) -> None:
        try:
            await self._record_all(plane, stop)
        finally:
            for name in ("_plane", "_stream", "_writer"):  # frees their memory, while the user keeps the recording
                self.__dict__.pop(name, None)

    async def _record_all(self, plane: AsyncPlane, stop: asyncio.Event) -> None:
        began = time.thread_time()
        stream = await self._again(plane, stop, "open the stream", lambda: plane.stream(self._stream_name))
        self._plane, self._stream, self._ends = plane, stream, stop

        async def figures() -> Mapping[str, Any]:
            return await self._again(plane, stop, "read statistics", stream.stats)

        columns = self._how.columns or await _columns(figures, self._how.task, stop) or _recorded(self._how.directory)
        if not columns:
            return
        tasks = [task for task in stream.settings.tasks if task != self._how.task] or [self._how.task]
        manifest = Manifest(stream.name, tasks, columns, msgspec.structs.asdict(stream.settings))
        self._columns = columns
        self._writer = writer = Writer(
            self._how.directory,
            manifest,
            media=self._how.media,
            max_file_bytes=self._how.max_file_bytes,
            compression=self._how.compression,
        )
        self._rows = writer.rows
        try:
            complete = await self._consume()
            writer.close(complete=complete and not self._skipped, skipped=self._skipped)
            if complete and not self._skipped:
                self._passed = None  # the disk was full for a while, but all rows were written in the end
        finally:
            writer.abort()
            self._busy_s = time.thread_time() - began

    async def _consume(self) -> bool:
        """Record deliveries until the recorder is closed, and then the rows that are ready. Returns whether the stream
        is closed and has no more rows for the recorder."""
        began = time.thread_time()
        ahead, last = asyncio.create_task(self._next(_WAIT_S)), False
        try:
            while True:
                try:
                    delivery: object = await ahead
                except NotReady:
                    if last:
                        return False
                    delivery = _NOTHING
                if delivery is None:
                    return True
                # The next rows are requested before these are written. If the recorder was closed, the request does not
                # wait. A request is cancelled at an early end only: its rows stay leased until its answer comes.
                last = self._ends.is_set()
                ahead = asyncio.create_task(self._next(0.0 if last else _WAIT_S))
                await asyncio.sleep(0)
                if isinstance(delivery, Delivery) and not await self._record(delivery):
                    return False
                self._busy_s = time.thread_time() - began
        finally:
            ahead.cancel()
            (found,) = await asyncio.gather(ahead, return_exceptions=True)
            if isinstance(found, Delivery) and not found.settled:
                with suppress(DataplaneError):
                    await found.unseen()

    async def _next(self, timeout: float) -> Delivery | None:
        """The next rows; None if the stream was closed and has no more. Raises NotReady after `timeout` seconds or an
        error that may pass, and Closed if the stream was dropped."""
        how = self._how
        try:
            return await self._stream.consume(
                how.task,
                rows=1 if self._singly else how.rows,
                min_rows=1,
                columns=self._columns,
                lease=_LEASE_S,
                timeout=timeout,
            )
        except Closed as error:
            if error.drained:
                return None
            raise
        except NotReady:
            raise
        except (Retryable, OutcomeUnknown) as error:
            await self._pause(self._plane, self._ends, "request rows", error)
            raise NotReady(str(error)) from None

    async def _record(self, delivery: Delivery) -> bool:
        """Write the rows that are not recorded yet, and ack the delivery. Returns false if the recorder was closed
        while the rows could not be read or the disk was full."""
        self._singly = max(0, self._singly - 1)
        names = _names(self._stream, delivery)
        seen = self._writer.seen(names.rows)
        fresh = [row for row, there in enumerate(seen) if not there]
        self._repeated += len(seen) - len(fresh)
        ref = delivery.ref if len(fresh) == len(seen) else delivery.ref[fresh]
        try:
            written = not fresh or await self._write(ref, names.take(fresh))
        except (Retryable, OutcomeUnknown) as error:
            with suppress(DataplaneError):
                await delivery.unseen()
            await self._pause(self._plane, self._ends, "read rows", error)
            return not self._ends.is_set()
        if not written:
            full = self._how.waits and isinstance(self._passed, LimitExceeded) and self._ends.is_set()
            with suppress(LeaseExpired):
                await (delivery.unseen() if full or len(delivery) > 1 else delivery.nack())
            self._singly = len(delivery) + 1 if len(delivery) > 1 else self._singly
            return not full
        await self._ack(delivery, names)
        if self._writer.due:
            try:
                self._writer.rotate()
            except DataplaneError as error:
                self._pass_over(error, 0)
            else:
                self._passed = self._passed if self._skipped else None
        return True

    async def _ack(self, delivery: Delivery, names: RowNames) -> None:
        while True:
            try:
                await delivery.ack()
            except LeaseExpired as error:
                log.warning("the ack of recorded rows failed, so they are delivered again: %s", str(error))
                return
            except (Retryable, OutcomeUnknown) as error:
                await self._pause(self._plane, self._ends, "ack rows", error)
                if self._ends.is_set():
                    return  # the rows are delivered again to the next recorder, which recognises them
            else:
                self._writer.acknowledged(names.rows)
                return

    async def _write(self, ref: BatchRef, names: RowNames) -> bool:
        """Write rows in parts of at most `_PIECE` bytes or one row, and smaller ones if memory is short. Returns
        false if a row is lost or too large to read, or if the recorder was closed while the disk was full. Raises
        Retryable and OutcomeUnknown."""
        if len(ref) == 1 or ref.stored_nbytes <= _PIECE:
            try:
                batch = await self._plane.get(ref, timeout=_READ_S)
            except (Lost, LimitExceeded):
                if len(ref) == 1:
                    return False
            except Backpressure:
                if len(ref) == 1:
                    raise
            else:
                return await self._commit(batch, names)
        half = len(ref) // 2
        first = await self._write(ref[:half], names.take(range(half)))
        return await self._write(ref[half:], names.take(range(half, len(ref)))) and first

    async def _commit(self, batch: Batch, names: RowNames) -> bool:
        before = self._passed
        while True:
            try:
                self._writer.write(batch, names)
            except LimitExceeded as error:
                if not self._how.waits:
                    self._pass_over(error, len(names))
                    return True
                if self._passed is before:
                    log.warning("the recorder waits for free disk space: %s", str(error))
                self._passed = _bare(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        await self._ends.wait()
                if self._ends.is_set():
                    return False
            except DataplaneError as error:
                self._pass_over(error, len(names))
                return True
            else:
                self._passed = before if self._skipped or self._writer.failed else None
                self._rows += len(names)
                return True

    def _pass_over(self, error: DataplaneError, rows: int) -> None:
        if rows and (self._passed is None or not self._skipped):
            log.warning("the recorder skips rows: %s", str(error))
        elif self._passed is None:
            log.warning("the recorder could not write a file, and keeps the rows in parts: %s", str(error))
        self._passed = _bare(error)
        self._skipped += rows


def _bare(error: DataplaneError) -> DataplaneError:
    """A copy of the error without its traceback, whose frames would keep the rows in memory."""
    return type(error)(str(error), **error.fields)


def _names(stream: AsyncStream, delivery: Delivery) -> RowNames:
    numbers = [0] * len(delivery)
    for _, at, found in delivery.ref.origins():
        for row, number in zip(at.tolist(), found.tolist(), strict=True):
            numbers[row] = number
    mark = stream._mark
    rows = [
        key if key.startswith("~") else f"{mark}.{number}.{key}"
        for key, number in zip(delivery.keys, numbers, strict=True)
    ]
    return RowNames(delivery.keys, delivery.groups, delivery.versions, delivery.tags, rows)


async def _columns(stats: Callable[[], Awaitable[Mapping[str, Any]]], task: str, stop: asyncio.Event) -> list[str]:
    """The stream's columns, once each other task has acked a row or the stream is closed. Empty if the stream is closed
    without rows, or `stop` is set. `stats`: requests the statistics."""
    while True:
        figures = await stats()
        others = [each["acked"] for name, each in figures["task"].items() if name != task]
        if figures["columns"] and (all(others) or figures["closed"]):
            return list(figures["columns"])
        if figures["closed"] or stop.is_set():
            return []
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.wait()


def _recorded(directory: Path) -> list[str]:
    """The columns of the recording in the directory; empty if there is none. The recorder of a stream without rows
    opens this recording, and so fails while another recorder writes there."""
    return Manifest.read(directory).columns if (directory / "manifest.json").exists() else []


def record(
    stream: AsyncStream,
    directory: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    task: str = TASK,
    rows: int = 256,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    media: Sequence[str] = (),
    compression: str = "zstd",
    on_full: str = "skip",
) -> Recording:
    """Start a recorder. Raises Misuse for invalid options, which `AsyncStream.record` describes."""
    if task not in stream.settings.tasks:
        raise Misuse(
            f"stream {stream.name!r} has no task {task!r} whose rows could be recorded, only"
            f" {', '.join(stream.settings.tasks)}: make it with one, or pass task= of one that nothing else consumes"
        )
    if on_full not in ("skip", "wait"):
        raise Misuse(f'on_full is "skip" or "wait", not {on_full!r}')
    if compression not in COMPRESSIONS:
        raise Misuse(f"compression is one of {', '.join(COMPRESSIONS)}, not {compression!r}")
    named = None if columns is None else arguments.names("columns", columns)
    reserved = [name for name in named or () if name in RESERVED]
    if reserved or named == []:
        raise Misuse(f"a recording has one column or more, and {', '.join(RESERVED)} of its own; not {named}")
    try:
        size = parse_size(max_file_bytes, "max_file_bytes")
        path = Path(directory).absolute()
    except (TypeError, ValueError) as error:
        raise Misuse(f"a recording has a directory, and files of so many bytes: {error}") from None
    count = arguments.whole("rows", rows)
    if count < 1 or size < 1:
        raise Misuse(f"a recorder takes a row or more at a time, and files have bytes; not {rows} and {max_file_bytes}")
    how = How(path, named, task, count, size, arguments.names("media", media), compression, on_full == "wait")
    return Recording(stream, how).start()
