"""Faults in the stream's state machine, each of which the simulator has to find. See `tests.simulation.planted`, which
has those of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataplane.replication.outbox import Outboxes, OutboxState
from dataplane.stream import commands as c
from dataplane.stream import extension, leader, replicated
from dataplane.stream import requests as r
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.groups import GroupCounts
from dataplane.stream.keys import Keys
from dataplane.stream.leader import StreamLeader
from dataplane.stream.lease import Leases
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.machine import StreamMachine
from dataplane.stream.progress import PENDING, StreamProgress
from dataplane.stream.replicated import ReplicatedStream
from tests.simulation.planted import Plant
from tests.simulation.stream.columns import Columns


def an_ack_of_a_superseded_lease_is_taken(plant: Plant) -> None:
    give, end, find = Leases.give, Leases.end, Leases.find
    ever: dict[tuple[int, Any], Any] = {}

    def remember(self: Any, task: int, rows: Any, columns: Any, who: Any, lease_s: float, now: float) -> Any:
        grant = give(self, task, rows, columns, who, lease_s, now)
        ever[grant.number, who.client] = grant
        return grant

    def any_that_was(self: Any, number: int, client: Any, replica: int | None) -> Any:
        return ever.get((number, client)) or find(self, number, client, replica)

    plant(Leases, "give", remember)
    plant(Leases, "find", any_that_was)
    plant(Leases, "end", lambda self, grant, done=False: grant.number in self._grants and end(self, grant, done=done))


def a_command_is_done_twice(plant: Plant) -> None:
    """Within the machine, so that no sequence sees it."""
    settle = ReplicatedStream._settle

    def twice(self: Any, command: Any) -> None:
        settle(self, command)
        if command.state == PENDING and self.leased.partition.rows.there(command.rows).all():
            settle(self, command)

    plant(ReplicatedStream, "_settle", twice)


def a_nack_forgets_the_count(plant: Plant) -> None:
    give_back = StreamProgress.give_back

    def uncounted(self: Any, task: int, places: Any, versions: Any, most: int) -> Any:
        flags = give_back(self, task, places, versions, 1 << 8)
        self.unseen(task, places)
        return flags

    plant(StreamProgress, "give_back", uncounted)


def a_failover_keeps_the_leases_of_before(plant: Plant) -> None:
    """Their numbers: an ack of an old one is of another's now."""
    plant(leader, "_TERM", 0)


def a_failover_keeps_rows_leased(plant: Plant) -> None:
    plant(StreamProgress, "unlease", lambda self, places, task=None: None)


def rows_on_their_way_are_given_again(plant: Plant) -> None:
    """What is acked, and not committed."""
    decided = StreamLeader._decided

    def open_again(self: Any, asked: Any, term: int, now: float) -> Any:
        commands, result = decided(self, asked, term, now)
        partition = self.leased.partition
        for rows, task in [(each.rows, each.task) for each in commands if isinstance(each, c.SettleCommand)]:
            partition.progress.unlease(partition.rows.places(rows[partition.rows.there(rows)]), task)
        return commands, result

    plant(StreamLeader, "_decided", open_again)


def a_dropped_row_goes_where_nobody_holds_it(plant: Plant) -> None:
    """As each replica sees it, and not by command."""
    plant(LeasedRows, "_note_loose", lambda self, rows: self.partition.remove(self.partition.free(rows)))


def a_snapshot_lacks_the_keys(plant: Plant) -> None:
    plant(Keys, "state", lambda self, rows: (rows[:0], [], []))


def a_snapshot_lacks_what_was_dropped(plant: Plant) -> None:
    plant(StreamProgress, "mark_dropped", lambda self, places, flags: None)


def a_snapshot_lacks_the_count_of_deliveries(plant: Plant) -> None:
    restore = StreamProgress.restore
    plant(
        StreamProgress, "restore", lambda self, places, of, states, tries: restore(self, places, of, states, tries * 0)
    )


