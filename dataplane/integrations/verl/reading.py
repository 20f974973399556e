"""`StoredProto`: the part of a RemoteProto that needs bytes: reads columns, and puts those that are assigned.

This is the base class of RemoteProto. An operation of a DataProto that needs its bytes reads all of the DataProto, and
then calls verl's own operation. `batch` and `non_tensor_batch` are mappings by name over stored columns (`View`): a
column is read at an access, and put at an assignment, so code that uses a few small columns moves only those. A column
that was read is a private copy: writing into it does not change the stored column, assigning a column does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.errors import SchemaMismatch
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.verl.columns import SHARED, ProtoColumns, load, store

log = logging.getLogger(__name__)


class StoredProto(DataProto):  # type: ignore[misc]  # verl has no types
    """A DataProto whose columns are stored in the plane. Its length and its schema are known without a read."""

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
        return self._view(tensors=True) if self._columns.tensors else None

    @property
    def non_tensor_batch(self) -> View:
        """The other columns, each read at its first access."""
        return self._view(tensors=False)

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
        """The DataProto: with all columns, or with these, tensors and others.

        lazy: columns of dicts whose rows are returned as `LazyRow`, which reads itself at its first access.
        device: the device of the tensors; `to(device)` reads them so.

        Raises as `Plane.get`.
        """
        chosen = self._columns if columns is None else self._columns.select(columns)
        batch, others = load(plane or plane_of_process(), chosen, lazy, timeout=timeout, device=device)
        return DataProto(batch=batch, non_tensor_batch=others, meta_info=self.meta_info)

    def free(self, plane: Plane | None = None) -> None:
        """Free its rows in its columns, for all references to them."""
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

    def _view(self, *, tensors: bool) -> View:
        return View(
            tensors,
            lambda: self._columns,
            self._read,
            lambda name, value: self._write(name, value, tensors),
            self._drop,
        )

    def _read(self, name: str) -> Any:
        read = self.get([name])
        return read.batch[name] if self._columns.kinds[name] == "tensor" else read.non_tensor_batch[name]

    def _write(self, name: str, value: Any, tensors: bool) -> None:
        if name in self._columns.names(tensors=not tensors):
            raise SchemaMismatch(f"column {name!r} is in batch and in non_tensor_batch: rename one", column=name)
        new: tuple[Any, Any] = ({name: value}, {}) if tensors else (None, {name: np.asarray(value)})
        stored = store(plane_of_process(), *new, len(value), dedupe=SHARED, scope=self._scope)
        self._columns = self._columns.beside(stored)

    def _drop(self, name: str) -> None:
        self._columns = self._columns.drop([name])


Read = Callable[[str], Any]
Write = Callable[[str, Any], None]
Drop = Callable[[str], None]


class View(MutableMapping[str, Any]):
    """The tensors of a proto, or all its other columns. `columns` returns the current ones."""

    def __init__(
        self, tensors: bool, columns: Callable[[], ProtoColumns], read: Read, write: Write, drop: Drop
    ) -> None:
        self._tensors = tensors
        self._columns = columns
        self._read = read
        self._write = write
        self._drop = drop

    @property
    def batch_size(self) -> torch.Size:
        """As that of a TensorDict."""
        return torch.Size([self._columns().rows])

    def __getitem__(self, name: str) -> Any:
        """The column, read. Raises KeyError if there is none; rows are selected from the proto before the read."""
        if name not in self:
            there = ", ".join(self) or "none"
            hint = "rows are picked of the proto itself: proto[rows]"
            raise KeyError(f"there is no column {name!r}, there are: {there}; {hint}")
        return self._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Put the column. Raises SchemaMismatch if its number of rows differs."""
        rows = self._columns().rows
        if len(value) != rows:
            what = f"column {name!r} has {len(value)} rows, the proto {rows}"
            raise SchemaMismatch(what, column=name, expected=f"{rows} rows", found=f"{len(value)} rows")
        self._write(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._drop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        """The number of columns."""
        return len(self._names())

    def __repr__(self) -> str:
        ref = self._columns().ref
        shown = {name: ref.schema[name] for name in self._names()} if ref is not None else {}
        return f"View({self._columns().rows} rows; {', '.join(f'{name}: {field!r}' for name, field in shown.items())})"

    def _names(self) -> list[str]:
        return self._columns().names(tensors=self._tensors)
