"""Writes a row whose small columns are laid out already (`batch.small_columns`): one message, without a plan.

Invariant: the effect and the errors are those of `AsyncTable.upsert_and_look` with the same columns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns
from dataplane.client.row_names import keys_of_rows, tags_of
from dataplane.client.table_rows import Rows, rows_of, widened
from dataplane.client.tables import TIMEOUT_S, AsyncTable, written_as
from dataplane.clock import Deadline
from dataplane.table import requests as r
from dataplane.wire import messages as m


async def put(
    table: AsyncTable,
    key: str,
    row: SmallColumns,
    references: Mapping[str, BatchRef],
    tags: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Rows, list[str]]:
    """Write the row, with further columns that are in a table already (`references`, of one row and one column
    each). Returns what is known of it afterwards, and the columns of the table. Raises as
    `AsyncTable.upsert_and_look`."""
    renamed = [
        ref if ref.columns == (name,) else ref.rename({ref.columns[0]: name}) for name, ref in references.items()
    ]
    ref = functools.reduce(BatchRef.union, renamed) if renamed else None
    inline = m.Inline(row.payload, row.layout, [nbytes for *_, nbytes in row.columns])
    keys = keys_of_rows([key])
    write = written_as(keys, np.empty(0, np.int64), ref, tags_of(tags, 1), r.Looked)
    reply = await table.write_inline(inline, write, r.Looked, Deadline.after(TIMEOUT_S))
    names = reply.columns
    return rows_of([msgspec.structs.replace(reply, have=widened(reply, len(names)))], len(names)), names
