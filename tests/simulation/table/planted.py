"""Faults in the state machine of a table, each of which the simulator has to find. See `tests.simulation.planted`,
which has those of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.errors import OwnerDied
from dataplane.replication.outbox import Outboxes
from dataplane.replication.sessions import Sessions
from dataplane.table import machine, write_effects
from dataplane.table import requests as r
from dataplane.table.claims import Claims
from dataplane.table.machine import TableMachine
from dataplane.table.table import TableRows
from dataplane.table.write_effects import UnneededCells
from tests.simulation.planted import Plant


def a_command_is_done_twice(plant: Plant) -> None:
    plant(Sessions, "result", lambda self, producer, sequence: None)


def a_failover_forgets_what_was_taken(plant: Plant) -> None:
    forget = TableMachine.forget

    def volatile(self: Any) -> None:
        forget(self)
        self.table.release()

    plant(TableMachine, "forget", volatile)


def a_failover_loses_entries(plant: Plant) -> None:
    forget = TableMachine.forget

    def volatile(self: Any) -> None:
        forget(self)
        for node in self.outboxes:
            self.outboxes.confirm(node, self.outboxes.last(node))

    plant(TableMachine, "forget", volatile)


def a_snapshot_lacks(field: str, empty: Any) -> Callable[[Plant], None]:
    """A snapshot whose table lacks this."""

    def planted(plant: Plant) -> None:
        state = TableRows.state
        plant(TableRows, "state", lambda self: msgspec.structs.replace(state(self), **{field: empty(state(self))}))

    return planted


def a_snapshot_lacks_the_sequences(plant: Plant) -> None:
    plant(Sessions, "snapshot", lambda self: msgspec.msgpack.encode({}))


def a_snapshot_lacks_the_entries(plant: Plant) -> None:
    state = Outboxes.state
    plant(Outboxes, "state", lambda self: [msgspec.structs.replace(each, entries=[]) for each in state(self)])


def entries_are_numbered_anew(plant: Plant) -> None:
    """By who takes a snapshot."""
    state = Outboxes.state

    def anew(self: Any) -> Any:
        return [msgspec.structs.replace(each, last=len(each.entries)) for each in state(self)]

    plant(Outboxes, "state", anew)


def a_cell_that_is_replaced_is_not_told(plant: Plant) -> None:
    write = machine.answers.write
    plant(machine.answers, "write", lambda *given, **more: (write(*given, **more)[0], []))


def a_write_is_over_with_its_first_cell(plant: Plant) -> None:
    tell = write_effects.tell

    def over(cells: Any, outboxes: Any) -> None:
        tell([UnneededCells(each.written, each.columns, each.rows, done=True) for each in cells], outboxes)

    plant(machine.write_effects, "tell", over)


def a_row_is_taken_twice(plant: Plant) -> None:
    claimed = Claims.claimed
    plant(Claims, "claimed", lambda self, task, at: claimed(self, None, at))


def a_claim_is_made_again(plant: Plant) -> None:
    plant(Claims, "find", lambda self, task, claim_id: None)


def numbers_begin_anew_when_a_table_is_dropped(plant: Plant) -> None:
    drop = TableMachine._drop

    def anew(self: Any, asked: Any) -> None:
        drop(self, asked)
        self.table.next = 0

    plant(machine, "_APPLY", {**machine._APPLY, r.DropTable: anew})


def what_is_refused_has_changed_something(plant: Plant) -> None:
    """The columns are gone with their node, and the rows are made all the same."""
    write = TableMachine._write

    def after(self: Any, asked: Any) -> Any:
        try:
            return write(self, asked)
        except OwnerDied:
            self.table.upsert(["left"], None)
            raise

    plant(machine, "_APPLY", {**machine._APPLY, r.Upsert: after})


def a_read_sees_what_is_not_committed(plant: Plant) -> None:
    decide = TableMachine.decide

    def early(self: Any, request: bytes, term: int, now: float) -> Any:
        decision = decide(self, request, term, now)
        if decision.commands and isinstance(r.decode_request(request), r.ClearRows):
            self.table.clear(r.decode_request(request).keys)
        return decision

    plant(TableMachine, "decide", early)


FAULTS: dict[str, Callable[[Plant], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name[0].islower()
    and name != "a_snapshot_lacks"
}
FAULTS["a_snapshot_lacks_the_tags"] = a_snapshot_lacks("tags", lambda state: [None] * len(state.tags))
FAULTS["a_snapshot_lacks_what_was_taken"] = a_snapshot_lacks("tasks", lambda state: [])
FAULTS["a_snapshot_lacks_the_next_number"] = a_snapshot_lacks("next", lambda state: len(state.keys) and state.next)
