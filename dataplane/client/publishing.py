"""Writes one rank's part of a version of weights into the node's memory, as chunks of tensors.

A chunk is a separate shard with several tensors of together at most `CHUNK` bytes, or with one larger tensor. Hosts
exchange chunks, and versions share them. A rank that publishes the same tensors each time has each in the same chunk.
An unchanged chunk is then not written again. For a changed chunk, the difference to the older version is stored too, if
it has less than half the chunk's size.

Invariants: a publication that fails, is cancelled, or whose process dies has stored nothing. No thread writes any more
when it ends. Of an iterable of tensors, about `_TOGETHER` bytes, or one tensor, are in memory at a time.

Contiguous host memory is compared in place, and copied once. torch copies other strides and values on a device
directly to their place. Each rank publishes its local shard of a `DTensor`. A shard that several ranks have is
published by one of them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dataplane.batch import locations, tensors
from dataplane.batch.concat import concat
from dataplane.batch.dtypes import name_of, storage
from dataplane.batch.layout import ALIGNMENT, Bytes, ColumnLayout, ShardLayout, aligned
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import RowSource, dense
from dataplane.client.column_assembly import PinnedShard
from dataplane.client.connection import Connection
from dataplane.client.ownership import unstage
from dataplane.client.table_rows import ranges
from dataplane.client.tables import AsyncTable
from dataplane.client.writer import ShardWriter
from dataplane.clock import Deadline
from dataplane.device.ordering import as_called, noted
from dataplane.errors import Misuse, SchemaMismatch
from dataplane.table import requests as r
from dataplane.weights import deltas
from dataplane.weights.layout import COLUMN, FIELD, Base, PartLocation, PublishedPart, TensorSlice
from dataplane.weights.slices import Slice
from dataplane.wire import row_messages as rm

CHUNK = 16 << 20
"""The approximate size of a chunk in bytes."""

_TOGETHER = 256 << 20  # the bytes of tensors after which their chunks are stored
_HEAD = aligned(16)  # bytes before the tensors in a chunk's shard: two row offsets


@dataclass(slots=True)
class WrittenChunk:
    """A chunk that is being written. `sources`: the slices of tensors, with their offsets. `ref`: the stored chunk."""

    number: int
    nbytes: int = 0
    sources: list[tuple[int, Source]] = field(default_factory=list)
    ref: BatchRef | None = None

    def add(self, source: Source) -> int:
        """Add a slice. Returns its position."""
        start = self.nbytes
        self.sources.append((start, source))
        self.nbytes = aligned(start + source.nbytes)
        return start

    @property
    def width(self) -> int:
        """The size in bytes of most of its elements."""
        widths: Counter[int] = Counter()
        for _, source in self.sources:
            widths[min(source.width, 8)] += source.nbytes
        return widths.most_common(1)[0][0]

    def same(self, old: Bytes) -> bool:
        """Whether the chunk has the bytes `old`."""
        return all(source.same(old[start : start + source.nbytes]) for start, source in self.sources)

    def jobs(self, memory: Bytes) -> list[Callable[[], Any]]:
        """Write the padding between tensors to `memory`. Returns jobs that together write the rest: several for a large
        tensor, one for several small tensors."""
        for start, source in self.sources:
            end = start + source.nbytes
            memory[end : aligned(end)] = 0
        if len(self.sources) == 1:
            ((start, source),) = self.sources
            return source.jobs(memory[start : start + source.nbytes])

        def write() -> None:
            for start, source in self.sources:
                for job in source.jobs(memory[start : start + source.nbytes]):
                    job()

        return [write]


class Older:
    """The same rank's part of the previous version, with its chunks pinned on this publisher's host."""

    def __init__(self, part: PublishedPart, rows: BatchRef, held: Sequence[PinnedShard]) -> None:
        self.part = part
        self._rows = rows
        self._held = held
        self._pieces = locations.pieces(locations.unlinked(rows), COLUMN)

    def row(self, chunk: int) -> BatchRef:
        """The location of a chunk."""
        return self._rows[chunk]

    def base(self, chunk: int) -> Base:
        """The location of a chunk, as the base of a delta."""
        piece = self._pieces[chunk]
        return Base(self.part.version, piece.node, piece.shard)

    def bytes(self, chunk: WrittenChunk) -> Bytes | None:
        """The bytes of the older chunk with the same number; None if there is none of the same size."""
        number = chunk.number
        if number >= len(self.part.chunks) or self.part.chunks[number] != chunk.nbytes:
            return None
        held = self._held[number]
        offset, size = held.laid.layout.columns[0][1].buffers[1]
        return held.memory.read(offset, size) if size == chunk.nbytes else None


class Publication:
    """One rank's part of a version, from its first tensor to its rows in the table. `staged`: the scope of its shards,
    freed at the end of the block unless `give` has transferred them."""

    def __init__(self, connection: Connection, writer: ShardWriter, deadline: Deadline, older: Older | None) -> None:
        self._connection, self._writer, self._deadline = connection, writer, deadline
        self._older = older
        self.staged = f"{rm.STAGED}w{secrets.token_hex(8)}"  # drawn here, so that forked processes differ
        self._chunks: list[WrittenChunk] = []
        self._written = 0
        self._kept = False
        self.deltas: dict[int, BatchRef] = {}
        """By number of a chunk, the stored difference to the older version's chunk."""

    @property
    def refs(self) -> list[BatchRef]:
        """The stored chunks."""
        return [chunk.ref for chunk in self._chunks if chunk.ref is not None]

    def placement(self, layout: bytes) -> bytes:
        """The locations of the chunks of a part with this layout (`PartLocation`)."""
        refs = self.refs
        pieces = locations.pieces(locations.unlinked(concat(refs)), COLUMN) if refs else ()
        shards = np.array([piece.shard for piece in pieces], "<i8").tobytes()
        return PartLocation(layout, self._connection.welcome.node, shards).encode()

    async def give(self, table: AsyncTable, keys: list[str]) -> None:
        """Write a row of the table for each chunk and then for each difference, with these keys. The table then owns
        the staged shards. If several messages are needed, the last one transfers the ownership."""
        refs = [*self.refs, *self.deltas.values()]
        for start, stop in ranges(len(keys), keys, []) if keys else ():
            scope = self.staged if stop == len(keys) else ""
            write = r.Upsert(keys=keys[start:stop], ref=concat(refs[start:stop]).encode())
            await table.ask(write, r.RowNumbers, staged=scope)
        self._kept = True

    async def __aenter__(self) -> Publication:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._kept:
            unstage(self._connection, self.staged)

    async def write(self, tensors: Any) -> tuple[list[int], list[TensorSlice], dict[int, Base]]:
        """Write all tensors. Returns the bytes of each chunk, the layout of the tensors, and by chunk the base of each
        difference. Raises as `AsyncWeights.publish`."""
        entries: list[TensorSlice] = []
        names: set[str] = set()
        places: dict[Any, tuple[int, int]] = {}
        pending = 0
        streams = noted()
        async for name, value in _pairs(tensors, streams):
            with as_called(streams):
                source = source_of(name, value)
            if name in names:
                raise Misuse(f"the tensor {name!r} comes twice")
            names.add(name)
            if source is None:  # published by another rank
                continue
            place = places.get(source.tied) if source.tied is not None else None
            if place is None:
                place = self._place(source)
                pending += source.nbytes
                if source.tied is not None:
                    places[source.tied] = place
            entries.append(TensorSlice(name, source.dtype, source.shape, source.offsets, source.extent, *place))
            if pending >= _TOGETHER:
                await self._flush()
                pending = 0
                if not isinstance(tensors, dict):  # an iterable may reuse the memory of tensors that were written
                    places = {}
        if not names:
            raise Misuse("there is no tensor to publish")
        await self._flush()
        bases = {} if self._older is None else {chunk: self._older.base(chunk) for chunk in self.deltas}
        return [chunk.nbytes for chunk in self._chunks], entries, bases

    def _place(self, source: Source) -> tuple[int, int]:
        """The chunk for a tensor, and the offset in it; (-1, 0) for an empty tensor."""
        if not source.nbytes:
            return -1, 0
        last = self._chunks[-1] if len(self._chunks) > self._written else None
        if last is None or last.nbytes + source.nbytes > CHUNK:
            last = WrittenChunk(len(self._chunks))
            self._chunks.append(last)
        return len(self._chunks) - 1, last.add(source)

    async def _flush(self) -> None:
        """Store the chunks that are not stored yet."""
        chunks = self._chunks[self._written :]
        self._written = len(self._chunks)
        old = {chunk.number: self._older.bytes(chunk) for chunk in chunks} if self._older is not None else {}

        def compare(chunk: WrittenChunk) -> None:
            before = old.get(chunk.number)
            if before is not None and self._older is not None and chunk.same(before):
                chunk.ref = self._older.row(chunk.number)

        await self._writer.run([partial(compare, chunk) for chunk in chunks if old.get(chunk.number) is not None])
        changed = [chunk for chunk in chunks if chunk.ref is None]
        if changed:
            await self._write(changed, old)
        for chunk in chunks:
            chunk.sources = []

    async def _write(self, chunks: Sequence[WrittenChunk], old: Mapping[int, Bytes | None]) -> None:
        """Write chunks, and their differences to the older chunks in `old`."""
        found: dict[int, bytes] = {}

        def differ(chunk: WrittenChunk, memory: Bytes, before: Bytes) -> None:
            if deltas.worth(before, memory, chunk.width):
                delta = deltas.encode(before, memory, chunk.width, chunk.nbytes // 2)
                if delta is not None:
                    found[chunk.number] = delta

        async with self._reserved([chunk.nbytes for chunk in chunks]) as places:
            pairs = [(chunk, memory) for chunk, (_, memory) in zip(chunks, places, strict=True)]
            await self._writer.run([job for chunk, memory in pairs for job in chunk.jobs(memory)])
            known = [
                (chunk, memory, before) for chunk, memory in pairs if (before := old.get(chunk.number)) is not None
            ]
            await self._writer.run([partial(differ, *each) for each in known])
            async with self._reserved([len(delta) for delta in found.values()]) as more:
                for delta, (_, memory) in zip(found.values(), more, strict=True):
                    memory[:] = np.frombuffer(delta, np.uint8)
                made = [(shard, len(memory)) for shard, memory in [*places, *more]]
                sealed = [(shard, _layout(size)) for shard, size in made]
                await self._writer.seal(sealed, self.staged, self._deadline.remaining_s)
        node = self._connection.welcome.node
        refs = [ref_to(node, 1, [(COLUMN, FIELD, size, shard, 0)]) for shard, size in made]
        for chunk, ref in zip(chunks, refs, strict=False):
            chunk.ref = ref
        self.deltas |= dict(zip(found, refs[len(chunks) :], strict=True))

    @asynccontextmanager
    async def _reserved(self, sizes: Sequence[int]) -> AsyncIterator[list[tuple[int, Bytes]]]:
        """As `ShardWriter.reserved`, for shards of one row of these sizes in bytes, with the memory of the row."""
        if not sizes:
            yield []
            return
        whole = [_HEAD + aligned(size) for size in sizes]
        async with self._writer.reserved(whole, self._deadline.remaining_s) as places:
            for size, (_, memory) in zip(sizes, places, strict=True):
                memory[:16].view(np.int64)[:] = (0, size)
            yield [(shard, memory[_HEAD : _HEAD + size]) for size, (shard, memory) in zip(sizes, places, strict=True)]


def _layout(nbytes: int) -> bytes:
    return ShardLayout(((COLUMN, ColumnLayout(FIELD, 1, 1, ((0, 16), (_HEAD, nbytes)))),)).encode()


async def _pairs(tensors: Any, streams: Sequence[Any]) -> AsyncIterator[tuple[str, Any]]:
    """Iterate over the names and tensors of a publisher. The user's iterator runs on these CUDA streams. Raises
    Misuse."""
    if hasattr(tensors, "__aiter__"):
        async for pair in tensors:
            yield _pair(pair)
        return
    if not hasattr(tensors, "__iter__"):
        raise Misuse(f"weights are a mapping of names to tensors, or (name, tensor) one by one, not {tensors!r:.100}")
    pairs, end = iter(tensors.items() if isinstance(tensors, Mapping) else tensors), object()
    while True:
        with as_called(streams):
            pair = next(pairs, end)
        if pair is end:
            return
        yield _pair(pair)


def _pair(pair: Any) -> tuple[str, Any]:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
        raise Misuse(f"weights are given as (name, tensor), not {pair!r:.100}")
    return pair[0], pair[1]


assert ALIGNMENT % 16 == 0  # the bytes of complex128, the widest dtype


_PIECE, _COMPARED = 16 << 20, 1 << 20  # bytes of a job, and of a step of a comparison


class Source:
    """A slice of a tensor to publish. `data`: its elements, as one row. `tied`: the identity of its memory, equal for
    tensors that share memory; None if unknown."""

    __slots__ = ("_data", "dtype", "extent", "nbytes", "offsets", "shape", "tied")

    def __init__(
        self, data: RowSource, extent: Any, dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...], tied: Hashable
    ) -> None:
        self._data = data
        self.dtype = dtype
        self.extent = tuple(int(size) for size in extent)
        self.shape, self.offsets = shape, offsets
        self.nbytes = data.nbytes
        self.tied = (tied, shape, offsets) if tied is not None and self.nbytes else None

    def jobs(self, memory: Any) -> list[Callable[[], Any]]:
        """The jobs that together write it into `memory`, of `nbytes` bytes."""
        return list(self._data.jobs(memory, _PIECE)) if self.nbytes else []

    def same(self, memory: Any) -> bool:
        """Whether `memory`, of `nbytes` bytes, has the bytes of the slice; False if comparing would need a copy."""
        if not self._data.in_place:
            return False
        flat, starts = self._data.run(), range(0, self.nbytes, _COMPARED)
        return all(_equal(flat[start : start + _COMPARED], memory[start : start + _COMPARED]) for start in starts)

    @property
    def width(self) -> int:
        """The bytes of an element."""
        return storage(self.dtype).itemsize


