"""The storage manager that TransferQueue has in each process: what is put goes into the plane, and its place to the
controller.

What always holds: a put that returns has been told to the controller, and one that raises has left nothing in the
store; a reader gets only the fields that it asks for; what a put replaces and what is cleared is freed, also rows out
of many; nothing is pickled by this backend, and no byte of a value passes through TransferQueue's sockets.

What a put replaces is freed once the controller knows the new. A reader that asked before, and reads after, is told
Freed by the store; it asks the controller again, and then reads the new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.managers.base import StorageManager
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.errors import DataplaneError, Freed, Misuse, PeerUnavailable, Rejected
from dataplane.integrations import process
from dataplane.integrations.verl import cells, entries, sharing
from dataplane.integrations.verl.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 30.0  # that the controller may take, as TransferQueue itself waits
_THREADS = 4  # of a process, for calls that wait: copying has threads of its own

#: Of each row: the cell of each field.
Index = Mapping[int, Mapping[str, bytes]]


class DataplaneStorageManager(StorageManager):  # type: ignore[misc]  # transfer_queue has no types
    """One process's way to the store. Any event loop may await its methods; waiting is done in its threads."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        """`config` is the node `backend.Dataplane`. The client's ZeroMQ context is not used: of ours goes little."""
        self._settings = Settings.of(config)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dataplane-transferqueue")
        super().__init__(controller_info, config)

    # What TransferQueue calls

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Store the fields of these rows, and tell the controller where they are.

        Raises SchemaMismatch (a value can not be carried), Backpressure (no room in time), LimitExceeded,
        PeerUnavailable, Rejected (the controller does not take them, as another dtype than the field has).
        """
        if data_parser is not None:
            raise Misuse("a data_parser runs in SimpleStorage alone: parse the data before the put")
        if not metadata.size:
            return
        if data.batch_size[0] != metadata.size:
            raise Misuse(f"{data.batch_size[0]} rows of data for {metadata.size} rows of metadata")
        columns, how = entries.columns_of(data)
        putting: Future[Any] = self._pool.submit(sharing.put, columns, how, self._settings.timeout)
        try:
            replaced = await self._held(metadata, columns)
            await self._tell(metadata, data, await asyncio.wrap_future(putting))
        except BaseException:
            putting.add_done_callback(self._undo)
            raise
        for row in metadata._custom_backend_meta:
            for name in columns:
                row.pop(name, None)
        await self._free(replaced)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of these rows that the metadata names. Raises Freed, OwnerDied, Corrupt, Backpressure,
        LimitExceeded, PeerUnavailable."""
        names, rows = list(metadata.field_names), list(metadata.global_indexes)
        if not names or not rows:
            return entries.tensordict({}, len(rows))
        found = [{name: row[name] for name in names if name in row} for row in metadata._custom_backend_meta]
        freed: Freed | None = None
        if all(len(row) == len(names) for row in found):
            try:
                return await self._in_thread(self._get, names, found)
            except Freed as error:
                freed = error
        now = await self._now(metadata, names)
        if missing := _missing(metadata, names, now):
            raise Freed(missing) from freed
        if freed is not None and now == found:
            raise freed
        return await self._in_thread(self._get, names, now)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Free all fields of these rows, also those that the metadata does not name."""
        for partition, rows in _by_partition(metadata).items():
            index = await self._index(partition)
            await self._free([dict(index[row]) for row in rows if row in index])

    # With the store, in a thread

    def _get(self, names: Sequence[str], rows: Sequence[Mapping[str, bytes]]) -> TensorDict:
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for ref, how, positions in cells.find({name: [row[name] for row in rows] for name in names}):
            batch = _with_plane(partial(_get, ref, self._settings.timeout))
            for name, column in batch.items():
                parts[name].append((column, how[name], positions))
        dense = self._settings.dense
        whole = {}
        for name, several in parts.items():
            column, way, _ = several[0]
            alone = len(several) == 1
            whole[name] = entries.entry_of(column, way, dense=dense) if alone else entries.merged(several, len(rows))
        return entries.tensordict(whole, len(rows))

    def _free_refs(self, refs: Iterable[BatchRef]) -> None:
        for ref in refs:
            _with_plane(partial(_free, ref))

    def _undo(self, put: Future[sharing.Cells]) -> None:
        """Free what was put for nothing: the controller does not know it."""
        if not put.cancelled() and put.exception() is None:
            with suppress(DataplaneError):
                sharing.free({name: cell} for name, made in put.result().items() for cell in made)

    async def _free(self, rows: Sequence[Mapping[str, bytes]]) -> None:
        names = dict.fromkeys([name for row in rows for name in row])
        if names:
            found = cells.find({name: [row.get(name) for row in rows] for name in names})
            await self._in_thread(self._free_refs, [each.ref for each in found])

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._pool.submit(work, *arguments))

    # With the controller

    async def _held(self, metadata: BatchMeta, names: Iterable[str]) -> list[dict[str, bytes]]:
        """The cells of these fields that these rows have now.

        The metadata has those of the fields that all its rows have. Whether some have others, the controller says at
        little cost for a partition that has these fields.
        """
        known = [{name: row[name] for name in names if name in row} for row in metadata._custom_backend_meta]
        unsaid = [name for name in names if name not in metadata.field_schema]
        if not unsaid or (metadata.size == 1 and not metadata.field_schema):
            return known
        for partition, rows in _by_partition(metadata).items():
            body = {"partition_id": partition, "data_fields": unsaid}
            said = await self._ask(ZMQRequestType.GET_PRODUCTION, body, ZMQRequestType.PRODUCTION_RESPONSE)
            numbers, produced = said.body.get("global_index"), said.body.get("production_status")
            if numbers is not None:
                having = set(numbers[produced.any(dim=1)].tolist())
                if not having & set(rows):
                    continue
            index = await self._index(partition)
            known += [{name: index[row][name] for name in unsaid if name in index[row]} for row in rows if row in index]
        return known

    async def _now(self, metadata: BatchMeta, names: Sequence[str]) -> list[dict[str, bytes]]:
        """The cells of these fields that the controller has now, where it has them, in the order of the rows."""
        indexes = {partition: await self._index(partition) for partition in _by_partition(metadata)}
        pairs = zip(metadata.partition_ids, metadata.global_indexes, strict=True)
        rows = [indexes[partition].get(row, {}) for partition, row in pairs]
        return [{name: row[name] for name in names if name in row} for row in rows]

    async def _index(self, partition: str) -> Index:
        """All cells of a partition."""
        request, answer = ZMQRequestType.GET_PARTITION_META, ZMQRequestType.GET_PARTITION_META_RESPONSE
        said = (await self._ask(request, {"partition_id": partition}, answer)).body["metadata"]
        return {} if said is None else dict(zip(said.global_indexes, said._custom_backend_meta, strict=True))

    async def _tell(self, metadata: BatchMeta, data: TensorDict, made: Mapping[str, Sequence[bytes]]) -> None:
        """Have the controller know the rows' cells. Raises Rejected where it does not take them."""
        names, listed = list(made), zip(*made.values(), strict=True)
        index = {
            row: dict(zip(names, own, strict=True)) for row, own in zip(metadata.global_indexes, listed, strict=True)
        }
        await self.notify_data_update(
            metadata.partition_ids[0], metadata.global_indexes, extract_field_schema(data), index
        )

    async def _notify_and_wait(self, request_msg: list[Any]) -> None:
        """TransferQueue's own logs what goes wrong here and returns: rows would be lost and nobody told."""
        said = await self._exchange(request_msg, ZMQRequestType.NOTIFY_DATA_UPDATE_ACK)
        if not said.body.get("success", True):
            raise Rejected(
                "TransferQueue's controller did not take the rows, its log says why: all rows of a field are of one"
                " dtype, and tensors or none"
            )

    async def _ask(self, request: Any, body: Mapping[str, Any], answer: Any) -> Any:
        frames = ZMQMessage.create(
            request_type=request,
            sender_id=self.storage_manager_id,
            receiver_id=self.controller_info.id,
            body=dict(body),
        ).serialize()
        asked = asyncio.run_coroutine_threadsafe(self._exchange(frames, answer), self._notify_loop)
        return await asyncio.wrap_future(asked)

    async def _exchange(self, frames: list[Any], answer: Any) -> Any:
        """Send a request and wait for its answer, in the loop of the sockets. Raises PeerUnavailable, Rejected."""
        try:
            async with self.notify_pool.alease(self.controller_info) as socket, asyncio.timeout(_ANSWER_S):
                await socket.send_multipart(frames)
                said = ZMQMessage.deserialize(await socket.recv_multipart(copy=False))
        except TimeoutError:
            why = f"TransferQueue's controller did not answer in {_ANSWER_S:.0f} s: is its actor alive?"
            raise PeerUnavailable(why, address=f"tcp://{self.controller_info.ip}") from None
        if said.request_type != answer:
            raise Rejected(f"TransferQueue's controller refused: {said.body.get('message', said.request_type)}")
        return said

    def close(self) -> None:
        """Let go of the controller. The plane is the process's, and stays."""
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=False)
        super().close()


def _with_plane(work: Callable[[Plane], T]) -> T:
    """What work with this process's plane gives; done again where its node has ended and another runs."""
    plane = process.plane()
    try:
        return work(plane)
    except PeerUnavailable:
        again = process.plane()
        if again is plane:
            raise
        return work(again)


def _get(ref: BatchRef, timeout: float, plane: Plane) -> Batch:
    return plane.get(ref, timeout=timeout)


def _free(ref: BatchRef, plane: Plane) -> None:
    plane.free(ref)


def _by_partition(metadata: BatchMeta) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for partition, row in zip(metadata.partition_ids, metadata.global_indexes, strict=True):
        found.setdefault(partition, []).append(row)
    return found


def _missing(metadata: BatchMeta, names: Sequence[str], rows: Sequence[Mapping[str, bytes]]) -> str:
    """What is not there, in words; empty where all is."""
    for number, row in zip(metadata.global_indexes, rows, strict=True):
        for name in names:
            if name not in row:
                count = sum(len(each) < len(names) for each in rows)
                return f"row {number} has no field {name!r}, and {count - 1} more rows lack one: cleared, or never put"
    return ""
