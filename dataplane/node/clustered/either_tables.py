"""The tables of one client on a node outside a cluster: durable ones, which are partitions, and those that end with the
process.

Invariant: a name belongs to one table. To a durable one from the first request for one until its partition is over;
to another until it is dropped.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Misuse
from dataplane.node.clustered.tables import ClusteredTables, TableClient
from dataplane.node.streams.sessions import Waiting
from dataplane.node.tables.tables import TABLES, TableRequest, Tables, Tabling
from dataplane.table import requests as r
from dataplane.wire import messages as m


class TableNames:
    """The names of durable tables on one node."""

    def __init__(self, durable: ClusteredTables) -> None:
        self.durable = durable
        self._asked: Counter[str] = Counter()  # requests under way that ask for a durable table

    def has(self, name: str) -> bool:
        """Whether there is a durable table with this name, or one is being created."""
        record = self.durable.directory.find(name)
        return self._asked[name] > 0 or (record is not None and record.key is not None)

    async def made(self, name: str, answer: Waiting) -> m.Reply:
        """The reply; meanwhile the name belongs to a durable table."""
        self._asked[name] += 1
        try:
            return await answer()
        finally:
            self._asked[name] -= 1
            if not self._asked[name]:
                del self._asked[name]


class EitherTables:
    """See the module. `names` are those of the node, `local` the tables of its process."""

    def __init__(self, names: TableNames, durable: TableClient, local: Tables, here: Tabling) -> None:
        self._names = names
        self._durable = durable
        self._local = local
        self._here = here

    def answer(self, request: TableRequest, deadline: Deadline) -> m.Reply | Waiting:
        """As `Tabling.answer`. Raises Misuse if a table has to be durable and is not."""
        if isinstance(request, m.Tables):
            return self._figures(request)
        if not self._is_durable(request):
            return self._here.answer(request, deadline)
        return self._asked(request, self._durable.answer(request, deadline))

    def write(self, request: m.AskTable, what: r.Upsert, ref: BatchRef | None, deadline: Deadline) -> m.Reply | Waiting:
        """As `Tabling.write`. Raises as `answer`."""
        if not self._is_durable(request):
            return self._here.write(request, what, ref, deadline)
        return self._asked(request, self._durable.write(request, what, ref, deadline))

    def leave(self) -> None:
        """The client has gone."""
        self._here.leave()
        self._durable.leave()

    def _is_durable(self, request: m.AskTable) -> bool:
        wanted = request.durable
        if self._local.find(request.table) is None:
            return wanted or self._names.has(request.table)
        if wanted:
            raise Misuse(f"the table {request.table!r} was made not to be durable: drop it first, or open it so")
        return False

    def _asked(self, request: m.AskTable, answer: Waiting) -> Waiting:
        return partial(self._names.made, request.table, answer) if request.durable else answer

    def _figures(self, request: m.Tables) -> m.Figures:
        """Statistics of tables of both kinds, the first by name."""
        after = request.after
        found = self._local.figures(after, TABLES) | self._names.durable.figures(after, TABLES)
        return m.Figures(request.id, {name: found[name] for name in sorted(found)[:TABLES]})
