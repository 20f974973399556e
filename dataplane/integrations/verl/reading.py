"""`Reading`: the part of a RemoteProto that needs bytes: reads columns, and puts those that are assigned.

The base class of RemoteProto. An operation of a DataProto that needs its bytes reads all of it, and continues as
verl's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from verl.protocol import DataProto

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.errors import SchemaMismatch
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.verl.columns import Columns
from dataplane.integrations.verl.proto_columns import SHARED, load, store
from dataplane.integrations.verl.views import View

log = logging.getLogger(__name__)


class Reading(DataProto):  # type: ignore[misc]  # verl has no types
    """A DataProto whose columns are stored in the plane. `len()` rows; schema and length are known without a read."""

    def __init__(self, columns: Columns, meta_info: dict[str, Any], scope: str | None = None) -> None:
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
