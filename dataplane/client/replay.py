"""Makes a stream from a recording: `plane.replay`.

A separate thread appends the rows in the recorded order, with their keys, groups, versions and tags, and then closes
the stream. By default the stream has room for a quarter of the node's memory, so a recording of any size is replayed
at the pace of its consumers. A replay that fails or is closed early drops the stream, and its consumers get Closed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane.client import arguments
from dataplane.client.background import Background
from dataplane.errors import (
    Backpressure,
    DataplaneError,
    LimitExceeded,
    Misuse,
    OutcomeUnknown,
    PeerUnavailable,
)
from dataplane.recording import Reader, Recorded, RowNames

if TYPE_CHECKING:
    from dataplane.client.plane import AsyncPlane
    from dataplane.client.streams import AsyncStream

ROWS = 256

_SHARE = 4  # the node's memory divided by the default capacity of a stream
_ROOM_S = 2.0  # the most seconds of waiting for room; then the replay checks whether to end
_AWAY_S = 0.2  # seconds between two attempts to reach the leader of the stream


class Replay(Background):
    """A running replay. `wait()` waits until all rows are appended. `close()` ends the replay, and drops the stream if
    not all rows were appended."""

    def __init__(
        self, stream: AsyncStream, reader: Reader, columns: list[str] | None, wanted: Any, rows: int, group_size: int
    ) -> None:
        super().__init__(stream._connection, f"replay of {reader.directory}")
        self._reader, self._stream_name = reader, stream.name
        self._columns, self._wanted, self._at_once = columns, wanted, rows
        self._used: set[str] = set()  # keys that users gave
        self._group_size = group_size  # 0: unknown
        self._grouped: dict[str | int, tuple[str | int, int]] = {}  # by recorded name: the current name, and its rows
        self.rows = 0
        """The number of rows that were appended."""

    async def _run(self, plane: AsyncPlane, stop: asyncio.Event) -> None:
        stream = await self._again(plane, stop, "open the stream", lambda: plane.stream(self._stream_name))
        done = False
        try:
            for recorded in self._reader.rows(rows=self._at_once, versions=self._wanted, columns=self._columns):
                names = recorded.names
                recorded = replace(recorded, names=replace(names, groups=self._groups(names)))
                await self._append(plane, stream, recorded, self._keys(names), stop)
                if stop.is_set():
                    break
                self.rows += len(recorded)
            else:
                done = True
                await self._again(plane, stop, "close the stream", stream.close)
        finally:
            if not done:
                with suppress(DataplaneError):
                    await stream.drop()

    async def _append(
        self, plane: AsyncPlane, stream: AsyncStream, recorded: Recorded, keys: list[str], stop: asyncio.Event
    ) -> None:
        """Append rows until `stop` is set, in halves if they are too large for the node or the stream. Raises
        LimitExceeded if one row is too large."""
        try:
            await self._append_at_once(plane, stream, recorded, keys, stop)
        except LimitExceeded:
            if len(recorded) == 1:
                raise
            half = len(recorded) // 2
            for part in (range(half), range(half, len(recorded))):
                await self._append(plane, stream, recorded.take(part), keys[part.start : part.stop], stop)

    async def _append_at_once(
        self, plane: AsyncPlane, stream: AsyncStream, recorded: Recorded, keys: list[str], stop: asyncio.Event
    ) -> None:
        names = recorded.names
        repeating = [name for name in self._reader.repeating if name in recorded.columns]
        while not stop.is_set():
            try:
                ref = await plane.put(recorded.columns, dedupe=repeating, timeout=_ROOM_S)
                break
            except Backpressure:
                continue
        else:
            return
        unknown = False
        try:
            while not stop.is_set():
                try:
                    how: dict[str, Any] = {"version": list(names.versions), "tags": names.tags, "timeout": _ROOM_S}
                    await stream.append(ref, keys=keys, group=list(names.groups), **how)
                    break
                except Backpressure:
                    continue
                except Misuse as error:
                    if not unknown or type(error) is not Misuse:  # such as Closed
                        raise
                    break  # consumers have acked some of the rows, so the earlier attempt has succeeded
                except (PeerUnavailable, OutcomeUnknown) as error:
                    unknown = unknown or isinstance(error, OutcomeUnknown)
                    plane.connection.check()  # raises if the node has ended, because no attempt can succeed then
                    await asyncio.sleep(_AWAY_S)
        finally:
            await plane.free(ref)

    def _keys(self, names: RowNames) -> list[str]:
        """The keys of the next rows: as recorded, without the "~" of generated ones. A user's key that repeats is
        replaced by the row's unique name."""
        keys = []
        for key, row in zip(names.keys, names.rows, strict=True):
            keys.append(row if key in self._used else key.removeprefix("~"))
            if not key.startswith("~"):
                self._used.add(key)
        return keys

    def _groups(self, names: RowNames) -> Sequence[str | int | None]:
        """The groups of the next rows: as recorded. Once a group has all of its rows, later rows of its name form a new
        group. Its name gets the unique name of its first row as a suffix."""
        if not self._group_size:
            return names.groups
        groups: list[str | int | None] = []
        for group, row in zip(names.groups, names.rows, strict=True):
            if group is None:
                groups.append(None)
                continue
            name, rows = self._grouped.get(group, (group, 0))
            if rows == self._group_size:
                name, rows = f"{group}.{row.removeprefix('~')}", 0
            self._grouped[group] = name, rows + 1
            groups.append(name)
        return groups


