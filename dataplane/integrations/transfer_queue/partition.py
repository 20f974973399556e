"""A partition of TransferQueue as a table: its rows by key, by number and by global index.

A partition belongs to one job, whose name is part of the name of the table.

Rows that were put without a key have a generated one, made of the call and the position in it, which `kv_list` does not
show. Rows that were put with keys have the call and the position in a tag with a reserved name, if a sampler needs
groups.

Global indexes are small numbers from 0 upwards for the rows of all partitions of a job.

Invariants: in every process of the job an index refers to the same row of the same partition, and no index is reused.
The rows of a partition have their indexes in blocks of 256, in the order of their numbers. A separate table has a row
for each block, whose number is the number of the block; its leader assigns it when the first process asks. A process
asks once for each block.
"""

from __future__ import annotations

import difflib
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dataplane.batch.tensors import is_tensor
from dataplane.client.sync import Plane, Table
from dataplane.client.table_rows import TableSlice
from dataplane.errors import Misuse, OwnerDied
from dataplane.integrations.transfer_queue.errors import NotThere
from dataplane.integrations.transfer_queue.values import stored_schema

if TYPE_CHECKING:
    from transfer_queue.controller import DataPartitionStatus
    from transfer_queue.metadata import BatchMeta

Index = npt.NDArray[np.int64]

PUT = "dataplane.put"
"""The tag with the call that put a row, and the position in it."""

_OWN = ".row/"  # how the keys begin that users did not give
_BITS = 8
_BELOW = (1 << _BITS) - 1


def prefix(job: str) -> str:
    """The prefix of the names of the tables of a job's partitions."""
    return f"transfer_queue/{job}/"


def blocks(job: str) -> str:
    """The name of the table of a job's index blocks."""
    return f"transfer_queue.indexes/{job}"


class _Watched:
    """A table that calls `lost` when every replica of it was lost, and raises that error."""

    def __init__(self, table: Table, lost: Callable[[], object]) -> None:
        self._table = table
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._table, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return found(*args, **kwargs)
            except OwnerDied:
                self._lost()
                raise

        return watched if callable(found) else found


