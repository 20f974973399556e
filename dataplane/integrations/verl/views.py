"""`proto.batch` and `proto.non_tensor_batch` of a RemoteProto: mappings by name, over stored columns.

Names, the number of rows and the existence of columns are known without a read. A column is read at an access, and
put at an assignment: code that uses a few small columns, as a trainer that computes advantages, runs unchanged and
moves only those. A column that was read is a private copy: a write to it changes nothing, an assignment does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from dataplane.errors import SchemaMismatch
from dataplane.integrations.verl.columns import Columns

Read = Callable[[str], Any]
Write = Callable[[str, Any], None]
Drop = Callable[[str], None]


class View(MutableMapping[str, Any]):
    """The tensors of a proto, or all its other columns. `columns` returns the current ones."""

    def __init__(self, tensors: bool, columns: Callable[[], Columns], read: Read, write: Write, drop: Drop) -> None:
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