async def replay(
    plane: AsyncPlane,
    directory: str | os.PathLike[str],
    name: str | None = None,
    tasks: Sequence[str] | None = None,
    *,
    versions: int | Iterable[int] | None = None,
    columns: Sequence[str] | None = None,
    rows: int = ROWS,
    max_bytes: int | str | None = None,
    max_rows: int | None = None,
    max_lag: int | None = None,
    group_size: int | None = None,
) -> AsyncStream:
    """Make a stream and start its replay. Raises Misuse, Corrupt, ProtocolMismatch. See `AsyncPlane.replay`."""
    reader = await asyncio.to_thread(Reader, _directory(directory))
    found = reader.manifest
    name = arguments.text("a stream's name", found.stream if name is None else name)
    named = None if columns is None else arguments.names("columns", columns)
    if name in await plane.streams():
        raise Misuse(f"there is a stream {name!r} already: drop it, or replay the recording under another name")
    if max_bytes is None and max_rows is None:
        max_bytes = max(1 << 20, plane.connection.welcome.capacity // _SHARE)
    recorded_size = found.settings.get("group_size") or 0
    if group_size is None:
        group_size = recorded_size or None
    count = arguments.whole("rows", rows)
    if count < 1:
        raise Misuse(f"a replay appends a row or more at a time, not {rows}")
    missing = [each for each in named or () if each not in found.columns]
    if missing:
        raise Misuse(f"the recording has no column {missing[0]!r}; it has {', '.join(found.columns)}")
    stream = await plane.stream(
        name,
        found.tasks if tasks is None else tasks,
        max_bytes=max_bytes,
        max_rows=max_rows,
        max_lag=max_lag,
        group_size=group_size,
    )
    # With chosen versions, the rows of a group that are left out cannot be counted.
    size = (recorded_size or stream.settings.group_size) if versions is None else 0
    stream.replay = Replay(stream, reader, named, _wanted(versions), count, size).start()
    return stream


def _directory(directory: Any) -> Path:
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise Misuse(f"a recording is in a directory, not {directory!r}")
    return Path(directory)


def _wanted(versions: int | Iterable[int] | None) -> Callable[[int], bool] | None:
    if versions is None:
        return None
    if isinstance(versions, Iterable):
        several: range | set[int] = (
            versions if isinstance(versions, range) else {arguments.whole("a version", each) for each in versions}
        )
        return several.__contains__
    return arguments.whole("a version", versions).__eq__