def _equal(one: Any, other: Any) -> bool:
    words = len(one) // 8 * 8
    same = np.array_equal(one[:words].view(np.uint64), other[:words].view(np.uint64))
    return same and np.array_equal(one[words:], other[words:])


def source_of(name: str, value: Any) -> Source | None:
    """The slice to publish for a value; None if another rank publishes it. Raises SchemaMismatch."""
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        placed = _local(name, value)
        if placed is None:
            return None
        value = placed
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    if isinstance(value, Slice):
        shape, offsets, value = value.shape, value.offsets, value.tensor
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        value = value.astype(value.dtype.newbyteorder("="), copy=False)
        dtype, tied = name_of(value.dtype), None
    elif tensors.is_tensor(value):
        value, dtype, tied = _plain(name, value)
    else:
        raise _refused(name, f"a tensor or an array, not {type(value).__name__}")
    try:
        storage(dtype or "")
    except ValueError:
        raise _refused(name, f"of a dtype that travels, not {value.dtype}") from None
    own = tuple(int(size) for size in value.shape)
    data = (dense if isinstance(value, np.ndarray) else tensors.values_of)(name, value[None]).data
    assert data is not None, "numbers have data"
    return Source(data, own, str(dtype), shape or own, offsets or (0,) * len(own), tied)


def _plain(name: str, value: Any) -> tuple[Any, str, Hashable]:
    """A tensor without gradients and lazy conjugation or negation; its dtype; the identity of its memory."""
    value, dtype = tensors.plain(name, value)
    value = value.detach()
    return value, dtype, (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def _local(name: str, value: Any) -> Slice | None:
    """The shard of a `DTensor` to publish; None if another rank publishes it. Raises SchemaMismatch."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for at, placement in zip(coordinate, value.placements, strict=True):
        if placement.is_partial():
            raise _refused(name, f"a DTensor without partial sums, not {value.placements}: redistribute it")
        if isinstance(placement, Replicate) and at:
            return None
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    local = value.to_local()
    if not local.numel():
        offsets = (0,) * value.ndim
    return Slice(local, tuple(value.shape), tuple(offsets))


def _refused(name: str, expected: str) -> SchemaMismatch:
    return SchemaMismatch(f"{name!r} is to be {expected}", column=name, expected=expected)
