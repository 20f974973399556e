"""Drafts: columns that the caller writes directly into shared memory, and seals in place.

A draft is one shard, in a separate memory mapping.

Invariants: no other process sees a draft before it is sealed. Sealing makes the mapping private and copy-on-write, at
the same addresses. Existing arrays can still be read, writes to them are private, and they keep the shard pinned, as
the result of a get does. A draft that is dropped, or whose block is left by an exception, releases its memory. So does
the garbage collection of an unsealed draft, once its last array is collected too.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.batch.dtypes import storage
from dataplane.batch.field import Field, is_text
from dataplane.batch.layout import ColumnLayout, ShardLayout, aligned, buffer_sizes
from dataplane.batch.locations import ref_to
from dataplane.batch.put_plan import check_counts
from dataplane.batch.ref import BatchRef
from dataplane.client.connection import Connection
from dataplane.client.memory import Mapping as MemoryMapping
from dataplane.client.ownership import discard
from dataplane.errors import Closed, SchemaMismatch
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm

_MOST_BYTES = 1 << 62  # the most bytes that a message can ask for; the node's limits are lower


@dataclass(frozen=True, slots=True)
class Spec:
    """The specification of a column of a draft: its field, the number of rows, and for a ragged column the length of
    each row."""

    field: Field
    rows: int
    lengths: tuple[int, ...] | None = None


def dense(shape: Sequence[int], dtype: Any) -> Spec:
    """A dense column of a draft: `shape` is [rows, ...], `dtype` a NumPy or torch dtype or the name of one.

    Raises SchemaMismatch for an invalid shape or dtype.
    """
    rows, *rest = _sizes(shape, "a dense column's shape is [rows, ...]")
    return Spec(Field("dense", _dtype_name(dtype), tuple(rest)), rows)


def ragged(lengths: Sequence[int], shape: Sequence[int], dtype: Any) -> Spec:
    """A ragged column of a draft: row i is [lengths[i], *shape].

    Raises SchemaMismatch for invalid lengths, shape or dtype.
    """
    sizes = _sizes(lengths, "a ragged column's lengths are one a row")
    item = _sizes(shape, "the shape of a ragged column's items is that of one", least=0)
    return Spec(Field("ragged", _dtype_name(dtype), (None, *item)), len(sizes), sizes)


def _require_spec(name: Any, spec: Any) -> None:
    if not name or not is_text(name):
        raise SchemaMismatch(
            f"a column's name is text of one character or more, not {name!r}", expected="a name", found=repr(name)
        )
    if not isinstance(spec, Spec):
        raise SchemaMismatch(
            f"column {name!r} of a draft is described by dataplane.dense or dataplane.ragged; put() takes values",
            column=name,
            expected="dense(...) or ragged(...)",
            found=type(spec).__name__,
        )


def _sizes(values: Any, what: str, least: int = 1) -> tuple[int, ...]:
    """The values as at least `least` non-negative integers. Raises SchemaMismatch, whose text begins with `what`."""
    try:
        sizes = tuple(operator.index(value) for value in values)
    except TypeError:
        sizes = (-1,)
    if len(sizes) < least or min(sizes, default=0) < 0:
        raise SchemaMismatch(f"{what}, whole numbers, none negative; not {values!r}", found=repr(values))
    return sizes


def _dtype_name(dtype: Any) -> str:
    spelled = str(dtype)
    name = spelled.removeprefix("torch.")
    try:
        if not isinstance(dtype, str) and name == spelled:
            name = np.dtype(dtype).name
        storage(name)
    except (TypeError, ValueError):
        what = "a draft has columns of numbers, with a dtype such as 'float32', 'int64' or 'bool'"
        raise SchemaMismatch(
            f"{what}, not {dtype!r}; put() takes other values", expected="a dtype", found=name
        ) from None
    return name


class Draft:
    """Unsealed columns. `draft[name]` is a writable NumPy array; for a ragged column, a list with an array for each
    row. The end of a `with` block drops an unsealed draft."""

    def __init__(
        self,
        connection: Connection,
        specs: Mapping[str, Spec],
        layouts: Sequence[tuple[str, ColumnLayout]],
        place: tuple[int, int, int],
        scope: str,
    ) -> None:
        self._connection = connection
        self._specs = dict(specs)
        self._layouts = tuple(layouts)
        self._shard, segment, self._offset = place
        self._scope = scope
        self._segment = connection.segments[segment]
        self._size = max((o + n for _, layout in layouts for o, n in layout.buffers), default=0)
        self._mapping: MemoryMapping | None = self._segment.shared(self._offset, max(1, self._size))
        connection.unsealed[self._mapping] = self._segment, self._offset
        self._keeps: list[Any] = []  # objects that the arrays keep alive; `seal` adds the pin
        self._open = True
        self._write_offsets()
        self._abandoned = weakref.finalize(self._mapping, connection.abandoned, self._shard)
        self._abandoned.atexit = False

    @classmethod
    async def open(cls, connection: Connection, specs: Mapping[str, Spec], scope: str, timeout: float) -> Draft:
        """Reserve room for the columns. Raises as `AsyncPlane.draft`."""
        if not isinstance(specs, Mapping):
            raise SchemaMismatch(f"a draft is described by a mapping of names, not {type(specs).__name__}")
        for name, spec in specs.items():
            _require_spec(name, spec)
        layouts, base = [], 0
        rows = check_counts([(name, spec.rows) for name, spec in specs.items()]) if specs else 0
        for name, spec in specs.items():
            layout, base = _layout(spec, base)
            layouts.append((name, layout))
        if not rows or not base:
            raise SchemaMismatch("a draft has at least one column, one row and one value; put() stores empty batches")
        request = sm.Reserve(connection.next_id(), [min(base, _MOST_BYTES)], timeout)
        reserved = await connection.request(request, sm.Reserved, timeout)
        connection.heartbeat.due(+1)
        shard, segment, offset, _ = reserved.extents[0]
        try:
            return cls(connection, specs, layouts, (shard, segment, offset), scope)
        except BaseException:
            connection.tell(sm.Abort([shard]))
            connection.heartbeat.due(-1)
            raise

    def _write_offsets(self) -> None:
        for name, layout in self._layouts:
            lengths = self._specs[name].lengths
            if lengths is not None:
                offsets = self._array(*layout.buffers[0]).view(np.int64)
                offsets[0] = 0
                np.cumsum(lengths, out=offsets[1:])

    def _array(self, offset: int, nbytes: int) -> Any:
        if self._mapping is None:
            raise Closed("the draft was sealed or dropped: get() the reference that seal() returned")
        return self._mapping.array(offset, nbytes, self._keeps)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __getitem__(self, name: str) -> Any:
        """The column's memory: [rows, ...] for a dense column, a list of arrays [length, ...] for a ragged one.

        A dtype that NumPy lacks (bfloat16, float8) is exposed as unsigned integers with the same bits; `torch(name)`
        has the real dtype. Raises SchemaMismatch if there is no such column, Closed if the draft was sealed or dropped.
        """
        if name not in self._specs:
            raise SchemaMismatch(f"the draft has no column {name!r}; it has {', '.join(self._specs)}", column=name)
        spec, layout = self._specs[name], dict(self._layouts)[name]
        dtype = storage(spec.field.dtype)
        if spec.lengths is None:
            return self._array(*layout.buffers[0]).view(dtype).reshape(spec.rows, *spec.field.shape)
        values = self._array(*layout.buffers[1]).view(dtype).reshape(sum(spec.lengths), *spec.field.shape[1:])
        return np.split(values, np.cumsum(spec.lengths)[:-1]) if spec.lengths else []

    def torch(self, name: str) -> Any:
        """The column's memory as a torch tensor, or a list of tensors for a ragged column. Raises as `draft[name]`."""
        import torch

        arrays = self[name]
        dtype = getattr(torch, self._specs[name].field.dtype)
        if isinstance(arrays, list):
            return [torch.from_numpy(array).view(dtype) for array in arrays]
        return torch.from_numpy(arrays).view(dtype)

    async def seal(self) -> BatchRef:
        """Make the columns immutable and visible to other processes. Returns a reference to them. Later writes to
        arrays of the draft stay private to this process. Raises LeaseExpired, PeerUnavailable, and Closed if the draft
        was sealed or dropped before."""
        self._connection.check()
        if not self._open or self._mapping is None:
            raise Closed("the draft was sealed or dropped before")
        self._unshare(self._mapping)
        self._open = False
        try:
            layout = ShardLayout(self._layouts).encode()
            request = sm.SealShards(self._connection.next_id(), [(self._shard, layout)], self._scope, True)
            await self._connection.request(request, m.Done, 0.0)
        except BaseException:
            discard(self._connection, [self._shard])
            raise
        finally:
            self._connection.heartbeat.due(-1)
        self._keeps.append(self._connection.pins.hold(self._shard))
        self._mapping, self._keeps = None, []
        columns = [
            (name, layout.field, layout.buffers[-1][1], self._shard, ordinal)
            for ordinal, (name, layout) in enumerate(self._layouts)
        ]
        rows = next(iter(self._specs.values())).rows
        return ref_to(self._connection.welcome.node, rows, columns)

    def drop(self) -> None:
        """Release the memory of an unsealed draft. Its arrays must not be used any more. Idempotent."""
        if self._open:
            if self._mapping is not None:  # the memory must not be given back while the mapping is shared
                self._unshare(self._mapping)
                self._mapping = None
            self._open = False
            self._connection.tell(sm.Abort([self._shard]))
            self._connection.heartbeat.due(-1)

    def _unshare(self, mapping: MemoryMapping) -> None:
        self._segment.unshare(mapping, self._offset)
        self._abandoned.detach()
        self._connection.unsealed.pop(mapping, None)

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child of the process that opened the draft."""
        return self._connection.in_child

    async def __aenter__(self) -> Draft:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not self._connection.in_child:
            warnings.warn("a draft was neither sealed nor dropped", ResourceWarning, stacklevel=2, source=self)


def _layout(spec: Spec, base: int) -> tuple[ColumnLayout, int]:
    """Place the column's buffers from the offset `base` on. Returns the layout, and the offset of the next column."""
    values, buffers = sum(spec.lengths or ()) * spec.field.item_nbytes, []
    for size in buffer_sizes(spec.field, spec.rows, spec.rows, indexed=False):
        buffers.append((base, values if size is None else size))
        base += aligned(buffers[-1][1])
    return ColumnLayout(spec.field, spec.rows, spec.rows, tuple(buffers)), base
