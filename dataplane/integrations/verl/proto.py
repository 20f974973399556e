"""`RemoteProto`: a verl DataProto whose columns are stored in the plane.

    proto = put(data)                          # in the worker that made it; `proto` pickles to a few hundred bytes
    proto = proto.repeat(8, interleave=True)   # in the controller: every operation of a DataProto, none moves bytes
    data = proto.get(["input_ids"])            # in the worker that uses it; without names, all columns

verl's dispatch and collect functions accept it as a DataProto: see `docs/decisions/0024`. Operations work on
references; `batch` and `non_tensor_batch` know their names, and read or put the columns that are accessed or assigned.
`meta_info` is carried unchanged, and as in verl one dict is shared by selections, slices and repetitions.

Invariants: as in verl, select, slice, chunk, split, repeat, concat return new protos, and union, pop, rename,
reorder, padding change the proto itself. Where verl asserts a condition on rows or columns, this raises Misuse or
SchemaMismatch; meta_info is merged by verl's own functions, which assert. A RemoteProto keeps nothing in place: its
rows stay until `free` or until their scope is freed.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto, union_two_dict

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.errors import Misuse, SchemaMismatch
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.verl.columns import SHARED, Kind, ProtoColumns, concatenated, load, sizes_of_chunks, store

log = logging.getLogger(__name__)


def put(
    proto: DataProto,
    plane: Plane | None = None,
    *,
    dedupe: Collection[str] = SHARED,
    scope: str | None = None,
    timeout: float = 60.0,
) -> RemoteProto:
    """Store the columns of a DataProto. Returns their RemoteProto; a RemoteProto is returned unchanged.

    dedupe: columns of which equal rows are stored once, if they exist.
    scope: a name under which they, and columns that are assigned later, are put, to be freed together.

    Raises SchemaMismatch for a value that MessagePack cannot represent, such as a lock, and as `Plane.put`.
    """
    if isinstance(proto, RemoteProto):
        return proto
    to, others = plane or plane_of_process(), proto.non_tensor_batch or {}
    columns = store(to, proto.batch, others, len(proto), dedupe=dedupe, scope=scope, timeout=timeout)
    return RemoteProto(columns, proto.meta_info, scope)


class StoredProto(DataProto):  # type: ignore[misc]  # verl has no types
    """The part of a RemoteProto that needs bytes: a DataProto whose columns are stored in the plane.

    Its length and its schema are known without a read. An operation of a DataProto that needs its bytes reads all of
    the DataProto, and then calls verl's own operation. `batch` and `non_tensor_batch` are mappings by name over stored
    columns (`View`): a column is read at an access, and put at an assignment, so code that uses a few small columns
    moves only those. A column that was read is a private copy: writing into it does not change the stored column,
    assigning a column does.
    """

    def __init__(self, columns: ProtoColumns, meta_info: dict[str, Any], scope: str | None = None) -> None:
        """Not for callers: `put` creates them."""
        self._columns = columns
        self._scope = scope
        self.meta_info = meta_info

    @property
    def ref(self) -> BatchRef | None:
        """The reference to all columns, for the plane's own calls; None if there is no column."""
        return self._columns.ref

    @property
    def scope(self) -> str | None:
        """The scope under which its columns were put, and later ones are."""
        return self._scope

    @property
    def batch(self) -> View | None:
        """The tensors, each read at its first access; None if there is no batch of tensors."""
        return View(self, tensors=True) if self._columns.tensors else None

    @property
    def non_tensor_batch(self) -> View:
        """The other columns, each read at its first access."""
        return View(self, tensors=False)

    def __len__(self) -> int:
        return self._columns.rows

    def get(
        self,
        columns: Sequence[str] | None = None,
        *,
        lazy: Collection[str] = (),
        plane: Plane | None = None,
        timeout: float = 60.0,
        device: Any = None,
    ) -> DataProto:
        """Read the DataProto: with all columns, or with these, tensors and others.

        lazy: columns of dicts whose rows are returned as `LazyRow`, which reads itself at its first access.
        device: the device of the tensors; `to(device)` reads them so.

        Raises as `Plane.get`.
        """
        chosen = self._columns if columns is None else self._columns.select(columns)
        batch, others = load(plane or plane_of_process(), chosen, lazy, timeout=timeout, device=device)
        return DataProto(batch=batch, non_tensor_batch=others, meta_info=self.meta_info)

    def free(self, plane: Plane | None = None) -> None:
        """Free its rows in its columns, for all references to them. Raises as `Plane.free`."""
        if self._columns.ref is not None:
            (plane or plane_of_process()).free(self._columns.ref)

    # read whole, and on as verl's own

    def to(self, device: Any) -> DataProto:
        return self.get(device=device).to(device)

    def to_tensordict(self) -> Any:
        return self.get().to_tensordict()

    def make_iterator(self, *args: Any, **kwargs: Any) -> Any:
        return self.get().make_iterator(*args, **kwargs)

    def unfold_column_chunks(self, *args: Any, **kwargs: Any) -> DataProto:
        return self.get().unfold_column_chunks(*args, **kwargs)

    def save_to_disk(self, filepath: Any) -> None:
        self.get().save_to_disk(filepath)

    def check_consistency(self) -> None:
        """Always consistent: its columns are of one reference."""

    def get_data_info(self) -> str:
        """Its columns with their kinds, one a line."""
        columns = {} if self.ref is None else self.ref.schema
        lines = [f"{name}: {field!r}" for name, field in columns.items()]
        return "\n".join([*lines, f"meta_info: {list(self.meta_info)}"])

    def print_size(self, prefix: str = "") -> None:
        """Log the bytes of its rows."""
        log.info("%s%s bytes", f"{prefix}, " if prefix else "", 0 if self.ref is None else self.ref.nbytes)

    # inside

    def _read(self, name: str) -> Any:
        read = self.get([name])
        return read.batch[name] if self._columns.kinds[name] == "tensor" else read.non_tensor_batch[name]


