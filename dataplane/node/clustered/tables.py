"""Tables of the cluster, for the clients of one node: each call is a request to the leader of the table's partition.

A table is created by the first write, or by a client that waits for its rows. A client identifies a table by the token
of the partition. If every replica of the partition has died, the client gets `OwnerDied`, so it cannot mistake a new
table of the same name for the old one.

Invariants: the columns of a write are retained before the partition is asked, and released if the partition did not
take them. A repeated call is executed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from functools import partial
from typing import Any

import msgspec

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline, monotonic
from dataplane.coordinator.base import Coordinator
from dataplane.errors import Closed, DataplaneError, Lost, NotReady, OwnerDied
from dataplane.node.clustered.column_holders import ColumnHolders
from dataplane.node.clustered.open_streams import token_of
from dataplane.node.clustered.session import PartitionSession, patiently
from dataplane.node.clustered.table_directory import TableDirectory, past
from dataplane.node.local.tables import TABLES, TableRequest, checked, figures_of, not_ready
from dataplane.node.partitions import record as kinds
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.record import Record
from dataplane.node.sessions.interface import ASK_S, Waiting, happened
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.replication.machine import StateMachine
from dataplane.stream.machine import StreamMachine
from dataplane.stream.requests import StreamResult, Succeeded
from dataplane.table import answers
from dataplane.table import requests as r
from dataplane.table.machine import TableMachine
from dataplane.table.table import TableRows
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire import row_messages as rm
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

SWEEP_S = 2.0

_PAUSE_S = 0.02  # the pause between reads of a table's record while it changes
_LIST_S = 5.0
_UNKNOWN_S = 120.0  # the time after which a partition without a record counts as removed


def machine(partition: str) -> StateMachine:
    """The state machine of a partition, before its first command. A node that is asked to host a replica knows only the
    key."""
    return (TableMachine if kinds.kind_of(partition) == kinds.TABLES else StreamMachine)(kinds.name_of(partition))


class ClusteredTables:
    """The tables of the cluster, for one node. `life`: the incarnation of its process."""

    def __init__(
        self,
        partitions: Partitions,
        coordinator: Coordinator,
        peers: Peers,
        holders: ColumnHolders,
        life: int,
        *,
        sweep_s: float = SWEEP_S,
        **options: float,
    ) -> None:
        """`sweep_s`: interval of `sweep`. `options`: as for `TableDirectory`."""
        self._sweep_s = sweep_s
        self.partitions = partitions
        self.holders = holders
        self._peers = peers
        replicas, members = partitions.replicas, partitions.members
        self.directory = TableDirectory(coordinator, members, replicas, partitions.router, **options)
        self._me = f"{members.me}/{life}"
        self._numbers = itertools.count(1)
        self._background = BackgroundTasks()
        self._unknown: dict[str, float] = {}  # partitions without a record -> since this time

    def client(self, staged: StagedColumns) -> TableClient:
        """The handler of a new client's requests."""
        name = f"{self._me}/t{next(self._numbers)}"
        return TableClient(self, PartitionSession(name, self.partitions, self._background, r.decode_result), staged)

    def start(self) -> None:
        self._background.spawn(self.directory.run())
        self._background.spawn(self._sweep())

    async def aclose(self) -> None:
        await self._background.aclose()
        await self.directory.aclose()

    # Statistics

    def __len__(self) -> int:
        return len(self._led())

    def _led(self) -> dict[str, TableRows]:
        now = monotonic()
        return {
            hosted.machine.name: hosted.machine.table
            for hosted in self.partitions.replicas
            if isinstance(hosted.machine, TableMachine) and hosted.machine.there and hosted.replica.serves(now)
        }

    def figures(self, after: str | None = None, most: int = 1 << 30) -> dict[str, Any]:
        """Statistics by name of the first `most` tables after the name `after` that are led here."""
        led = self._led()
        names = sorted(name for name in led if after is None or name > after)[:most]
        return {name: figures_of(led[name]) for name in names}

    def answer(self, request: pm.LedTables) -> m.Figures:
        """The answer to another node that asks for the tables led here."""
        return m.Figures(request.id, self.figures(request.after, TABLES))

    async def listed(self, request: rm.ListTables) -> m.Reply:
        """Statistics of the first `TABLES` tables, by name, on all nodes that answer."""
        found = self.figures(request.after, TABLES)
        members = self.partitions.members
        asking = [
            self._peers.request(member, pm.LedTables(self._peers.next_id(), request.after), m.Figures, _LIST_S)
            for node, member in members.current.items()
            if node != members.me
        ]
        for reply in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(reply, m.Figures):
                found |= reply.values
        return m.Figures(request.id, {name: found[name] for name in sorted(found)[:TABLES]})

    # Cleanup, also for streams

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                await self.sweep()
            except DataplaneError as error:
                log.info("checking the columns that tables need here failed, and is tried again: %s", error)

    async def sweep(self) -> None:
        """Release the columns of this node for partitions that no longer exist, and for nodes that have ended. Raises
        Unavailable, Corrupt, OutcomeUnknown."""
        self.holders.sweep()
        unknown, self._unknown = self._unknown, {}
        directories = {kinds.TABLES: self.directory, kinds.STREAMS: self.partitions.directory}
        for key in self.holders.retained.holders:
            directory = directories.get(kinds.kind_of(key))
            if directory is None or directory.names(key):
                continue
            exists = await directory.exists(key)
            since = unknown.get(key, monotonic())
            forgotten = exists is None and monotonic() - since >= _UNKNOWN_S and not kinds.is_durable(key)
            if exists is False or forgotten:
                self.holders.retained.drop(key)
            elif exists is None:
                self._unknown[key] = since


