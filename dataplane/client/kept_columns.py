"""Columns that stay in memory of the process that puts them, on a device or the host, and that other processes map.

A kept column is a shard in memory of this process, in the layout of the node's memory. The node has its layout and a
handle, by which other processes of the host map the memory. Tensors on a CUDA device stay on the device, and are mapped
by CUDA IPC. Tensors on the host are copied to memory of this process that other processes map through /proc.

Invariants: kept columns count towards a budget. A kept column is copied to the node's memory (*landed*) if it is the
oldest and the budget is exceeded, if a process needs the column and cannot map it (such as one on another host), or
when the plane is closed. Its memory is released when the node reports that no process needs it. A kept column is
immutable.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dataplane.batch import tensors
from dataplane.batch.layout import Bytes, aligned
from dataplane.batch.put_plan import PlannedColumn, PutPlan, layout_of
from dataplane.batch.stored_column import ExtentMemory
from dataplane.client.connection import Connection
from dataplane.client.memory import HeldShard, MappingAccess, NodeSegment
from dataplane.client.pins import drop_later
from dataplane.client.writer import Placed, ShardWriter
from dataplane.device.ordering import NOTHING
from dataplane.device.staging import leave, outward
from dataplane.errors import DataplaneError, PeerUnavailable, describe
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm

log = logging.getLogger(__name__)

_LAND_S = 60.0  # the most seconds for copying a shard to the arena


class MemoryHandle(msgspec.Struct, frozen=True, array_like=True):
    """The handle by which other processes find memory of `process`. Host memory: `number` is the file descriptor in
    that process, and `inode` the file's. CUDA: `cuda` is torch's handle for CUDA IPC, and `number` the key by which the
    process itself finds the memory."""

    process: int
    number: int
    inode: int = 0
    device: str = "cpu"
    cuda: tuple[Any, ...] = ()


class OwnHost:
    """Host memory of this process that other processes may map: an unnamed file. `OwnDevice` has the same methods."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create("dataplane-kept", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            self._memory = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)
        except BaseException:
            os.close(self._fd)
            raise

    def handle(self) -> MemoryHandle:
        """The handle by which other processes find the memory."""
        return MemoryHandle(os.getpid(), self._fd, os.fstat(self._fd).st_ino)

    def write(self, column: PlannedColumn) -> list[Callable[[], Any]]:
        """The jobs that together copy the column into the memory."""
        return list(column.jobs(self._memory[: column.nbytes]))

    def copy(self, memory: Bytes) -> None:
        """Copy all bytes to `memory`. Blocks. Does nothing after `close`."""
        source = self._memory
        if len(source):
            np.copyto(memory, source)

    def close(self, *, mapped: bool = False) -> None:
        """Release it; `mapped`: others may map it still. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._memory = -1, np.empty(0, np.uint8)


_own: weakref.WeakValueDictionary[int, OwnDevice] = weakref.WeakValueDictionary()
"""Device memory of this process, by number. It is not mapped by CUDA IPC, which maps only memory of other processes."""
_numbers = itertools.count(secrets.randbits(48))  # begins at random, so that no other process has the same numbers


class OwnDevice:
    """Memory of this process on a CUDA device, with the methods of `OwnHost`. Other processes map it by torch's CUDA
    IPC. The handle of a storage (`_share_cuda_`) names the allocation, the storage's offset in it, and an event for
    which the other process waits. The device keeps the allocation until this process ends; the node's pins decide when
    it may be reused. All bytes are written before the handle is made, and never afterwards."""

    def __init__(self, size: int, device: Any) -> None:
        import torch

        self.size = size
        self.number = next(_numbers)
        self._device = device
        self._counter: tuple[Any, int] | None = None
        _own[self.number] = self
        with torch.cuda.device(device), torch.cuda.stream(outward(device).stream):  # all writes use this stream
            self._tensor: Any = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> MemoryHandle:
        import torch

        with torch.cuda.device(self._device):
            parts = self._tensor.untyped_storage()._share_cuda_()
            self._counter = parts[4], parts[5]
        name = str(torch.cuda.get_device_properties(self._device).uuid)
        return MemoryHandle(os.getpid(), self.number, 0, name, (*parts, self._tensor.storage_offset()))

    def write(self, column: PlannedColumn) -> list[Callable[[], Any]]:
        """One job, since all copies are made on one stream of the device."""
        return [partial(self._write, column)]

    def _write(self, column: PlannedColumn) -> None:
        import torch

        stream, base = outward(self._device).stream, 0
        with torch.no_grad(), torch.cuda.stream(stream):
            for buffer in column.buffers:
                target = self._tensor[base : base + buffer.nbytes]
                there = None if isinstance(buffer, np.ndarray) else getattr(buffer, "flat", None)
                if there is not None:
                    for event in buffer.after.events:  # type: ignore[union-attr]
                        stream.wait_event(event)
                    target.copy_(there())
                elif buffer.nbytes:
                    run = buffer if isinstance(buffer, np.ndarray) else np.empty(buffer.nbytes, np.uint8)
                    for job in () if isinstance(buffer, np.ndarray) else buffer.jobs(run, buffer.nbytes):
                        job()
                    target.copy_(torch.from_numpy(run.copy()))
                padding = base + buffer.nbytes
                base += aligned(buffer.nbytes)
                self._tensor[padding:base].zero_()
            stream.synchronize()

    def mapped(self, pin: object) -> MappedDevice:
        """The memory for readers in this process."""
        return MappedDevice(self._tensor, pin, own=True)

    def copy(self, memory: Bytes) -> None:
        tensor = self._tensor
        if tensor is not None:  # else it was freed meanwhile
            leave(memory[: self.size], [tensor], NOTHING)

    def close(self, *, mapped: bool = False) -> None:
        """Release the memory. If other processes may still map it (`mapped`), keep it until this process ends. torch
        keeps a shared storage until one mapping of it was made and dropped, so one is reported to torch."""
        tensor, counter = self._tensor, self._counter
        self._tensor = self._counter = None
        if tensor is not None and mapped:
            _left.append(tensor)
        elif tensor is not None and counter is not None:
            tensor.untyped_storage()._release_ipc_counter(*counter, device=self._device)


_left: list[Any] = []
"""Tensors that other processes may have mapped when the plane was closed; kept until this process ends."""


class _PinHold:
    """Holds the pin of mapped memory for its tensors, until the CUDA stream has run the work queued when they were
    dropped."""

    __slots__ = ("_device", "_pin")

    def __init__(self, pin: object, device: Any) -> None:
        self._pin = pin
        self._device = device

    def __del__(self) -> None:
        import torch

        if self._device.type == "cuda" and torch.cuda.is_initialized():
            used = torch.cuda.Event()
            used.record(torch.cuda.current_stream(self._device))
            drop_later(self._pin, partial(_done, used))


def _done(event: Any) -> bool:
    """Whether the device has reached the event. False in a forked child, which cannot use CUDA."""
    import torch

    return torch.cuda.is_initialized() and bool(event.query())


class MappedDevice:
    """Device memory of another process, or of this one (`batch.stored_column.ExtentMemory`). It is read on the host by
    copies, and on the device in place. The storage of the tensors keeps the pin until the current CUDA stream of the
    thread that drops them has done its queued work."""

    def __init__(self, tensor: Any, pin: object, *, own: bool = False) -> None:
        """`own`: whether the tensor is of this process. Its views then need no pin, because torch keeps the memory."""
        self._tensor = tensor
        if own:
            self._pin = pin
        else:
            tensor.untyped_storage().dataplane_hold = _PinHold(pin, tensor.device)

    def read(self, offset: int, nbytes: int) -> Bytes:
        """A read-only copy of `nbytes` from `offset` in host memory."""
        view = self.own(offset, nbytes)
        view.setflags(write=False)
        return view

    def own(self, offset: int, nbytes: int) -> Bytes:
        """A writable copy of `nbytes` from `offset` in host memory."""
        memory = np.empty(nbytes, np.uint8)
        if nbytes:
            leave(memory, [self._tensor[offset : offset + nbytes]], NOTHING)
        return memory

    private = own

    def there(self, offset: int, nbytes: int, device: Any) -> Any:
        """A tensor of these bytes without a copy if they are on this device; else None."""
        if self._tensor.device != device:
            return None
        there = self._tensor[offset : offset + nbytes]
        if there.is_cuda:
            import torch

            there.record_stream(torch.cuda.current_stream(device))  # has an effect for memory of this process
        return there


def _mapped_device(name: str, parts: tuple[Any, ...], size: int, pin: object) -> MappedDevice | None:
    """Map the memory of this handle on the device with the UUID `name`; None if this process cannot map it."""
    import torch

    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == name:
            break
    else:
        return None
    *shared, offset = parts
    shared[0] = index  # processes may number the devices differently
    with torch.cuda.device(index):
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*shared)
        except RuntimeError:  # refused by the driver, for instance in another container or without peer access
            return None
        tensor = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage, offset, (size,), (1,))
    return MappedDevice(tensor, pin)


def mapped(number: int, size: int, encoded: bytes, pin: object, access: MappingAccess) -> ExtentMemory | None:
    """Map kept memory by its encoded handle. `number`: that of the pin. Returns None if it cannot be mapped here."""
    try:
        handle = msgspec.msgpack.decode(encoded, type=MemoryHandle)
    except msgspec.DecodeError:
        return None
    if handle.cuda:
        if handle.process != os.getpid():
            return _mapped_device(handle.device, handle.cuda, size, pin)
        own = _own.get(handle.number)
        return None if own is None else own.mapped(pin)
    try:
        fd = os.open(f"/proc/{handle.process}/fd/{handle.number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the process is of another user, or in another PID namespace
        return None
    found = os.fstat(fd)
    if found.st_ino != handle.inode or found.st_size < size:
        os.close(fd)
        return None
    segment = NodeSegment(number, found.st_size, access)
    segment.grant(fd, writable=False)
    return HeldShard(segment, 0, size, pin)


class KeptColumns:
    """The columns that one plane keeps. Used from its event loop only."""

    def __init__(self, connection: Connection, writer: ShardWriter, budget: int) -> None:
        self._connection = connection
        self._writer = writer
        self._budget = budget
        self._kept: dict[int, OwnHost | OwnDevice] = {}  # by shard, the oldest first
        self._landing: dict[int, asyncio.Task[None]] = {}
        self._landed: set[int] = set()  # being copied, or copied to the node's memory and still mapped
        self.used = 0
        connection.keeping = self._told

    @property
    def live(self) -> bool:
        """Whether a column is kept. The node may then ask for a copy at any time."""
        return bool(self._kept)

    async def keep(self, columns: Any, planned: PutPlan, scope: str, timeout: float) -> list[Placed]:
        """Leave the planned columns whose values in `columns` are tensors in this process's memory, each as a separate
        shard, and tell the node. Returns these columns with their shards; none if the budget for kept columns has no
        room, or the device cannot share memory. Raises as `AsyncPlane.put`; nothing is kept then."""
        pairs = columns.items() if hasattr(columns, "items") and planned.rows else ()
        names = {name for name, values in pairs if _are_tensors(values)}
        chosen = [column for column in planned.columns if column.name in names and column.nbytes]
        total = sum(column.nbytes for column in chosen)
        if not chosen or total > self._budget or not await self._make_room(total):
            return []
        made: list[OwnHost | OwnDevice] = []
        self.used += total
        try:
            jobs: list[Callable[[], Any]] = []
            for column in chosen:
                made.append(_memory_for(column))
                jobs += made[-1].write(column)
            await self._writer.run(jobs)
            shards = [
                (own.size, layout_of([column]), msgspec.msgpack.encode(own.handle()))
                for own, column in zip(made, chosen, strict=True)
            ]
            asked = sm.Keep(self._connection.next_id(), shards, scope)
            numbers = (await self._connection.request(asked, sm.Kept, timeout)).shards
        except BaseException as error:
            self.used -= total
            for own in made:
                own.close()
            if isinstance(error, RuntimeError | OSError) and not isinstance(
                error, DataplaneError
            ):  # CUDA has no memory left or cannot share it, or no file descriptors are left
                log.warning("columns are copied to shared memory, since the device cannot share them: %s", error)
                return []
            raise
        self._kept.update(zip(numbers, made, strict=True))
        return [(column, number, 0) for column, number in zip(chosen, numbers, strict=True)]

    async def _make_room(self, nbytes: int) -> bool:
        """Copy the oldest columns to the node's memory until `nbytes` fit the budget. Returns whether they fit. A
        copied column counts towards the budget until no process maps it."""
        while self.used + nbytes > self._budget:
            longest = next((shard for shard in self._kept if shard not in self._landed), None)
            if longest is None:
                return False
            await self.land(longest)
        return True

    async def land(self, shard: int) -> None:
        """Copy a shard to the node's memory. Raises as `AsyncPlane.put`."""
        own = self._kept.get(shard)
        if own is None or shard in self._landed:
            return
        self._landed.add(shard)
        try:
            async with self._writer.reserved([own.size], _LAND_S) as places:
                ((number, memory),) = places
                await self._writer.run([partial(own.copy, memory)])
                asked = sm.Landed(self._connection.next_id(), shard, number)
                await self._connection.request(asked, m.Done, _LAND_S)
        except BaseException as error:  # tells the node, which may wait for the copy and can ask again
            self._landed.discard(shard)
            known = (
                error if isinstance(error, DataplaneError) else PeerUnavailable("the copy of the shard was given up")
            )
            with suppress(DataplaneError):
                self._connection.tell(sm.Stays(shard, *describe(known)))
            raise

    def _told(self, told: sm.Keeping) -> None:
        """Handle the node's message that a shard is needed in the node's memory, or is not needed any more."""
        if not told.land:
            self._forget(told.shard)
        elif told.shard not in self._landing:
            task = self._connection._loop.create_task(self._land(told.shard))  # the loop may not be running
            self._landing[told.shard] = task
            task.add_done_callback(lambda _: self._landing.pop(told.shard, None))

    async def _land(self, shard: int) -> None:
        with suppress(DataplaneError):  # `land` has reported the error to the node
            await self.land(shard)

    def _forget(self, shard: int, *, mapped: bool = False) -> None:
        own = self._kept.pop(shard, None)
        if own is not None:
            self._landed.discard(shard)
            self.used -= own.size
            own.close(mapped=mapped)

    async def aclose(self) -> None:
        """Copy all kept columns to the node's memory, within `_LAND_S`. Logs which shards are lost if that fails."""
        try:
            async with asyncio.timeout(_LAND_S):
                for shard in list(self._kept):
                    if shard in self._landing:
                        await self._landing[shard]
                    await self.land(shard)
        except (DataplaneError, TimeoutError) as error:
            lost = [shard for shard in self._kept if shard not in self._landed]
            if lost and not isinstance(error, PeerUnavailable):
                log.warning("shards %s are lost: copying them from the device to the node failed: %s", lost, error)
        begun = list(self._landing.values())
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        for shard in list(self._kept):  # lost ones, and landed ones that other processes may still map
            self._forget(shard, mapped=True)


def _are_tensors(values: Any) -> bool:
    first = values[0] if isinstance(values, list | tuple) and values else values
    return tensors.is_tensor(first)


def _memory_for(column: PlannedColumn) -> OwnHost | OwnDevice:
    return OwnHost(column.nbytes) if column.device is None else OwnDevice(column.nbytes, column.device)
