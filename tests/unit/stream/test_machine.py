"""A stream's partition as a state machine: replicas agree, retries are done once, what is volatile is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from dataplane.batch import locations
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import (
    Closed,
    Corrupt,
    DataplaneError,
    LeaseExpired,
    Misuse,
    NotReady,
    OwnerDied,
    ProtocolMismatch,
)
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.keys import Keys
from dataplane.stream.machine import StreamMachine
from dataplane.stream.packing import PackedIntegers, pack
from dataplane.stream.page import PAGE
from dataplane.stream.rows import StreamRows
from dataplane.stream.sampler import CompleteGroups
from dataplane.stream.settings import StreamSettings
from dataplane.stream.snapshot_format import ColumnsState, SavedStreamState, open_sealed, seal
from tests.cases import each_case
from tests.unit.stream.example_streams import stored

INT, INTS = Field("dense", "int64", ()), Field("ragged", "int64", (None,))
SETTINGS = StreamSettings(("train", "score"), max_deliveries=2)


def at(*rows: int) -> Any:
    return np.array(rows, np.int64)


class Partition:
    """A leader and two followers, one of which comes back from a snapshot after each command: all have one state."""

    def __init__(self, settings: StreamSettings = SETTINGS) -> None:
        self.machines = [StreamMachine("s", settings, "m") for _ in range(3)]
        self.term = 1
        self.now = 100.0
        self.shards = 0
        self.sequences = 0
        self.log: list[bytes] = []
        self.lives = [0, 0]

    @property
    def leader(self) -> StreamMachine:
        return self.machines[0]

    def ref(self, rows: int, *columns: str, node: bytes = b"the-node") -> BatchRef:
        self.shards += 1
        return ref_to(node, rows, [(name, INT, 8 * rows, self.shards, i) for i, name in enumerate(columns)])

    def decide(self, request: r.StreamRequest) -> list[bytes] | r.StreamResult:
        decision = self.leader.decide(r.encode_request(request), self.term, self.now)
        return list(decision.commands) or r.decode_result(decision.result)

    def commit(self, command: bytes) -> r.StreamResult:
        self.log.append(command)
        results = {machine.apply(command) for machine in self.machines}
        assert len(results) == 1
        states = {machine.snapshot() for machine in self.machines}
        assert len(states) == 1, command
        self.machines[2].restore(states.pop())
        assert self.machines[2].snapshot() == self.machines[0].snapshot()
        return r.decode_result(results.pop())

    def ask(self, request: r.StreamRequest, *, tick: bool = True) -> Any:
        """The answer, once all that follows from it is done."""
        try:
            result = self.decide(request)
            if isinstance(result, list):
                result = [self.commit(command) for command in result][-1]
        finally:
            while tick and self.leader.deadline(self.now) <= self.now:
                self.ask(r.Tick(), tick=False)
        if isinstance(result, r.CommandRefused):
            raise result.error
        return result

    def sequence(self) -> int:
        self.sequences += 1
        return self.sequences

    def append(self, rows: int, *columns: str, client: str = "p", **said: Any) -> Any:
        versions = said.pop("versions", np.zeros(rows, np.int64))
        ref = said.pop("ref", None) or self.ref(rows, *(columns or ("x",)))
        sequence = said.pop("sequence", None) or self.sequence()
        answer = self.ask(r.Append(client=client, sequence=sequence, ref=ref, versions=versions, **said))
        assert isinstance(answer, r.AppendResult)
        return answer

    def consume(self, task: str = "train", rows: int = 100, client: str = "c", **said: Any) -> r.Delivered:
        columns = said.pop("columns", ("x",))
        answer = self.ask(r.Consume(client=client, task=task, columns=columns, rows=rows, **said))
        assert isinstance(answer, r.Delivered)
        return answer

    def ack(self, grant: int, client: str = "c") -> None:
        self.ask(r.Ack(client=client, sequence=self.sequence(), grant=grant))

    def nack(self, grant: int, client: str = "c") -> None:
        self.ask(r.Nack(client=client, sequence=self.sequence(), grant=grant))

    def fail_over(self) -> None:
        self.leader.forget()
        self.machines[:2] = self.machines[1], self.machines[0]
        self.leader.forget()
        self.term += 1
        self.now -= 50.0  # another host's clock


@pytest.fixture
def part() -> Partition:
    return Partition()


def test_reads_are_served_by_the_leader_without_a_command(part: Partition) -> None:
    part.append(2, "x", "y", groups=["g", "g"], keys=["k", "l"], digest=b"d", versions=at(3, 4), tags={"t": [1, 2]})
    part.append(1, "x", lengths={"x": at(7)})
    part.now += 2.0
    shown = part.ask(r.Look(task="train", columns=("x",), most=9, tags=("t",)))
    assert (shown.rows.tolist(), shown.version.tolist(), shown.tags) == ([0, 1, 2], [3, 4, 0], {"t": [1, 2, None]})
    assert (shown.left, shown.whole, shown.closed, shown.latest) == (3, True, False, 4)
    look = r.Look(task="train", columns=("x",), most=9, seen=shown.changes)
    with pytest.raises(NotReady):
        part.ask(look)
    tried = part.leader.version
    assert not part.leader.serves(r.encode_request(look), tried)
    part.append(1, "x")
    assert part.leader.serves(r.encode_request(look), tried)
    assert len(part.ask(look).rows) == 4
    part.fail_over()
    assert len(part.ask(look).rows) == 4, "another leader's changes are later ones"
    found = part.ask(r.Find(keys=["l", "no", "~m.2", "k"]))
    assert found.rows.tolist() == [1, -1, 2, 0]
    assert part.ask(r.Find(keys=["k"], digest=b"d")).rows.tolist() == [0]
    assert part.ask(r.Find(keys=["l"], digest=b"d")).rows.tolist() == [-1]
    values = part.ask(r.Measure()).values
    assert (values["rows"], values["task"]["train"]["pending"], values["waiting"]) == (4, 4, 0)
    for _ in range(2):
        part.nack(part.consume(rows=3).grant)
    letters = part.ask(r.ListDeadLetters(task="train", most=2))
    assert (letters.rows.tolist(), letters.ref.columns, letters.keys) == ([0, 1], ("x", "y"), ["k", "l"])
    assert part.ask(r.ListDeadLetters(task="score", most=2)).ref is None


def test_a_replica_recovers_while_a_stream_is_restored(part: Partition) -> None:
    """A replica comes back from a snapshot after each command, also between rows in progress and their columns."""
    part.append(PAGE - 1, groups=["g"] * (PAGE - 1))
    begun = part.ask(
        r.Append(
            client="p",
            sequence=part.sequence(),
            ref=part.ref(1, "x"),
            versions=at(3),
            keys=["begun"],
            begin=(7, 10.0, "x"),
            digest=b"d",
        )
    )
    part.append(4, groups=["g"] * 4)
    part.nack(part.consume("score", rows=3).grant)
    taken = part.ask(r.TakeSnapshot(client="c"))
    assert taken.pages == [0, 1]

    again = Partition()
    again.ask(r.Restore(client="c", sequence=1, head=taken.head))
    for page in taken.pages:
        rows = part.ask(r.ReadSnapshot(client="c", snapshot=taken.snapshot, first=page * PAGE, count=PAGE))
        again.ask(r.RestoreBlock(client="c", sequence=again.sequence() + 9, block=rows.block))
        for of, task, ref in rows.columns:
            again.ask(r.RestoreColumnBatch(client="c", sequence=again.sequence() + 9, rows=of, task=task, ref=ref))
    again.ask(r.FinishRestore(client="c", sequence=99))
    again.fail_over()
    assert list(again.leader.leased.partition.rows.pages) == [0, 1]
    assert again.leader.leased.partition.unfinished.begun.keys() == {begun.first}
    whole = again.consume(rows=PAGE + 3)
    assert whole.rows.tolist() == [*range(PAGE - 1), *range(PAGE, PAGE + 4)]


def test_clients_of_an_ended_node_are_removed_with_their_leases(part: Partition) -> None:
    part.append(2, client="one/1/1")
    held = part.consume(client="one/1/2")
    part.append(1, client="one/2/1")
    part.ask(r.EndClients(clients="one/1/"))
    assert part.leader.sessions.producers == ["one/2/1"]
    assert part.consume().rows.tolist() == [0, 1, 2]
    with pytest.raises(LeaseExpired):
        part.ack(held.grant, "one/1/2")


def test_a_replaced_column_is_released_after_its_last_reader(part: Partition) -> None:
    part.append(1)
    for task, number in (("train", 1), ("train", 2)):
        given = part.consume(task)
        if number == 2:
            reader = part.consume("score", columns=("x", "z"))
        holds = np.full(1, given.holds)
        ref = part.ref(1, "z", node=b"node-z-%d" % number)
        part.ask(r.Extend(client="c", sequence=part.sequence(), ref=ref, rows=given.rows, holds=holds))
        if number == 1:
            part.nack(given.grant)
    assert not part.leader.waiting()
    assert len(list(part.leader.leased.replaced)) == 1
    part.ack(given.grant)
    assert not part.leader.waiting()
    part.ack(reader.grant)
    assert not list(part.leader.leased.replaced)
    assert b"node-z-1".hex() in part.leader.waiting()


def test_a_returned_node_appends_new_columns_and_its_lost_rows_stay_lost(part: Partition) -> None:
    part.append(1, keys=["old"], ref=part.ref(1, "x", node=b"node-one"))
    late = part.ref(1, "x", node=b"node-one")
    ((_, first),) = part.ref(1, "x", node=b"node-one").shards()
    part.ask(r.Lose(node=b"node-one"))
    part.ask(r.Return(node=b"node-one", first=first))
    part.fail_over()
    with pytest.raises(OwnerDied):
        part.append(1, ref=late)
    assert part.append(1, keys=["new"], ref=part.ref(1, "x", node=b"node-one")).new
    assert part.consume().rows.tolist() == [1]
    part.ask(r.Lose(node=b"node-one"))
    assert not len(part.leader.leased.partition.rows.all())


def test_links_to_shards_that_a_restarted_node_has_lost_are_lost(part: Partition) -> None:
    """The number of a link is above those of all shards."""
    part.append(1, ref=(early := link_to(part.ref(1, "x", node=b"node-one"))))
    late, later = (link_to(part.ref(1, "x", node=b"node-one")) for _ in range(2))
    first = locations.shard_of(later.shards()[0][1])
    part.ask(r.Lose(node=b"node-one", before=first))
    assert list(part.leader.leased.lost) == [0]
    for lost in (early, late):
        with pytest.raises(OwnerDied):
            part.append(1, ref=lost)
    assert part.append(1, ref=later).new


def link_to(ref: BatchRef) -> BatchRef:
    """The same rows, by links to their shards."""
    return locations.numbered(ref, lambda key: locations.linked(key[1], 1))


def test_a_copy_on_a_node_that_was_lost_before_the_append_is_not_counted(part: Partition) -> None:
    owner, other = b"node-one", b"node-two"
    part.ask(r.Lose(node=other))
    part.append(1, ref=part.ref(1, "x", node=owner), nodes=(other,))
    part.ask(r.Return(node=other, first=100))
    part.ask(r.Lose(node=owner))
    assert (part.leader.leased.partition.rows.count, list(part.leader.leased.lost)) == (0, [0])


@each_case("columns", [("x", "adv"), ("x", "reward")], ids=["of each other", "the same"])
def test_a_dead_letter_of_a_closed_stream_expires_for_all_tasks_that_wait_for_its_columns(columns: Any) -> None:
    part = Partition(StreamSettings(("reward", "adv", "actor"), max_deliveries=1))
    part.append(1, "x")
    part.nack(part.consume("reward").grant)
    part.ask(r.Close(client="p", sequence=part.sequence()))
    for task, asked in (("adv", ("x", "reward")), ("actor", columns), ("adv", ("x", "reward"))):
        with pytest.raises(NotReady):
            part.consume(task, columns=asked)
    for task in ("adv", "actor"):
        with pytest.raises(Closed):
            part.consume(task, columns=("x", "reward"))


def test_replicas_agree_on_a_group_of_which_rows_were_done_dropped_and_retried() -> None:
    part = Partition(StreamSettings(("train", "score"), max_deliveries=1, group_size=3))
    part.append(3, groups=["g"] * 3)
    part.ack(part.consume("train", rows=1).grant)
    part.ack(part.consume("score", rows=1, sampler=None, chosen=at(1)).grant)
    part.ask(r.Drop(client="c", sequence=part.sequence(), rows=at(0, 1)))
    part.append(1, groups=["g"])
    part.nack(part.consume("train").grant)
    retry = r.Retry(client="c", sequence=part.sequence(), task="train")
    assert part.ask(retry).rows == part.ask(retry).rows == 2, "once, and the answer again"
    assert part.consume("train").rows.tolist() == [2, 3]


def test_a_stream_that_was_cleared_is_closed(part: Partition) -> None:
    part.append(1)
    part.ask(r.Clear(client="p", sequence=part.sequence()))
    with pytest.raises(Closed):
        part.consume()


def test_row_ages_are_not_overestimated_after_a_failover(part: Partition) -> None:
    part.append(1, groups=["a"])
    part.now += 3.0
    part.append(1)
    part.fail_over()
    part.ask(r.Tick())
    part.now += 4.0
    with pytest.raises(NotReady):
        part.consume(sampler=CompleteGroups(2, timeout=7.5))
    part.now += 1.0
    with pytest.raises(NotReady):
        part.consume(sampler=CompleteGroups(2, timeout=7.5))
    assert part.leader.leased.partition.progress.tally(0)["expired"] == 1


def test_an_extend_with_too_few_lengths_is_refused_and_changes_nothing(part: Partition) -> None:
    part.append(2)
    before = part.leader.snapshot()
    lengths = {"y": np.ones(1, np.int64)}
    extend = r.Extend(rows=at(0, 1), ref=part.ref(2, "y"), lengths=lengths, holds=np.empty(0, np.int64))
    with suppress(DataplaneError, IndexError):
        part.leader.apply(c.encode(extend))
    assert part.leader.snapshot() == before


@each_case(
    "broken",
    [
        lambda state: b"x",
        lambda state: state[:-1],
        lambda state: state[:8] + b"\x09" + state[9:],
        lambda state: state[:40] + bytes([state[40] ^ 1]) + state[41:],
    ],
)
def test_an_invalid_stream_snapshot_is_corrupt_and_changes_nothing(part: Partition, broken: Any) -> None:
    part.append(3)
    state = part.leader.snapshot()
    with pytest.raises(Corrupt):
        part.leader.restore(broken(state))
    assert part.leader.snapshot() == state, "nothing is overwritten"


def _layer(index: list[int]) -> Callable[[ColumnsState], None]:
    return lambda columns: setattr(columns.layers[0], "index", pack(np.array(index)))


def _hold(hold: PackedIntegers) -> Callable[[ColumnsState], None]:
    return lambda columns: setattr(columns.batches[0], "hold", hold)


@each_case(
    "changed",
    [
        _layer([0, 1, 3]),
        _layer([0, -1, 2]),
        _hold(PackedIntegers(2)),
        _hold(PackedIntegers(1, 1 << 63)),
        _hold(PackedIntegers(1, step=None, code="<f8", data=bytes(8))),
    ],
)
def test_a_snapshot_with_columns_that_contradict_each_other_is_corrupt(part: Partition, changed: Any) -> None:
    part.append(3)
    before = part.leader.snapshot()
    state = open_sealed(before, "s", SavedStreamState)
    assert seal(state) == before
    changed(state.columns)
    with pytest.raises(Corrupt):
        part.leader.restore(seal(state))
    assert part.leader.snapshot() == before, "nothing is overwritten"


def test_a_snapshot_of_another_stream_is_corrupt(part: Partition) -> None:
    other = StreamMachine("other", SETTINGS)
    with pytest.raises(Corrupt, match="'other'"):
        part.leader.restore(other.snapshot())
    with pytest.raises(Corrupt):
        part.leader.apply(b"\x92\x63")
    with pytest.raises(ProtocolMismatch):
        part.leader.decide(b"\x92\x63", 1, 0.0)
    with pytest.raises(ProtocolMismatch):
        part.leader.decide(r.encode_request(r.Append(ref=part.ref(1, "x"), versions=at(0))), 1, 0.0)


def test_an_unopened_partition_is_opened_once() -> None:
    part = Partition()
    part.machines = [StreamMachine("s") for _ in range(3)]
    part.ask(r.Open(settings=SETTINGS, mark="g", first=1 << 40))
    assert part.append(1).first == 1 << 40
    part.ask(r.Open(settings=SETTINGS, mark="other"))
    part.fail_over()
    assert part.ask(r.Find(keys=[f"~g.{1 << 40}"])).rows.tolist() == [1 << 40]
    assert part.consume().rows.tolist() == [1 << 40]


# What rows are called, and which append is the same again.


def named(*keys: str, first: int = 0) -> Keys:
    known = Keys("m")
    known.add(keys, first, b"digest")
    return known


@each_case("key", ["c", "~", "~m.", "~m.5", "~m.-1", "~m.x", "~m.²", "~m." + "9" * 19, "~3", "~n.3", ""])
def test_invalid_row_keys_are_refused(key: str) -> None:
    with pytest.raises(Misuse, match="there is no row"):
        named("a", first=5).numbers([key])


# Where the columns of rows are, and when the batches that brought them are done.


def found(rows: StreamRows, numbers: list[int], column: str) -> list[tuple[int, int]]:
    pieces = locations.pieces(rows.ref(np.array(numbers), [column]), column)
    return [(piece.shard, at) for piece in pieces for at in piece.rows.array().tolist()]


def shards(batches: list[ColumnBatch]) -> list[int]:
    return [batch.ref.shards()[0][1] for batch in batches]


def test_a_restored_row_has_no_columns_from_before_its_removal() -> None:
    """Its page is there still, for others: a row has moved away, and comes back."""
    rows, again = StreamRows(1), np.array([1])
    rows.append(stored(1, 2, "x"))
    rows.append(stored(2, 1, "x"))
    assert shards(rows.remove(again)) == []
    rows.restore(again)
    assert rows.holds(again, "x").tolist() == [-2]
    rows.extend(again, stored(3, 1, "x"), replace=False)
    assert found(rows, [0, 1, 2], "x") == [(1, 0), (3, 0), (2, 0)]
    assert shards(rows.remove(again)) == [3], "and the first batch is needed still"
    assert shards(rows.remove(np.array([0, 2]))) == [1, 2]


def test_empty_pages_are_removed_except_the_last_one() -> None:
    rows = StreamRows(1)
    rows.append(stored(1, 2 * PAGE + 1, "x"))
    rows.remove(np.arange(1, 2 * PAGE + 1))
    assert sorted(rows.pages) == [0, 2]
    assert rows.there(np.array([-1, 0, 1, PAGE, 2 * PAGE, 2 * PAGE + 1, 9 * PAGE])).tolist() == [False, True] + 5 * [
        False
    ]
    rows.append(stored(2, 1, "x"))
    assert found(rows, [2 * PAGE + 1], "x") == [(2, 0)]