class TableClient:
    """Sends the requests of one client to the leaders of its tables."""

    def __init__(self, tables: ClusteredTables, session: PartitionSession, staged: StagedColumns) -> None:
        self._tables = tables
        self._session = session
        self._staged = staged

    def answer(self, request: TableRequest, deadline: Deadline) -> Waiting:
        """A function to call and await for the reply."""
        if isinstance(request, rm.ListTables):
            return partial(self._tables.listed, request)
        return partial(self._answer, request, checked(request), deadline)

    def write(self, request: rm.AskTable, what: r.Upsert, ref: BatchRef | None, deadline: Deadline) -> Waiting:
        """A function to call and await for the reply to a write. The columns are `ref`; `what.ref` is ignored."""
        what = msgspec.structs.replace(what, ref=b"" if ref is None else ref.encode())
        return partial(self._answer, request, what, deadline)

    def leave(self) -> None:
        """Tell the partitions that the client has ended."""
        self._session.leave()

    async def _answer(self, request: rm.AskTable, what: r.FromClient, deadline: Deadline) -> m.Reply:
        ref = BatchRef.decode(what.ref) if isinstance(what, r.Upsert) and what.ref else None
        until = Deadline.after(ASK_S + deadline.remaining_s)
        while True:
            table = await self._table(request, what, deadline)
            if table is None:
                return rm.TableAnswer(request.id, request.home, _of_none(request.table, what))
            there = table.key or ""
            try:
                result = await self._ask(there, request, what, ref, deadline)
                return rm.TableAnswer(request.id, token_of(there), result)
            except (Closed, Lost) as error:
                if type(error) not in (Closed, Lost) or until.remaining_s <= 0:
                    raise
                await self._missing(request, there)
            await asyncio.sleep(_PAUSE_S)

    async def _table(self, request: rm.AskTable, what: r.FromClient, deadline: Deadline) -> Record | None:
        """The record of the table. If there is none, the table is created if the request may create tables, else None
        is returned. Raises OwnerDied if the client's table was lost, Misuse if the table has to be durable and is
        not."""
        durable = request.durable
        makes = isinstance(what, r.Upsert) and bool(what.keys)
        makes = makes or (isinstance(what, r.FindReady) and what.least > 0 and deadline.remaining_s > 0)
        directory = self._tables.directory
        known = await patiently(lambda: directory.record(request.table))
        if request.home and request.home in past(known).lost:
            raise _died(request.table, "")
        there = known is not None and known.key is not None
        if known is not None and there and (known.durable or not durable):
            return known
        return await patiently(lambda: directory.made(request.table, durable=durable)) if makes or there else None

    async def _missing(self, request: rm.AskTable, there: str) -> None:
        """Handle a partition that is not found or ended. Raises OwnerDied if the client's table was lost."""
        lost = await patiently(lambda: self._tables.directory.is_lost(request.table, there))
        if lost and request.home == token_of(there):
            raise _died(request.table, kinds.maker_of(there))

    async def _ask(
        self, there: str, request: rm.AskTable, what: r.FromClient, ref: BatchRef | None, deadline: Deadline
    ) -> Any:
        if isinstance(what, r.FindReady):
            return await self._ready(there, request, what, deadline)
        if ref is None:
            return await self._session.ask(there, what, StreamResult)
        claim = await self._tables.holders.claim(there, ref)
        result = await self._session.ask(there, what, StreamResult, settled=partial(happened, (claim,)))
        self._staged.kept(request.staged, ref)
        return result

    async def _ready(self, there: str, request: rm.AskTable, what: r.FindReady, deadline: Deadline) -> r.RowNumbers:
        waits = partial(_queue, what) if deadline.remaining_s > 0 else None
        try:
            return await self._session.ask(there, what, r.RowNumbers, deadline if waits else None, waits=waits)
        except NotReady:
            raise not_ready(request.table, what, deadline) from None


def _of_none(name: str, what: r.FromClient) -> Any:
    """The answer to a request about a table that does not exist."""
    match what:
        case r.Upsert():
            answers.there(name, None)
        case r.Claim():
            return answers.given(None)
        case r.FindReady():
            raise NotReady(f"there is no table {name!r} yet", stream=name, task=what.task)
    return Succeeded() if not isinstance(what, r.Question) else answers.answer(name, None, what) or Succeeded()


def _queue(what: r.FindReady) -> str:
    """The queue of a waiting request: equal requests share one."""
    return hashlib.blake2b(r.encode_request(what), digest_size=8).hexdigest()


def _died(name: str, node: str) -> OwnerDied:
    return OwnerDied(
        f"the table {name!r} was lost with every node that had it; write it again, to plane.table({name!r})", node=node
    )