class View(MutableMapping[str, Any]):
    """The tensors of a proto, or all its other columns."""

    def __init__(self, proto: StoredProto, *, tensors: bool) -> None:
        self._proto = proto
        self._tensors = tensors

    @property
    def batch_size(self) -> torch.Size:
        """As that of a TensorDict."""
        return torch.Size([len(self._proto)])

    def __getitem__(self, name: str) -> Any:
        """The column, read. Raises KeyError if there is none; rows are selected from the proto before the read."""
        if name not in self:
            there = ", ".join(self) or "none"
            hint = "rows are picked of the proto itself: proto[rows]"
            raise KeyError(f"there is no column {name!r}, there are: {there}; {hint}")
        return self._proto._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Put the column. Raises SchemaMismatch if its number of rows differs."""
        rows = len(self._proto)
        if len(value) != rows:
            what = f"column {name!r} has {len(value)} rows, the proto {rows}"
            raise SchemaMismatch(what, column=name, expected=f"{rows} rows", found=f"{len(value)} rows")
        if name in self._proto._columns.names(tensors=not self._tensors):
            raise SchemaMismatch(f"column {name!r} is in batch and in non_tensor_batch: rename one", column=name)
        new: tuple[Any, Any] = ({name: value}, {}) if self._tensors else (None, {name: np.asarray(value)})
        stored = store(plane_of_process(), *new, len(value), dedupe=SHARED, scope=self._proto.scope)
        self._proto._columns = self._proto._columns.beside(stored)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._proto._columns = self._proto._columns.drop([name])

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        ref = self._proto.ref
        shown = [f"{name}: {ref.schema[name]!r}" for name in self._names()] if ref is not None else []
        return f"View({len(self._proto)} rows; {', '.join(shown)})"

    def _names(self) -> list[str]:
        return self._proto._columns.names(tensors=self._tensors)


class RemoteProto(StoredProto):
    """See the module. `len(proto)` rows."""

    def __eq__(self, other: object) -> bool:
        """Whether both refer to the same rows of the same stored columns, with equal meta_info."""
        if not isinstance(other, RemoteProto):
            return NotImplemented
        return self._columns == other._columns and self.meta_info == other.meta_info

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RemoteProto({len(self)} rows; {self._columns.ref!r}, meta_info={list(self.meta_info)})"

    def __reduce__(self) -> tuple[Callable[..., RemoteProto], tuple[Any, ...]]:
        ref, kinds = self._columns.ref, self._columns.kinds
        # of rows that were repeated or picked, a number each: repeated ones compress to almost nothing
        encoded = None if ref is None else zlib.compress(ref.encode(), 1)
        return _made, (encoded, kinds, len(self), self._columns.tensors, self.meta_info, self._scope)

    # rows

    def __getitem__(self, item: Any) -> Any:
        """The rows selected by a slice, or by a list, array or tensor of positions or flags. For one position, the
        DataProtoItem, read."""
        if isinstance(item, slice | list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = range(len(self))[item]
            return self.select_idxs(slice(row, row + 1)).get()[0]
        raise TypeError(f"Indexing with {type(item)} is not supported")

    def select_idxs(self, idxs: Any) -> RemoteProto:
        return self._with(self._columns.take(idxs))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> RemoteProto:
        return self.select_idxs(slice(start, end, step))

    def reorder(self, indices: Any) -> None:
        self._columns = self._columns.take(indices)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> RemoteProto:
        if interleave:
            return self._with(self._columns.repeat(repeat_times))
        return self._with(concatenated([self._columns] * repeat_times) if repeat_times else self._columns.repeat(0))

    def sample_level_repeat(self, repeat_times: Any) -> RemoteProto:
        times = np.asarray(repeat_times)
        if times.shape != (len(self),):
            raise Misuse(f"{len(self)} rows are repeated by a number each, not by {times.shape}")
        return self._with(self._columns.take(np.repeat(np.arange(len(self)), times)))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        row = 0 if padding_candidate == "first" else len(self) - 1
        self._columns = self._columns.take(np.append(np.arange(len(self)), np.full(padding_size, row, np.int64)))

    def chunk(self, chunks: int) -> list[RemoteProto]:
        padding = self.is_padding_enabled()
        sizes = sizes_of_chunks(len(self), chunks, tensors=self._columns.tensors, padding=padding)
        return [self._with(part) for part in self._columns.split(sizes)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> RemoteProto:
        """The rows of all, one proto after the other. A DataProto among them is put, under the scope of the first
        RemoteProto. `meta_info` is merged as by verl, metrics by key."""
        if not data:
            raise Misuse("there is nothing to concatenate: no proto was given")
        scope = next((proto._scope for proto in data if isinstance(proto, RemoteProto)), None)
        protos = [put(proto, scope=scope) for proto in data]
        # verl's own, of the meta_info alone
        merged = _concat_of_verl([DataProto(meta_info=proto.meta_info) for proto in protos])
        columns = concatenated([proto._columns for proto in protos])
        return RemoteProto(columns, merged.meta_info, scope)

    # columns

    def select(
        self,
        batch_keys: Collection[str] | None = None,
        non_tensor_batch_keys: Collection[str] | None = None,
        meta_info_keys: Collection[str] | None = None,
        deepcopy: bool = False,
    ) -> RemoteProto:
        tensors = self._columns.names(tensors=True) if batch_keys is None else list(dict.fromkeys(batch_keys))
        if batch_keys is not None:
            self._require(tensors, tensors=True)
        others = self._columns.names(tensors=False)
        if non_tensor_batch_keys is not None:
            others = [name for name in others if name in non_tensor_batch_keys]
        selected = self._with(self._columns.select([*tensors, *others]))
        # verl's own, of the meta_info alone
        meta = DataProto(meta_info=self.meta_info).select(meta_info_keys=meta_info_keys, deepcopy=deepcopy)
        selected.meta_info = meta.meta_info
        return selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> RemoteProto:
        self._require(batch_keys or (), tensors=True)
        self._require(non_tensor_batch_keys or (), tensors=False)
        names = [*(batch_keys or ()), *(non_tensor_batch_keys or ())]
        chosen = self._columns.select(names)
        self._columns = self._columns.drop(names)
        meta_info = {key: self.meta_info.pop(key) for key in meta_info_keys or ()}
        columns = ProtoColumns(chosen.ref, chosen.kinds, chosen.rows if names else 0, bool(batch_keys))
        return RemoteProto(columns, meta_info, self._scope)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> RemoteProto:
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ValueError(f"new_keys and old_keys must have the same length, but got {len(new)} and {len(old)}")
        self._require(old, tensors=True)
        self._columns = self._columns.rename(dict(zip(old, new, strict=True)))
        return self

    def union(self, other: DataProto) -> RemoteProto:
        """Add the columns of `other` to this proto. A column that both protos have must have equal rows: the two
        columns are read and compared unless they are the same stored rows. New columns of a DataProto are put."""
        names = [*_tensors(other), *other.non_tensor_batch]
        both = [name for name in names if name in self._columns.kinds]
        for name in both:
            self._require_same(name, other)
        # before the put, so that one that fails leaves nothing stored
        self._require_rows([name for name in names if name not in both], len(other))
        union_two_dict(dict(self.meta_info), other.meta_info)
        if isinstance(other, RemoteProto):
            more = other._columns.drop(both)
        else:
            tensors = None if other.batch is None else [name for name in _tensors(other) if name not in both]
            others = [name for name in other.non_tensor_batch if name not in both]
            more = put(other.select(tensors, others), scope=self._scope)._columns
        joined = self._columns.beside(more)
        self.meta_info = union_two_dict(self.meta_info, other.meta_info)
        self._columns = joined
        return self

    # inside

    def _with(self, columns: ProtoColumns) -> RemoteProto:
        return RemoteProto(columns, self.meta_info, self._scope)

    def _require(self, names: Collection[str], *, tensors: bool) -> None:
        there = self._columns.names(tensors=tensors)
        for name in names:
            if name not in there:
                which = "batch" if tensors else "non_tensor_batch"
                what = f"there is no column {name!r} in {which}; there are {', '.join(there) or 'none'}"
                raise SchemaMismatch(what, column=str(name), expected=f"one of {', '.join(there)}", found=repr(name))

    def _require_rows(self, new: Sequence[str], rows: int) -> None:
        """Raises SchemaMismatch if there are new columns, and they have another number of rows."""
        if new and (self._columns.tensors or self._columns.kinds) and rows != len(self):
            what = f"columns of {rows} rows do not fit beside {len(self)} rows"
            raise SchemaMismatch(what, column=new[0], expected=f"{len(self)} rows", found=f"{rows} rows")

    def _require_same(self, name: str, other: DataProto) -> None:
        """Raises SchemaMismatch if a column of both differs."""
        if isinstance(other, RemoteProto):
            mine, its = self._columns.select([name]), other._columns.select([name])
            if (mine.ref, mine.kinds) == (its.ref, its.kinds):
                return
            theirs = other._read(name) if len(other) == len(self) else None
        else:
            theirs = other.batch[name] if name in _tensors(other) else other.non_tensor_batch[name]
        if not same(self._read(name), theirs):
            raise SchemaMismatch(f"both have a column {name!r}, and they are not the same", column=name)


def _tensors(proto: DataProto) -> list[str]:
    return [] if proto.batch is None else list(proto.batch.keys())


def _made(
    encoded: bytes | None, kinds: dict[str, Kind], rows: int, tensors: bool, meta: dict[str, Any], scope: str | None
) -> RemoteProto:
    ref = None if encoded is None else BatchRef.decode(zlib.decompress(encoded))
    return RemoteProto(ProtoColumns(ref, kinds, rows, tensors), meta, scope)


_concat_of_verl = DataProto.concat


def _concat(data: Sequence[DataProto]) -> DataProto:
    """verl's DataProto.concat; ours if a RemoteProto is among them."""
    return RemoteProto.concat(data) if any(isinstance(each, RemoteProto) for each in data) else _concat_of_verl(data)


# verl concatenates results of non-blocking calls, and padding, by `DataProto.concat`, whatever their type: the one
# function of verl that is replaced, and only for RemoteProtos. See docs/decisions/0024.
DataProto.concat = staticmethod(_concat)


def same(a: Any, b: Any) -> bool:
    """Whether they are equal; lists, tuples, dicts and arrays of objects are compared recursively."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, np.ndarray):
        return _same_arrays(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and same(list(a.unbind()), list(b.unbind()))
    return bool(torch.equal(a, b))


def _same_arrays(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind == "O":
        return all(same(x, y) for x, y in zip(a.flat, b.flat, strict=True))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
