"""Rows of small columns, put and retained by the numbers of their shards, without references: for integrations that
keep a cell of their own for each row."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.batch.small_columns import SmallColumns
from dataplane.client import arguments, row_requests
from dataplane.client.sync import Plane


def put_row(plane: Plane, row: SmallColumns, timeout: float) -> tuple[bytes, int]:
    """Store a row that `batch.small_columns` laid out. Returns its node and its shard. Raises as `Plane.put`."""
    inner = plane._inner
    inner.check()
    return plane._turns.ask(inner.writer.row_put_exchange(row, arguments.seconds(timeout)))


def retain(plane: Plane, node: bytes, rows: Sequence[tuple[int, int, int]]) -> list[int]:
    """Links to these rows of stored columns of a node: (number of a shard or link, ordinal, row). All or none; raises
    as `Plane.retain`."""
    return plane._wait(row_requests.links(plane._inner.connection, node, rows))
