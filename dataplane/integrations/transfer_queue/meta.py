"""`BatchMeta`: rows by their global indexes, with what is known of their fields.

A value of plain Python and one NumPy array, picklable. Its lists are its own; what they hold of the caller's is copied
where a part of it is taken. A row's key goes with it, under a name of its own, so that a put needs no look-up.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.integrations.transfer_queue.shares import copied, merged, sizes

Schema = dict[str, dict[str, Any]]

KEY = "_key"
"""Where a row's key is, in what goes with the row."""


class Sample:
    """One row of a `BatchMeta`, read only."""

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: BatchMeta, row: int) -> None:
        self._batch = batch
        self._row = row

    @property
    def global_index(self) -> int:
        """Its global index."""
        return self._batch.global_indexes[self._row]

    @property
    def partition_id(self) -> str:
        """Its partition."""
        return self._batch.partition_ids[self._row]

    @property
    def production_status(self) -> int:
        """1 where all fields that were asked for have been put."""
        return int(self._batch.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """Its tags."""
        return MappingProxyType(self._batch.custom_meta[self._row])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """What is known of each field; `shape` is that of this row."""
        found = {}
        for name, known in self._batch.field_schema.items():
            own = {what: value for what, value in known.items() if what != "per_sample_shapes"}
            if known.get("per_sample_shapes") is not None:
                own["shape"] = known["per_sample_shapes"][self._row]
            found[name] = MappingProxyType(own)
        return MappingProxyType(found)


class Samples(Sequence[Sample]):
    """The rows of a `BatchMeta`, each made when it is asked for."""

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [Sample(self._batch, i) for i in range(len(self))[row]]
        return Sample(self._batch, range(len(self))[row])


class BatchMeta:
    """global_indexes and partition_ids: one each a row. field_schema: by field, `dtype`, `shape` of a row (None where
    rows differ), `is_nested`, `is_non_tensor`, and where they are known `per_sample_shapes`. production_status: int8,
    one a row. custom_meta: the tags, a dict a row.

    Raises ValueError where they are not of equal length.
    """

    def __init__(
        self,
        global_indexes: Sequence[int] = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: npt.ArrayLike | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        rows = len(global_indexes)
        status = np.zeros(rows, np.int8) if production_status is None else np.array(production_status, np.int8)
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: Schema = {name: dict(known) for name, known in (field_schema or {}).items()}
        self.production_status = status
        self.extra_info: dict[str, Any] = dict(extra_info or {})
        self.custom_meta: list[dict[str, Any]] = [dict(each) for each in custom_meta or [{}] * rows]
        self._custom_backend_meta: list[dict[str, Any]] = [dict(each) for each in _custom_backend_meta or [{}] * rows]
        for what in ("partition_ids", "production_status", "custom_meta", "_custom_backend_meta"):
            _same_length(what, len(getattr(self, what)), rows)
        for name, known in self.field_schema.items():
            if known.get("per_sample_shapes") is not None:
                _same_length(f"per_sample_shapes of {name!r}", len(known["per_sample_shapes"]), rows)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.production_status.flags.writeable:  # Ray gives arrays that lie in its store
            self.production_status = self.production_status.copy()

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """The fields, sorted."""
        return sorted(self.field_schema)

    @property
    def samples(self) -> Samples:
        """The rows."""
        return Samples(self)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all have all fields."""
        return bool(len(self) and (self.production_status == 1).all())

    @property
    def keys(self) -> list[str] | None:
        """The rows' keys where they go with them, None where not: this was made by somebody else's code."""
        keys = [each.get(KEY) for each in self._custom_backend_meta]
        return None if None in keys else [str(key) for key in keys]

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready},"
            f" global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    # Fields

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The field's dtype, once a row. Raises KeyError."""
        return [self._known(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of each row's value; None where it is not known here. Raises KeyError."""
        known = self._known(field_name)
        shapes = known.get("per_sample_shapes")
        return [known.get("shape")] * self.size if shapes is None else list(shapes)

    def _known(self, field_name: str) -> dict[str, Any]:
        if field_name not in self.field_schema:
            raise KeyError(f"there is no field {field_name!r}; there are {', '.join(self.field_names)}")
        return self.field_schema[field_name]

    def add_fields(self, tensor_dict: Any, set_all_ready: bool = True) -> BatchMeta:
        """Know of the fields of a TensorDict of as many rows, in place. Raises ValueError for another number."""
        from dataplane.integrations.transfer_queue.values import schema_of

        rows = int(tensor_dict.batch_size[0])
        if not rows:
            return self
        _same_length("the TensorDict", rows, self.size)
        self.field_schema.update(schema_of(tensor_dict))
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """With these fields alone, as far as they are known."""
        chosen = {name: self.field_schema[name] for name in field_names if name in self.field_schema}
        return self._with(
            field_schema=copy.deepcopy(chosen),
            _custom_backend_meta=[
                {name: value for name, value in each.items() if name.startswith("_") or name in field_names}
                for each in self._custom_backend_meta
            ],
        )

    # Information that goes with the batch, and with each row

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """What goes with the batch under this name."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Let this go with the batch."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A copy of all that goes with the batch."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Let all of these go with the batch."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Take it away; what it was."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Take all away."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether something goes with the batch under this name."""
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A copy of the rows' tags."""
        return copied(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Add to each row's tags, here; `set_custom_meta` of the client tells the others. Raises ValueError."""
        if custom_meta is None:
            return
        _same_length("custom_meta", len(custom_meta), self.size)
        for own, more in zip(self.custom_meta, custom_meta, strict=True):
            own.update(more)

    def clear_custom_meta(self) -> None:
        """Take the rows' tags away, here."""
        self.custom_meta = [{} for _ in range(self.size)]

    # Rows

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """The rows at these positions. Raises ValueError for one that is not there."""
        rows = [int(i) for i in sample_indices]
        if any(not 0 <= i < self.size for i in rows):
            raise ValueError(f"rows are named from 0 to {self.size - 1}, not {sample_indices}")
        return BatchMeta(
            [self.global_indexes[i] for i in rows],
            [self.partition_ids[i] for i in rows],
            {name: _shapes_taken(known, rows) for name, known in self.field_schema.items()},
            self.production_status[rows],
            self.extra_info,
            copied([self.custom_meta[i] for i in rows]),
            [dict(self._custom_backend_meta[i]) for i in rows],
        )

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(range(self.size)[item])
        if isinstance(item, int | np.integer):
            return self.select_samples([range(self.size)[int(item)]])
        raise TypeError(f"a row is named by its number, or several by a slice; not {type(item).__name__}")

    def __iter__(self) -> Iterator[BatchMeta]:
        return (self.select_samples([i]) for i in range(self.size))

    def copy(self) -> BatchMeta:
        """A copy of all of it."""
        return self._with()

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """So many consecutive parts; the first are one row longer where it does not come out even."""
        return [self.select_samples(range(start, stop)) for start, stop in sizes(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """The rows of each partition."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, name in enumerate(self.partition_ids):
            places[name].append(place)
        return [self.select_samples(rows) for rows in places.values()]

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the rows into this order, in place. Raises ValueError where it is none of all rows."""
        _same_length("the order", len(indices), self.size)
        if sorted(indices) != list(range(self.size)):
            raise ValueError(f"an order names each of the rows 0 to {self.size - 1} once, not {indices}")
        self.__dict__.update(self.select_samples(indices).__dict__)

    def union(self, other: BatchMeta) -> BatchMeta:
        """The fields of both, of the same rows; what both have is the other's. Raises ValueError for other rows."""
        if not len(other):
            return self.copy()
        if not len(self):
            return other.copy()
        if self.global_indexes != other.global_indexes or self.partition_ids != other.partition_ids:
            raise ValueError("BatchMeta.union: global_indexes and partition_ids of both are the same, row for row")
        own = zip(self.custom_meta, other.custom_meta, strict=True)
        behind = zip(self._custom_backend_meta, other._custom_backend_meta, strict=True)
        return self._with(
            field_schema=copy.deepcopy({**self.field_schema, **other.field_schema}),
            production_status=self.production_status & other.production_status,
            extra_info={**self.extra_info, **other.extra_info},
            custom_meta=copied([{**a, **b} for a, b in own]),
            _custom_backend_meta=[{**a, **b} for a, b in behind],
        )

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """The rows of each after those of the one before; empty ones are left out.

        Raises ValueError where values of extra_info differ, and where fields or dtypes do unless `validate` is false.
        """
        parts = [part for part in data if len(part)]
        if not parts:
            return cls.empty()
        first = parts[0]
        if validate:
            _check_alike(parts)
        return cls(
            list(chain.from_iterable(part.global_indexes for part in parts)),
            list(chain.from_iterable(part.partition_ids for part in parts)),
            {name: _joined(name, parts) for name in first.field_schema},
            np.concatenate([part.production_status for part in parts]),
            merged("BatchMeta", [part.extra_info for part in parts]),
            list(chain.from_iterable(part.custom_meta for part in parts)),
            list(chain.from_iterable(part._custom_backend_meta for part in parts)),
        )

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """No rows."""
        return cls(extra_info=extra_info)

    def _with(self, **changed: Any) -> BatchMeta:
        """A copy, in which this is different."""
        same: dict[str, Any] = {
            "global_indexes": self.global_indexes,
            "partition_ids": self.partition_ids,
            "field_schema": self.field_schema,
            "production_status": self.production_status,
            "extra_info": copy.deepcopy(self.extra_info),
            "custom_meta": copied(self.custom_meta),
            "_custom_backend_meta": self._custom_backend_meta,
        }
        return BatchMeta(**{**same, **changed})


def _same_length(what: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(f"{what} has {found} rows, and the batch {rows}")


def _shapes_taken(known: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    shapes = known.get("per_sample_shapes")
    return dict(known) if shapes is None else {**known, "per_sample_shapes": [shapes[i] for i in rows]}


def _check_alike(parts: Sequence[BatchMeta]) -> None:
    first = parts[0]
    for number, part in enumerate(parts):
        if part.field_names != first.field_names:
            raise ValueError(
                f"BatchMeta.concat: part {number} has the fields {part.field_names}, not {first.field_names}"
            )
        for name, known in part.field_schema.items():
            if known.get("dtype") != first.field_schema[name].get("dtype"):
                raise ValueError(
                    f"BatchMeta.concat: {name!r} is {known.get('dtype')} in part {number},"
                    f" and {first.field_schema[name].get('dtype')} in the first: the dtype is to be the same"
                )


def _joined(name: str, parts: Sequence[BatchMeta]) -> dict[str, Any]:
    """What is known of a field of all parts: rows of different shapes make it nested."""
    known = [part.field_schema.get(name, {}) for part in parts]
    nested = any(each.get("is_nested") for each in known)
    joined = {
        "dtype": known[0].get("dtype"),
        "shape": None if nested else known[0].get("shape"),
        "is_nested": nested,
        "is_non_tensor": known[0].get("is_non_tensor", False),
    }
    if nested or any(each.get("per_sample_shapes") for each in known):
        shapes = [
            each.get("per_sample_shapes") or [each.get("shape")] * len(part)
            for each, part in zip(known, parts, strict=True)
        ]
        joined["per_sample_shapes"] = list(chain.from_iterable(shapes))
    return joined