class JobPartition:
    """A partition of a job, by its name. It need not exist. `lost` is called if every replica of it was lost; its name
    then refers to a new, empty partition. `names`: the names of the partitions that exist."""

    def __init__(
        self, plane: Plane, job: str, name: str, lost: Callable[[], object], names: Callable[[], list[str]]
    ) -> None:
        if not isinstance(name, str) or not name:  # type: ignore[redundant-expr]  # users need not check
            raise ValueError(f"a partition is named by a text of one character or more, not by {name!r}")
        self.name = name
        self.table = cast("Table", _Watched(plane.table(prefix(job) + name), lost))
        self._names = names
        self._shapes: dict[str, tuple[int, ...] | None] = {}  # of a row, by field; None if rows differ
        self._indexes = Indexes(plane, blocks(job), name)

    # naming rows

    def indexes(self, numbers: Iterable[int] | Index) -> list[int]:
        return self._indexes.of(numbers)

    def numbers(self, global_indexes: Sequence[int]) -> Index:
        """The numbers of rows by their global indexes; -1, which no row has, for indexes of other partitions."""
        return self._indexes.numbers(global_indexes)

    def named(self, keys: Sequence[str]) -> Index:
        """The numbers of rows by their keys. Raises NotThere, with the first missing key."""
        try:
            return self.table.numbers(keys)
        except Misuse as error:
            raise self.absent(keys) from error

    def absent(self, keys: Sequence[str]) -> NotThere:
        """The error for keys of which some are missing."""
        rows = self.table.look(tags=False)
        if not rows.changes:
            return self.missing()
        there = set(rows.keys)
        lost = [key for key in keys if key not in there]
        first = f"the first is {lost[0]!r}" if lost else "they went meanwhile"
        return NotThere(
            f"{len(lost)} of {len(keys)} keys were not found in partition {self.name!r}, {first}: put them first; they"
            " are gone if they were cleared"
        )

    def missing(self) -> NotThere:
        """The error for a partition that does not exist."""
        names = self._names()
        near = difflib.get_close_matches(self.name, names, 1)
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        advice = f"did you mean {near[0]!r}?" if near else f"there are {shown}" if names else "there is none"
        return NotThere(
            f"not found: there is no partition {self.name!r}: nothing was put into it yet, or it was cleared; {advice}"
        )

    # metadata

    def all(self, columns: Sequence[str] = (), *, tags: bool = True) -> TableSlice | None:
        """All rows in the order of arrival; None if the partition does not exist."""
        rows = self.table.look(columns=list(columns), tags=tags)
        return rows if rows.changes else None

    def note_shapes(self, fields: Any) -> None:
        """Remember the shapes of a row of the dense tensors of this TensorDict, which this process has put."""
        for name, value in fields.items():
            if is_tensor(value) and not value.is_nested:
                shape = tuple(value.shape[1:])
                self._shapes[name] = shape if self._shapes.get(name, shape) == shape else None

    def drop(self) -> None:
        """Delete all rows, and the record of their consumption."""
        self.table.drop()
        self._shapes.clear()

    def meta(self, rows: TableSlice, names: Sequence[str], ready: npt.ArrayLike) -> BatchMeta:
        """These rows as a BatchMeta with these fields."""
        from transfer_queue.metadata import BatchMeta

        schema = stored_schema({name: field for name, field in self.table.schema().items() if name in names})
        for name, known in schema.items():
            known["is_nested"] |= not known["is_non_tensor"] and self._shapes.get(name, ()) is None
        return BatchMeta(
            self.indexes(rows.numbers),
            [self.name] * len(rows),
            schema,
            ready,
            None,
            [shown(tags) for tags in rows.tags],
        )

    def snapshot(self) -> DataPartitionStatus | None:
        """The keys, tags and produced fields of all rows, as TransferQueue's controller gives them, without what tasks
        have consumed; None if the partition does not exist."""
        import torch
        from transfer_queue.controller import DataPartitionStatus

        names = list(self.table.schema())
        rows = self.all(names)
        if rows is None:
            return None
        indexes = self.indexes(rows.numbers)
        produced = torch.zeros(max(indexes, default=0) + 1, max(len(names), 1), dtype=torch.int8)
        produced[indexes, : len(names)] = torch.from_numpy(rows.have.astype(np.int8))
        keys = {key: index for key, index in zip(rows.keys, indexes, strict=True) if not has_own_key(key)}
        return DataPartitionStatus(
            self.name,
            production_status=produced,
            global_indexes=set(indexes),
            field_name_mapping={name: at for at, name in enumerate(names)},
            custom_meta={index: shown(tags) for index, tags in zip(indexes, rows.tags, strict=True) if tags},
            keys_mapping=keys,
            revert_keys_mapping={index: key for key, index in keys.items()},
        )

    # for samplers

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The tags by row, without rows that have none."""
        rows = self.table.look(self.numbers(global_indices), missing_ok=True)
        pairs = zip(self.indexes(rows.numbers), map(shown, rows.tags), strict=True)
        return {index: tags for index, tags in pairs if tags}

    def groups(self, global_indices: Sequence[int], size: int, tag: str) -> list[list[int]]:
        """Whole groups of this size: rows with the same value of the tag, or else rows of one call, by position from
        its first row."""
        if not len(global_indices):
            return []
        rows = self.table.look(self.numbers(global_indices), missing_ok=True)
        found: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
        for index, key, tags in zip(self.indexes(rows.numbers), rows.keys, rows.tags, strict=True):
            if tag in tags:
                found["tag", repr(tags[tag])].append((index, index))
            else:
                put, place = tags[PUT] if PUT in tags else _own(key)
                found["put", put, place // size].append((place, index))
        return [[index for _, index in sorted(group)[:size]] for group in found.values() if len(group) >= size]


def new_keys(rows: int) -> list[str]:
    """Generated keys for rows of one call."""
    put = secrets.token_hex(6)
    return [f"{_OWN}{put}/{place}" for place in range(rows)]


def has_own_key(key: str) -> bool:
    return key.startswith(_OWN)


def marks(rows: int) -> list[dict[str, Any]]:
    """The tags with the call that put the rows."""
    put = secrets.token_hex(6)
    return [{PUT: [put, place]} for place in range(rows)]


def shown(tags: Mapping[str, Any]) -> dict[str, Any]:
    """The tags of the user."""
    return {name: value for name, value in tags.items() if name != PUT}


def _own(key: str) -> tuple[str, int]:
    """The call that put a row, and the position in it; each row by itself if that is unknown."""
    if not has_own_key(key):
        return key, 0
    put, _, place = key.removeprefix(_OWN).rpartition("/")
    return put, int(place)


class Indexes:
    """The global indexes of one partition. Any thread may use them."""

    def __init__(self, plane: Plane, table: str, partition: str) -> None:
        """table: the name of the table of the job's index blocks."""
        self._table = plane.table(table)
        self._prefix = f"{partition}/"
        self._blocks: dict[int, int] = {}  # by the part of a row's number above the block
        self._parts: dict[int, int] = {}  # and back

    def of(self, numbers: Iterable[int] | Index) -> list[int]:
        """The global indexes of the rows with these numbers."""
        rows = np.asarray(numbers, np.int64)
        parts = np.unique(rows >> _BITS).tolist()
        unknown = [part for part in parts if part not in self._blocks]
        if unknown:
            given = self._table.numbers([f"{self._prefix}{part}" for part in unknown], create=True)
            self._learn(zip(unknown, given.tolist(), strict=True))
        found: list[int] = (_looked_up(self._blocks, parts, rows >> _BITS) << _BITS | rows & _BELOW).tolist()
        return found

    def numbers(self, global_indexes: Sequence[int]) -> Index:
        """The numbers of the rows with these indexes; -1, which no row has, for indexes of other partitions."""
        indexes = np.asarray(global_indexes, np.int64)
        blocks = np.unique(indexes >> _BITS).tolist()
        unknown = [block for block in blocks if block not in self._parts]
        if unknown:
            self._learn(self._asked(unknown))
        parts = _looked_up({block: self._parts.get(block, -1) for block in blocks}, blocks, indexes >> _BITS)
        return np.where(parts < 0, -1, parts << _BITS | indexes & _BELOW)

    def _asked(self, blocks: Sequence[int]) -> Iterable[tuple[int, int]]:
        for block in blocks:
            try:
                (key,) = self._table.keys([block])
            except Misuse:  # no such block was given
                continue
            if key.startswith(self._prefix) and key.removeprefix(self._prefix).isdigit():
                yield int(key.removeprefix(self._prefix)), block

    def _learn(self, found: Iterable[tuple[int, int]]) -> None:
        for part, block in found:
            self._blocks[part] = block
            self._parts[block] = part


def _looked_up(by: dict[int, int], keys: Sequence[int], wanted: Index) -> Index:
    """The value of each wanted key. Keys are sorted, and contain all that are wanted."""
    if not len(keys):
        return np.empty(0, np.int64)
    values = np.array([by[key] for key in keys], np.int64)
    found: Index = values[np.searchsorted(np.array(keys, np.int64), wanted)]
    return found
