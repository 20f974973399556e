"""The synchronous interface of tables, and of histories and weights, which are stored in tables. See `client.sync`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns
from dataplane.client import row_writes
from dataplane.client.blocking_calls import HistoryCalls, TableCalls, WeightsCalls
from dataplane.client.histories import AsyncHistory
from dataplane.client.sync_streams import Stream, opened
from dataplane.client.table_rows import Rows
from dataplane.client.tables import AsyncTable
from dataplane.client.weights import AsyncWeights


class Table(TableCalls):
    """A table of the cluster. Created by `plane.table` without a message; any number of processes may use it.

    Over several hosts it survives the death of any one of them: columns that were stored there alone raise `OwnerDied`
    when they are read, until they are written again. If all hosts that have the table die at once, its methods raise
    `OwnerDied`, and `plane.table` returns a new one. A durable table is recovered when its nodes are restarted on their
    data directories.

    Rows are named by key or by number: an array of integers in the order of arrival, which are never reused in the
    table.
    """

    _inner: AsyncTable
    _plane: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As of `Stream`."""
        return opened, (self._inner._connection.address, "table", self.name)

    @property
    def name(self) -> str:
        """The name of the table."""
        return self._inner.name

    def _put_row(
        self, key: str, row: SmallColumns, references: Mapping[str, BatchRef], tags: Any
    ) -> tuple[Rows, list[str]]:
        """A row whose small columns are laid out already. See `client.row_writes`."""
        return self._wait(row_writes.put(self._inner, key, row, references, tags))


class History(HistoryCalls):
    """The responses of earlier epochs, by prompt. Made by `plane.history`; any number of processes may use it."""

    _inner: AsyncHistory

    @property
    def name(self) -> str:
        """The name of the history."""
        return self._inner.name

    def follow(
        self,
        stream: Stream,
        *,
        task: str = "history",
        tokens: str = "response_ids",
        key: str | None = None,
        reward: str | None = None,
        rows: int = 256,
    ) -> int:
        inner = stream._inner
        return self._wait(self._inner.follow(inner, task=task, tokens=tokens, key=key, reward=reward, rows=rows))


class Weights(WeightsCalls):
    """Versions of a model's tensors. Made by `plane.weights`; any number of processes may use it."""

    _inner: AsyncWeights

    @property
    def name(self) -> str:
        """The name of the weights."""
        return self._inner.name

    @property
    def keep(self) -> int:
        """How many versions are kept."""
        return self._inner.keep
