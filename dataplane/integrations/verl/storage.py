"""TransferQueue's storage manager in each process: stores values in the plane, and records their cells at the
controller.

Invariants: a put that returns is recorded at the controller, and one that raises has left nothing in the store, unless
it raises OutcomeUnknown; a reader fetches only the fields that it asks for; replaced and cleared values are freed, also
single rows of many; the backend pickles nothing, and no byte of a value passes through TransferQueue's sockets.

A replaced value is freed once the controller has recorded the new one. A reader that got the old cell before that
gets Freed from the store; it asks the controller again, and then reads the new value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.managers.base import StorageManager

from dataplane.batch.object_codec import Copies
from dataplane.errors import Freed, Lost, Misuse, OwnerDied
from dataplane.integrations.process import with_plane
from dataplane.integrations.verl import cells, entries, hooks, resume
from dataplane.integrations.verl.commits import Committer, PendingPut
from dataplane.integrations.verl.controller import Controller, Index
from dataplane.integrations.verl.resume import RestoredRows
from dataplane.integrations.verl.settings import StorageSettings

T = TypeVar("T")

Schema = Mapping[str, Mapping[str, Any]]

_THREADS = 4  # of a process, for calls that wait: copying has threads of its own


class DataplaneStorageManager(StorageManager):  # type: ignore[misc]  # transfer_queue has no types
    """The storage manager of one process. Any event loop may await its methods; waiting is done in its own threads."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        """`config`: the section `backend.Dataplane`. The client's ZeroMQ context is not used."""
        self._settings = StorageSettings.of(config)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dataplane-transferqueue")
        super().__init__(controller_info, config)
        self._controller = Controller(controller_info, self.storage_manager_id)
        self._commits = Committer(self._controller, self._settings.timeout)
        self._restored: RestoredRows | None = None
        self._forgets_first = not hooks.has_checkpoints()

    # Called by TransferQueue

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Store the fields of these rows, and record their cells at the controller.

        Raises SchemaMismatch (an unsupported value), Backpressure (no room in time), LimitExceeded, PeerUnavailable,
        Rejected (the controller refuses them, for example another dtype than the field has).
        """
        if data_parser is not None:
            raise Misuse("a data_parser runs in SimpleStorage alone: parse the data before the put")
        await self._put(data, metadata, None)

    async def put_tagged(self, data: TensorDict, metadata: BatchMeta) -> Schema:
        """As `put_data`, and record the tags of the rows too. All rows have to be of one partition. Returns the
        recorded schema of the fields."""
        return await self._put(data, metadata, metadata.get_all_custom_meta())

    async def retrieve(self, keys: Sequence[str], partition: str, create: bool) -> BatchMeta:
        """The metadata of the rows with these keys; with `create`, missing rows are created. Raises as the
        controller."""
        found = await self._controller.retrieve(keys, partition, create)
        return BatchMeta.empty() if found is None else found

    async def _put(self, data: TensorDict, metadata: BatchMeta, tags: Sequence[Mapping[str, Any]] | None) -> Schema:
        if not metadata.size:
            return {}
        if data.batch_size[0] != metadata.size:
            raise Misuse(f"{data.batch_size[0]} rows of data for {metadata.size} rows of metadata")
        columns, how = entries.columns_of(data)
        partition, rows = metadata.partition_ids[0], metadata.global_indexes
        held = await self._held(metadata, columns)
        schema = entries.schema_of(data)
        put = PendingPut(partition, rows, columns, how, schema, tags)
        put.replaced.extend(held)
        self._commits.submit(put)
        await self._known(put)
        for number, row in zip(rows, metadata._custom_backend_meta, strict=True):
            row.update(put.cells[number])  # the cells that another put with this metadata replaces
        await self._free(put.replaced)
        return schema

    async def _known(self, put: PendingPut) -> None:
        """Wait until the controller has recorded the put. If this is cancelled before the put was sent to the
        controller, nothing is stored; otherwise the put completes, and the replaced cells are freed."""
        waiting = asyncio.wrap_future(put.done)
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks the error as retrieved
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not put.give_up():
                with suppress(Exception):
                    await asyncio.shield(waiting)
                    await self._free(put.replaced)
            raise

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of these rows that the metadata names. Raises Freed, OwnerDied, Corrupt, Backpressure,
        LimitExceeded, PeerUnavailable."""
        names, rows = list(metadata.field_names), list(metadata.global_indexes)
        if not names or not rows:
            return TensorDict({}, batch_size=[len(rows)])
        found = [{name: row[name] for name in names if name in row} for row in metadata._custom_backend_meta]
        lost: Lost | None = None
        if all(len(row) == len(names) for row in found):
            try:
                return await self._in_thread(self._get, names, found)
            except (Freed, OwnerDied) as error:  # the metadata's cells; the controller may have newer ones
                lost = error
        now = await self._in_thread(self._now, metadata, names)
        if missing := _missing(metadata, names, now):
            raise Freed(missing) from lost
        if lost is not None and now == found:
            raise lost
        return await self._in_thread(self._get, names, now)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Free all fields of these rows, including those that the metadata does not name."""
        if not self._forgets_first:
            await self.look(metadata)
        await self._free([dict(row) for row in metadata._custom_backend_meta])

    async def look(self, metadata: BatchMeta) -> None:
        """Add all cells of its rows to the metadata, including fields that it does not name."""
        indexes = await self._in_thread(self._indexes, metadata)
        pairs = zip(metadata.partition_ids, metadata.global_indexes, strict=True)
        metadata._custom_backend_meta = [dict(indexes[partition].get(row, {})) for partition, row in pairs]

    # Checkpoints

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Add the rows to the checkpoint that TransferQueue writes to this directory. Raises as `resume.save`."""
        await self._in_thread(resume.save, self._controller, Path(checkpoint_dir), self._settings.timeout)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Put the rows of a checkpoint into the plane, before TransferQueue has the controller load its state.

        Raises as `resume.load`; then nothing was changed.
        """
        if self._restored is not None:  # by a load that went no further
            await self._in_thread(self._restored.free)
        self._restored = await self._in_thread(resume.load, Path(checkpoint_dir), self._settings.timeout)

    async def replace_state(self, load: Callable[[], Awaitable[None]]) -> None:
        """Have the controller load its state by `load`, and record the current cells of its rows (`resume`)."""
        restored, self._restored = self._restored, None
        try:
            before = await self._in_thread(resume.indexes, self._controller)
            await load()
        except BaseException:
            if restored is not None:
                await self._in_thread(restored.free)
            raise
        await self._in_thread(resume.settle, self._controller, before, restored)

    # With the store, in a thread

    def _get(self, names: Sequence[str], rows: Sequence[Mapping[str, bytes]]) -> TensorDict:
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for ref, how, positions in cells.find({name: [row[name] for row in rows] for name in names}, reading=True):
            batch = with_plane(methodcaller("get", ref, timeout=self._settings.timeout))
            for name, column in batch.items():
                parts[name].append((column, how[name], positions))
        dense, copies = self._settings.dense, Copies()
        whole = {}
        for name, several in parts.items():
            column, way, _ = several[0]
            if len(several) == 1:
                whole[name] = entries.entry_of(column, way, dense=dense, copies=copies)
            else:
                whole[name] = entries.merged(several, len(rows), copies)
        return TensorDict(whole, batch_size=[len(rows)])

    async def _free(self, rows: Sequence[Mapping[str, bytes]]) -> None:
        names = dict.fromkeys([name for row in rows for name in row])
        if names:
            await self._in_thread(cells.free, {name: [row.get(name) for row in rows] for name in names})

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._pool.submit(work, *arguments))

    # With the controller

    async def _held(self, metadata: BatchMeta, names: Iterable[str]) -> list[dict[str, bytes]]:
        """The current cells of these fields of these rows.

        The metadata has those of the fields that all its rows have. For the other fields, the controller is asked
        which rows have any, which costs little for a partition with these fields.
        """
        known = [{name: row[name] for name in names if name in row} for row in metadata._custom_backend_meta]
        unsaid = [name for name in names if name not in metadata.field_schema]
        if not unsaid or (metadata.size == 1 and not metadata.field_schema):
            return known
        return known + await self._in_thread(self._others, _by_partition(metadata), unsaid)

    def _others(self, partitions: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[dict[str, bytes]]:
        """The cells of these fields, which few of the rows have."""
        found: list[dict[str, bytes]] = []
        for partition, rows in partitions.items():
            having = self._controller.having(partition, names)
            if having is not None and not having & set(rows):
                continue
            index = self._controller.cells(partition)
            found += [{name: index[row][name] for name in names if name in index[row]} for row in rows if row in index]
        return found

    def _indexes(self, metadata: BatchMeta) -> dict[str, Index]:
        """All cells of the partitions of these rows."""
        return {partition: self._controller.cells(partition) for partition in dict.fromkeys(metadata.partition_ids)}

    def _now(self, metadata: BatchMeta, names: Sequence[str]) -> list[dict[str, bytes]]:
        """The cells of these fields that the controller has now, in the order of the rows."""
        indexes = self._indexes(metadata)
        pairs = zip(metadata.partition_ids, metadata.global_indexes, strict=True)
        rows = [indexes[partition].get(row, {}) for partition, row in pairs]
        return [{name: row[name] for name in names if name in row} for row in rows]

    def close(self) -> None:
        """Close the connections to the controller. The plane belongs to the process, and stays open."""
        if hasattr(self, "_commits"):
            self._commits.close()
            self._controller.close()
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=False)
        super().close()


def _by_partition(metadata: BatchMeta) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for partition, row in zip(metadata.partition_ids, metadata.global_indexes, strict=True):
        found.setdefault(partition, []).append(row)
    return found


def _missing(metadata: BatchMeta, names: Sequence[str], rows: Sequence[Mapping[str, bytes]]) -> str:
    """The missing values, as text; empty if there are none."""
    for number, row in zip(metadata.global_indexes, rows, strict=True):
        for name in names:
            if name not in row:
                count = sum(len(each) < len(names) for each in rows)
                return f"row {number} has no field {name!r}, and {count - 1} more rows lack one: cleared, or never put"
    return ""
