"""`proto.batch` and `proto.non_tensor_batch` of a RemoteProto: mappings by name, over columns that are not here.

Names, the number of rows and whether there is a column are known here. A column is read when it is asked for, and put
when it is assigned: code that looks into a few small columns, as a trainer that computes advantages does, runs
unchanged and moves those. What is read is a private copy: writing into it changes nothing, assigning does.
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
    """The tensors of a proto, or all its other columns: `columns` says what there is now."""

    def __init__(self, tensors: bool, columns: Callable[[], Columns], read: Read, write: Write, drop: Drop) -> None:
        self._tensors = tensors
        self._columns = columns
        self._read = read
        self._write = write
        self._drop = drop

    @property
    def batch_size(self) -> torch.Size:
        """As a TensorDict's."""
        return torch.Size([self._columns().rows])

    def __getitem__(self, name: str) -> Any:
        """The column, read. KeyError where there is none; rows are picked of the proto, before it is read."""
        if name not in self:
            there = ", ".join(self) or "none"
            hint = "rows are picked of the proto itself: proto[rows]"
            raise KeyError(f"there is no column {name!r}, there are: {there}; {hint}")
        return self._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Put it. Raises SchemaMismatch where it is of other rows."""
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
        """How many columns."""
        return len(self._names())

    def __repr__(self) -> str:
        ref = self._columns().ref
        shown = {name: ref.schema[name] for name in self._names()} if ref is not None else {}
        return f"View({self._columns().rows} rows; {', '.join(f'{name}: {field!r}' for name, field in shown.items())})"

    def _names(self) -> list[str]:
        return self._columns().names(tensors=self._tensors)
