"""The partition of a table as a state machine.

The command of a request that changes the table is the request itself. It is checked when it is applied: a write that
fails changes nothing, and its result is the error. The leader answers reads from the committed state. Only waiting
requests are volatile; claims are replicated, so the next leader knows them.

The partition exists before the table and after it: a table begins with its first write and ends when it is dropped. The
numbers of rows and of changes continue with the next table, so none is reused. `Retire` ends a partition that has no
table and an empty outbox.

Columns are in the stores of nodes. Outboxes tell the nodes which cells are no longer needed (`write_effects`). When a
node is lost, rows keep the references to their cells on it: reading such a cell raises `OwnerDied`, and writing it
again repairs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dataplane.batch.locations import unlinked
from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, DataplaneError, Misuse, ProtocolMismatch, Rejected
from dataplane.replication.machine import Decision, StateMachine
from dataplane.replication.outbox import LostNodes, Outboxes
from dataplane.replication.sessions import Sessions
from dataplane.stream import requests as s
from dataplane.stream.packing import pack, unpack
from dataplane.stream.requests import CommandRefused, HeldRows, ListHeldColumns, Succeeded
from dataplane.stream.results import held_rows
from dataplane.stream.snapshot_format import open_sealed, refused, seal
from dataplane.table import answers, write_effects
from dataplane.table import replica_state as state
from dataplane.table import requests as r
from dataplane.table.table import TableRows

NOTHING = b""


class TableMachine(StateMachine):
    def __init__(self, name: str) -> None:
        self.name = name
        self._begin()
        self.forget()

    def _begin(self) -> None:
        self.there = False
        """Whether the table exists."""
        self.retired = False
        self.changes = 0
        self.table = TableRows(self.name, self._change)
        self.sessions = Sessions()
        self.lost_nodes = LostNodes()
        self.outboxes = Outboxes(self.lost_nodes)

    def _change(self) -> int:
        self.changes += 1
        return self.changes

    def forget(self) -> None:
        self._version = 0
        self._decoded: tuple[bytes, r.AnyRequest] = (b"", r.DropTable())

    @property
    def idle(self) -> bool:
        """Whether `Retire` would end the partition."""
        return not self.there and not self.outboxes

    # Deciding

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        asked = r.decode_request(request)
        if isinstance(asked, r.Question):
            answer = self._answer(asked)
            return Decision((), NOTHING if answer is None else r.encode_result(answer))
        if isinstance(asked, ListHeldColumns):
            return Decision((), r.encode_result(_held(self, asked)))
        if isinstance(asked, s.EndClient) and not asked.ended:  # a client has no leases of rows here
            return Decision((), r.encode_result(Succeeded()))
        if asked.sequence:
            known = self.sessions.result(asked.client, asked.sequence)
            if known is not None:
                return Decision((), r.encode_result(self._again(asked, known)))
        elif isinstance(asked, r.CHANGES):
            raise ProtocolMismatch("a request that changes a table needs a sequence, so that it is not done twice")
        self._decoded = request, asked
        return Decision((request,))

    def reads(self, request: bytes) -> bool:
        return isinstance(r.decode_request(request), r.Question | ListHeldColumns)

    def _answer(self, asked: r.Question) -> r.AnyResult | None:
        self._check_open()
        return answers.answer(self.name, self.table if self.there else None, asked)

    def _again(self, asked: r.Command, known: bytes) -> r.AnyResult:
        """The answer to a command that was executed before. For a write with `look`, it has the current state of the
        rows."""
        result = r.decode_result(known)
        match result:
            case r.Wrote(rows) if isinstance(asked, r.Upsert):
                try:
                    return answers.wrote(self.table, asked, unpack(rows))
                except Misuse as error:
                    return CommandRefused.of(error)
            case r.Gave(granted, rows):
                return r.ClaimedRows(granted, unpack(rows))
        return result

    def _check_open(self) -> None:
        if self.retired:
            raise Closed(f"this partition of the table {self.name!r} is over; there may be another")

    @property
    def version(self) -> int:
        return self._version

    def serves(self, request: bytes, in_vain: int) -> bool:
        if in_vain == self.version:
            return False
        asked = r.decode_request(request)
        try:
            return not isinstance(asked, r.FindReady) or self._answer(asked) is not None
        except DataplaneError:
            return True  # to be answered with the error

    # Applying

    def apply(self, command: bytes) -> bytes:
        known, asked = self._decoded
        if known is not command or not isinstance(asked, r.Command):
            asked = r.decode_command(command)
        self._version += 1
        if not asked.sequence:
            return r.encode_result(self._done(asked))
        try:
            before = self.sessions.result(asked.client, asked.sequence)
        except Rejected as error:
            return r.encode_result(CommandRefused.of(error))
        if before is not None:
            return r.encode_result(self._again(asked, before))
        result = self._done(asked)
        self.sessions.keep(asked.client, asked.sequence, r.encode_result(_brief(result)))
        return r.encode_result(result)

    def _done(self, asked: r.Command) -> r.AnyResult:
        try:
            if isinstance(asked, r.CHANGES):
                self._check_open()
            return _APPLY[type(asked)](self, asked) or Succeeded()
        except DataplaneError as error:
            return CommandRefused.of(error)

    def _write(self, asked: r.Upsert) -> r.AnyResult:
        ref = BatchRef.decode(asked.ref) if asked.ref else None
        answers.check_write(asked, ref)
        if not asked.keys:
            answers.there(self.name, self.table if self.there else None)
        if ref is not None and self.lost_nodes:
            self.lost_nodes.require(unlinked(ref).shards())
        numbers, over = answers.write(self.table, asked, ref)
        self.there = True
        if ref is not None and len(ref):
            self.outboxes.hold(node for node, _ in ref.shards())
        write_effects.tell(over, self.outboxes)
        return answers.wrote(self.table, asked, numbers)

    def _act(self, asked: r.ClearRows | r.Claim | r.Release) -> r.AnyResult:
        if not self.there:
            return answers.given(None) if isinstance(asked, r.Claim) else Succeeded()
        result, over = answers.act(self.table, asked)
        write_effects.tell(over, self.outboxes)
        return result

    def _drop(self, asked: r.DropTable) -> None:
        if self.there:
            write_effects.tell(self.table.drop(), self.outboxes)
            self.table = TableRows(self.name, self._change, self.table.next)
            self.there = False

    def _open(self, asked: r.OpenTable) -> None:
        if not self.changes or not self.there:
            self.table.next = max(self.table.next, asked.first)
            self.changes = max(self.changes, asked.changes)

    def _lose(self, asked: s.Lose) -> None:
        self.lost_nodes.lose(asked.node, asked.before)
        self.outboxes.recount(written.nodes for written in self.table.cells.writes.values())

    def _retire(self, asked: r.Retire) -> r.AnyResult:
        self.retired = self.retired or self.idle
        return r.Retired(self.retired, self.table.next)

    # Clients

    def clients(self) -> Iterable[str]:
        return {client.rpartition("/")[0] for client in self.sessions.producers}

    # Columns in the stores of nodes

    def holders(self) -> Iterable[str]:
        """Also the nodes with outbox entries."""
        return [node.hex() for node in {*self.outboxes.holders, *self.outboxes} if node not in self.lost_nodes]

    def waiting(self) -> Iterable[str]:
        return [node.hex() for node in self.outboxes]

    def outbox(self, node: str, most: int) -> tuple[tuple[bytes, ...], int]:
        return self.outboxes.first(bytes.fromhex(node), most)

    # The state as bytes

    def snapshot(self) -> bytes:
        return seal(
            state.SavedTableState(
                name=self.name,
                there=self.there,
                retired=self.retired,
                changes=self.changes,
                table=self.table.state(),
                lost_nodes=self.lost_nodes.state(),
                outboxes=self.outboxes.state(),
                sessions=self.sessions.snapshot(),
            ),
            state.MAGIC,
            order=None,
        )

    def restore(self, data: bytes) -> None:
        self._begin()
        self.forget()
        if not data:
            return
        found = open_sealed(data, self.name, state.SavedTableState, "table", state.MAGIC)
        with refused(f"a snapshot of the table {self.name!r} that no replica made"):
            self.table.restore(found.table)
            self.sessions.restore(found.sessions)
        self.there, self.retired, self.changes = found.there, found.retired, found.changes
        self.lost_nodes = LostNodes(found.lost_nodes)
        self.outboxes = Outboxes(self.lost_nodes, found.outboxes)
        self.outboxes.recount(written.nodes for written in self.table.cells.writes.values())


def _brief(result: r.AnyResult) -> r.AnyResult:
    """The part of a result that is remembered: the packed numbers of rows, without their metadata."""
    match result:
        case r.RowNumbers() | r.Looked():
            return r.Wrote(pack(result.rows))
        case r.ClaimedRows():
            return r.Gave(result.granted, pack(result.rows))
    return result


_APPLY: dict[type, Callable[[TableMachine, Any], r.AnyResult | None]] = {
    r.Upsert: TableMachine._write,
    r.ClearRows: TableMachine._act,
    r.Claim: TableMachine._act,
    r.Release: TableMachine._act,
    r.DropTable: TableMachine._drop,
    r.OpenTable: TableMachine._open,
    s.Lose: TableMachine._lose,
    s.Return: lambda machine, asked: machine.lost_nodes.come_back(asked.node, asked.first),
    s.OutboxReceived: lambda machine, asked: machine.outboxes.confirm(asked.node, asked.last),
    s.EndClient: lambda machine, asked: machine.sessions.drop([asked.client]),
    s.EndClients: lambda machine, asked: machine.sessions.drop(
        [client for client in machine.sessions.producers if client.startswith(asked.clients)]
    ),
    r.Retire: TableMachine._retire,
}


def _held(machine: TableMachine, asked: ListHeldColumns) -> HeldRows:
    """References to the columns that are stored on the node and that rows of the table still need. The reference
    of a write is among them as a whole if any of its cells is needed."""
    writes = machine.table.cells.writes.items()
    needed = (each for each in writes if each[0] >= asked.after and asked.node in each[1].nodes)
    return held_rows(needed, asked.after, asked.pieces, machine.outboxes.last(asked.node))
