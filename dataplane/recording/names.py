"""The metadata of each row of a recording, and its columns in the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dataplane.errors import Corrupt, SchemaMismatch

KEY, GROUP, NUMBER, VERSION, TAGS, MEDIA, ROW = (
    "__key__", "__group__", "__group_number__", "__version__", "__tags__", "__media__", "__row__",
)  # fmt: skip
RESERVED = (KEY, GROUP, NUMBER, VERSION, TAGS, MEDIA, ROW)

_APART = 64 << 10  # the average bytes of media above which each has its own buffer


@dataclass(frozen=True, slots=True)
class RowNames:
    """Metadata of rows. `groups`: text, an integer, or None. `versions`: policy versions. `tags`: the values by name.
    `rows`: the unique name of each row, the same in all of its deliveries."""

    keys: Sequence[str]
    groups: Sequence[str | int | None]
    versions: Sequence[int]
    tags: dict[str, list[Any]]
    rows: Sequence[str]

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: Sequence[int]) -> RowNames:
        """The metadata of these rows."""
        return RowNames(
            [self.keys[i] for i in rows],
            [self.groups[i] for i in rows],
            [self.versions[i] for i in rows],
            {name: [values[i] for i in rows] for name, values in self.tags.items()},
            [self.rows[i] for i in rows],
        )


def added(names: RowNames, media: list[list[str]], table: Any) -> Any:
    """The table with the columns of the metadata before its own. `media`: the hashes of each row's media. Raises
    SchemaMismatch if the table has a column of a reserved name."""
    taken = [name for name in RESERVED if name in table.column_names]
    if taken:
        raise SchemaMismatch(f"a recording has a column {taken[0]!r} of its own", column=taken[0])
    tags = [
        json.dumps({name: values[i] for name, values in names.tags.items()}, ensure_ascii=False) if names.tags else "{}"
        for i in range(len(names))
    ]
    columns = {
        KEY: pa.array(names.keys, pa.string()),
        GROUP: pa.array([None if group is None else str(group) for group in names.groups], pa.string()),
        NUMBER: pa.array([group if type(group) is int else None for group in names.groups], pa.int64()),
        VERSION: pa.array(names.versions, pa.int64()),
        TAGS: pa.array(tags, pa.string()),
        MEDIA: pa.array(media, pa.list_(pa.string())),
        ROW: pa.array(names.rows, pa.string()),
    }
    fields = [pa.field(name, array.type) for name, array in columns.items()]
    return pa.Table.from_arrays([*columns.values(), *table.columns], schema=pa.schema([*fields, *table.schema]))


def split(table: Any) -> tuple[RowNames, Any]:
    """The metadata of a table, without the hashes of media, and a table of its other columns. Raises Corrupt if
    metadata is missing or invalid."""
    try:
        own = {name: table.column(name).to_pylist() for name in RESERVED if name != MEDIA}
        said = [json.loads(each) for each in own[TAGS]]
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"a table that is of no recording: {error}") from error
    pairs = zip(own[GROUP], own[NUMBER], strict=True)
    groups = [text if number is None else number for text, number in pairs]
    tags = {name: [each.get(name) for each in said] for name in dict.fromkeys(name for each in said for name in each)}
    return RowNames(own[KEY], groups, own[VERSION], tags, own[ROW]), table.drop_columns(list(RESERVED))


def media_table(contents: dict[str, Any]) -> Any:
    """A `pyarrow.Table` of media. `contents`: their bytes by hash."""
    # From buffers: `pyarrow.array` of memoryviews (26.0) keeps a reference to each of them forever.
    runs = [np.ascontiguousarray(each).view(np.uint8) for each in contents.values()]
    if sum(map(len, runs)) > _APART * len(runs):  # no copies
        data = pa.chunked_array([_cell(run) for run in runs], pa.large_binary())
        return pa.table({"media": pa.array(list(contents), pa.string()), "data": data})
    offsets = np.zeros(len(runs) + 1, np.int64)
    np.cumsum([len(run) for run in runs], out=offsets[1:])
    joined = np.concatenate(runs) if runs else np.empty(0, np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    data = pa.Array.from_buffers(pa.large_binary(), len(runs), buffers)
    return pa.table({"media": pa.array(list(contents), pa.string()), "data": data})


def _cell(run: Any) -> Any:
    """An array of one value."""
    offsets = np.array([0, len(run)], np.int64)
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(run)])