def a_snapshot_lacks_what_is_lost(plant: Plant) -> None:
    snapshot = StreamMachine.snapshot

    def without(self: Any) -> bytes:
        lost, self.leased.lost = self.leased.lost, {}
        try:
            return snapshot(self)
        finally:
            self.leased.lost = lost

    plant(StreamMachine, "snapshot", without)


def a_group_is_given_before_it_is_whole(plant: Plant) -> None:
    sizes = GroupCounts.sizes
    plant(
        GroupCounts,
        "sizes",
        lambda self, numbers, task: (sizes(self, numbers, task)[0], sizes(self, numbers, task)[1] + 1),
    )


def a_key_has_two_rows(plant: Plant) -> None:
    plant(Keys, "check", lambda self, keys: None)
    plant(Keys, "retried", lambda self, keys, digest: None)


def a_copy_is_taken_for_none(plant: Plant) -> None:
    plant(ColumnBatch, "lives", lambda self, there: all(there(*shard) for shard in self.ref.shards()))


def a_lost_row_is_not_named(plant: Plant) -> None:
    plant(LeasedRows, "_note_lost", lambda self, rows: None)


def a_lost_row_is_named_twice(plant: Plant) -> None:
    def told(self: Any, command: Any) -> r.LostRowsResult:
        lost = self.leased.lost
        return r.LostRowsResult([(row, *lost[row]) for row in list(lost)[: command.most]])

    plant(replicated, "_APPLY", {**replicated._APPLY, r.TakeLost: told})


def columns_of_an_old_holder_are_taken(plant: Plant) -> None:
    plant(extension, "_holder_again", lambda leased, rows, hold, columns: True)


def limits_forget_what_is_on_its_way(plant: Plant) -> None:
    append = StreamLeader._append

    def forgotten(self: Any, asked: Any, now: float) -> Any:
        command = append(self, asked, now)
        self.leased.admission.give_back(self._ticket)
        return command

    plant(leader, "_DECIDE", {**leader._DECIDE, r.Append: forgotten})


def an_entry_is_lost_with_its_leader(plant: Plant) -> None:
    """As a snapshot has it."""
    state = Outboxes.state
    plant(Outboxes, "state", lambda self: [OutboxState(each.node, each.last, []) for each in state(self)])


def entries_are_numbered_anew(plant: Plant) -> None:
    """From 1, whenever all were told."""
    confirm = Outboxes.confirm

    def forgotten(self: Any, node: bytes, last: int) -> None:
        confirm(self, node, last)
        if node not in self._entries:
            self._last.pop(node, None)

    plant(Outboxes, "confirm", forgotten)


def who_is_told_twice_frees_twice(plant: Plant) -> None:
    settled = Columns.settled

    def again(self: Any, partition: int, name: str, last: int, entries: Any) -> None:
        self._told.pop((bytes.fromhex(name), partition), None)
        settled(self, partition, name, len(entries), entries)

    plant(Columns, "settled", again)


def a_copy_is_not_told(plant: Plant) -> None:
    release = Outboxes.release
    plant(Outboxes, "release", lambda self, entry, nodes: release(self, entry, nodes[:1]))


def columns_that_came_before_are_told(plant: Plant) -> None:
    """Of an append that was made again."""
    append = ReplicatedStream._do_append

    def told(self: Any, command: Any) -> Any:
        result = append(self, command)
        if isinstance(result, r.AppendResult) and not result.new:
            self.outboxes.release(command.ref.encode(), (command.ref.shards()[0][0], *command.nodes))
        return result

    plant(replicated, "_APPLY", {**replicated._APPLY, r.Append: told})


def appends_that_came_together_are_made_again(plant: Plant) -> None:
    """Where they, or some of them, were made before."""
    plant(ReplicatedStream, "known_parts", lambda self, parts: None)


FAULTS: dict[str, Callable[[Plant], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name[0].islower()
}
