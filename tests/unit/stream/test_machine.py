"""A stream's partition as a state machine: replicas agree, retries are done once, what is volatile is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import (
    Backpressure,
    Closed,
    Corrupt,
    DataplaneError,
    LeaseExpired,
    LimitExceeded,
    Misuse,
    NotReady,
    OwnerDied,
    ProtocolMismatch,
    Rejected,
)
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.sampler import CompleteGroups, Fifo, Freshest
from dataplane.stream.settings import Settings
from tests.cases import each_case

INT, INTS = Field("dense", "int64", ()), Field("ragged", "int64", (None,))
SETTINGS = Settings(("train", "score"), max_deliveries=2)


def at(*rows: int) -> Any:
    return np.array(rows, np.int64)


class Partition:
    """A leader and two followers, one of which comes back from a snapshot after each command: all have one state."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
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
        return BatchRef.of(node, rows, [(name, INT, 8 * rows, self.shards, i) for i, name in enumerate(columns)])

    def decide(self, request: r.AnyRequest) -> list[bytes] | r.AnyResult:
        decision = self.leader.decide(r.encode_request(request), self.term, self.now)
        return list(decision.commands) or r.decode_result(decision.result)

    def commit(self, command: bytes) -> r.AnyResult:
        self.log.append(command)
        results = {machine.apply(command) for machine in self.machines}
        assert len(results) == 1
        states = {machine.snapshot() for machine in self.machines}
        assert len(states) == 1, command
        self.machines[2].restore(states.pop())
        assert self.machines[2].snapshot() == self.machines[0].snapshot()
        return r.decode_result(results.pop())

    def ask(self, request: r.AnyRequest, *, tick: bool = True) -> Any:
        """The answer, once all that follows from it is done."""
        try:
            result = self.decide(request)
            if isinstance(result, list):
                result = [self.commit(command) for command in result][-1]
        finally:
            while tick and self.leader.deadline(self.now) <= self.now:
                self.ask(r.Tick(), tick=False)
        if isinstance(result, r.Refused):
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
        assert isinstance(answer, r.Appended)
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


def test_rows_are_appended_delivered_and_done_everywhere(part: Partition) -> None:
    given_ref = part.ref(3, "x", "y")
    said: dict[str, Any] = {"groups": ["a", "a", "b"], "tags": {"t": [1, None, "z"]}}
    assert part.append(3, ref=given_ref, **said) == r.Appended(0, 3, True)
    assert part.leader.holders() == [b"the-node".hex()]
    given = part.consume(columns=("x",))
    assert (given.rows.tolist(), given.groups, given.tags) == ([0, 1, 2], ["a", "a", "b"], {"t": [1, None, "z"]})
    assert given.ref.columns == ("x",)
    with pytest.raises(NotReady):
        part.consume()
    part.ack(given.grant)
    part.ack(part.consume("score").grant)
    assert [len(machine.home.books.rows.all()) for machine in part.machines] == [0, 0, 0]
    (node,) = part.leader.waiting()
    assert [machine.outbox(node, 9) for machine in part.machines] == [((given_ref.encode(),), 1)] * 3
    assert not part.leader.holders()


def test_a_retry_is_answered_as_the_first(part: Partition) -> None:
    ref = part.ref(2, "x")
    first = part.append(2, ref=ref, sequence=7)
    assert part.append(2, ref=ref, sequence=7) == first
    part.fail_over()
    assert part.append(2, ref=ref, sequence=7) == first
    assert len(part.leader.home.books.rows.all()) == 2
    for _ in range(20):
        part.append(1, sequence=100 + part.sequence())
    with pytest.raises(Rejected):
        part.append(2, ref=ref, sequence=7)


def test_a_retry_of_what_is_on_its_way_waits_for_it(part: Partition) -> None:
    part.append(1)
    given = part.consume()
    ack = r.Ack(client="c", sequence=1, grant=given.grant)
    first, again = part.decide(ack), part.decide(ack)
    assert first == again, "it isn't answered before it is committed"
    other = part.decide(r.Ack(client="c", sequence=2, grant=given.grant))
    assert isinstance(first, list)
    assert isinstance(other, list), "nor under another sequence"
    assert [part.commit(command) for command in (*first, *first, *other)] == [r.Done()] * 3


def test_a_command_that_was_decided_and_can_not_be_done_changes_nothing(part: Partition) -> None:
    asked = [
        r.Append(client=c, sequence=1, ref=part.ref(1, "x"), versions=at(0), keys=["k"], digest=c.encode())
        for c in ("p", "q")
    ]
    commands = [part.decide(each) for each in asked]
    results = [part.commit(command) for each in commands if isinstance(each, list) for command in each]
    assert results[0] == r.Appended(0, 1, True)
    assert isinstance(results[1], r.Refused)
    assert isinstance(results[1].error, Misuse)
    with pytest.raises(Misuse):
        part.ask(asked[1])
    assert part.append(1, client="r", ref=asked[0].ref, keys=["k"], digest=b"p") == r.Appended(0, 1, False)


def test_leases_end_with_the_leader_and_acks_do_not(part: Partition) -> None:
    part.append(2)
    acked, held = part.consume(rows=1), part.consume(rows=1)
    part.ack(acked.grant)
    part.fail_over()
    with pytest.raises(LeaseExpired):
        part.ack(held.grant)
    again = part.consume()
    assert again.rows.tolist() == [1]
    assert again.grant > held.grant
    part.ack(again.grant)


def test_the_count_of_deliveries_survives(part: Partition) -> None:
    part.append(1)
    part.nack(part.consume().grant)
    part.fail_over()
    part.nack(part.consume().grant)
    with pytest.raises(NotReady):
        part.consume()
    assert part.leader.home.books.dead_letters() == ["train"]
    part.ask(r.Drop(client="c", sequence=part.sequence(), rows=at(0)))
    assert len(part.leader.home.books.rows.all()) == 0


def test_a_lease_that_runs_out_is_a_delivery(part: Partition) -> None:
    part.append(1)
    for _ in range(2):
        part.consume(lease_s=5.0)
        assert part.leader.deadline(part.now) == pytest.approx(part.now + 5.0)
        part.now += 5.0
        part.ask(r.Tick())
    assert part.leader.home.books.dead_letters() == ["train"]


def test_dropped_rows_go_when_nobody_holds_them(part: Partition) -> None:
    part.append(3)
    given = part.consume(rows=1)
    part.ask(r.Drop(client="c", sequence=part.sequence(), rows=at(0, 1)))
    assert part.leader.home.books.rows.all().tolist() == [0, 2]
    part.ack(given.grant)
    assert part.leader.home.books.rows.all().tolist() == [2]
    held = part.consume("score", rows=1)
    part.ask(r.Drop(client="c", sequence=part.sequence(), rows=at(2)))
    assert held.rows.tolist() == [2]
    part.fail_over()
    part.ask(r.Tick())
    assert not len(part.leader.home.books.rows.all())


def test_columns_come_from_who_holds_the_rows(part: Partition) -> None:
    part.append(2)
    given = part.consume()
    holds = np.full(2, given.holds)

    def extend(**said: Any) -> Any:
        ref = part.ref(2, "score")
        return part.ask(r.Extend(client="c", sequence=part.sequence(), ref=ref, rows=given.rows, holds=holds, **said))

    extend()
    with pytest.raises(Misuse):
        extend()
    extend(replace=True)
    part.fail_over()
    with pytest.raises(LeaseExpired):
        extend()
    holds[:] = part.consume().holds
    extend()  # in place of what the holder before brought, who has not acked
    assert part.consume("score", columns=("x", "score")).rows.tolist() == [0, 1]


def test_who_waits_is_asked_for_again_when_there_is_something(part: Partition) -> None:
    def wanted(**said: Any) -> bytes:
        return r.encode_request(r.Consume(client="c", task="train", columns=("x",), rows=2, **said))

    first, whole = wanted(), wanted(sampler=CompleteGroups(2))
    for request in (first, whole):
        with pytest.raises(NotReady):
            part.leader.decide(request, part.term, part.now)
    assert not part.leader.serves(first, part.now)
    part.append(1, groups=["g"])
    assert part.leader.serves(first, part.now)
    assert part.leader.serves(whole, part.now), "it may be served"
    with pytest.raises(NotReady):
        part.leader.decide(whole, part.term, part.now)
    assert not part.leader.serves(whole, part.now), "not before something changes"
    part.append(1, groups=["g"])
    assert part.leader.serves(whole, part.now)
    given = part.consume()
    assert not part.leader.serves(first, part.now)
    part.nack(given.grant)
    assert part.leader.serves(first, part.now)
    part.ask(r.Close(client="c", sequence=part.sequence()))
    part.ack(part.consume().grant)
    assert part.leader.serves(first, part.now), "to be told that there is nothing more"
    with pytest.raises(Closed):
        part.leader.decide(first, part.term, part.now)


def test_who_waits_to_append_is_asked_for_again_when_there_is_room() -> None:
    part = Partition(Settings(("train",), max_rows=2))
    part.append(2)
    append = r.encode_request(r.Append(client="p", sequence=9, ref=part.ref(1, "x"), versions=at(0)))
    admit = r.encode_request(r.Admit(client="p", rows=1, nbytes=8, version=0))
    assert not part.leader.serves(append, part.now)
    assert not part.leader.serves(admit, part.now)
    part.ack(part.consume(rows=1).grant)
    assert part.leader.serves(append, part.now)
    assert part.leader.serves(admit, part.now)


def test_leaders_tell_what_there_is_without_a_command(part: Partition) -> None:
    part.append(2, "x", "y", groups=["g", "g"], keys=["k", "l"], digest=b"d", versions=at(3, 4), tags={"t": [1, 2]})
    part.append(1, "x", lengths={"x": at(7)})
    part.now += 2.0
    shown = part.ask(r.Look(task="train", columns=("x",), most=9, tags=("t",)))
    assert (shown.rows.tolist(), shown.version.tolist(), shown.tags) == ([0, 1, 2], [3, 4, 0], {"t": [1, 2, None]})
    assert (shown.left, shown.whole, shown.closed, shown.latest) == (3, True, False, 4)
    look = r.Look(task="train", columns=("x",), most=9, seen=shown.changes)
    with pytest.raises(NotReady):
        part.ask(look)
    assert not part.leader.serves(r.encode_request(look), part.now)
    part.append(1, "x")
    assert part.leader.serves(r.encode_request(look), part.now)
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
    letters = part.ask(r.DeadLetters(task="train", most=2))
    assert (letters.rows.tolist(), letters.ref.columns, letters.keys) == ([0, 1], ("x", "y"), ["k", "l"])
    assert part.ask(r.DeadLetters(task="score", most=2)).ref is None


def test_a_snapshot_is_read_while_rows_go_and_their_columns_stay(part: Partition) -> None:
    part.append(2, keys=["k", "l"], groups=["g", "h"], versions=at(1, 2))
    part.ack(part.consume(rows=1).grant)
    taken = part.ask(r.TakeSnapshot(client="c"))
    for task in SETTINGS.tasks:
        part.ack(part.consume(task).grant)
    assert not part.leader.waiting(), "it may be read still"
    rows = part.ask(r.ReadSnapshot(client="c", snapshot=taken.snapshot, first=0, count=10))
    assert rows.block.keys == ["k", "l"]
    with pytest.raises(LeaseExpired):
        part.ask(r.ReadSnapshot(client="d", snapshot=taken.snapshot, first=0, count=10))
    part.ask(r.ReleaseSnapshot(client="c", snapshot=taken.snapshot))
    (node,) = part.leader.waiting()
    assert len(part.leader.outbox(node, 9)[0]) == 1

    again = Partition()
    again.ask(r.Restore(client="c", sequence=1, head=taken.head))
    again.ask(r.PutBack(client="c", sequence=2, block=rows.block))
    for of, task_number, ref in rows.columns:
        again.ask(r.PutColumns(client="c", sequence=again.sequence() + 9, rows=of, task=task_number, ref=ref))
    again.ask(r.FinishRestore(client="c", sequence=99))
    assert again.consume("train").keys == ["l"]
    assert again.consume("score").keys == ["k", "l"]
    again.fail_over()
    assert again.append(1).first > taken.head.following
    with pytest.raises(Misuse):
        again.ask(r.Restore(client="c", sequence=100, head=taken.head))


def test_snapshots_are_few_and_go_with_their_client_and_their_leader(part: Partition) -> None:
    part.append(1)
    taken = [part.ask(r.TakeSnapshot(client="node/1/1")) for _ in range(4)]
    with pytest.raises(LimitExceeded):
        part.ask(r.TakeSnapshot(client="node/1/1"))
    part.ask(r.TakeSnapshot(client="node/2/1"))
    for task in SETTINGS.tasks:
        part.ack(part.consume(task).grant)
    part.ask(r.LeaveAll(clients="node/1/"))
    assert not part.leader.waiting()
    part.ask(r.Leave(client="node/2/1"))
    assert part.leader.waiting()
    part.ask(r.TakeSnapshot(client="c"))
    part.fail_over()
    assert part.leader.waiting()
    with pytest.raises(LeaseExpired):
        part.ask(r.ReadSnapshot(client="node/1/1", snapshot=taken[0].snapshot, first=0, count=1))


def test_a_node_that_ended_takes_its_clients_along(part: Partition) -> None:
    part.append(2, client="one/1/1")
    held = part.consume(client="one/1/2")
    part.append(1, client="one/2/1")
    part.ask(r.LeaveAll(clients="one/1/"))
    assert part.leader.sessions.producers == ["one/2/1"]
    assert part.consume().rows.tolist() == [0, 1, 2]
    with pytest.raises(LeaseExpired):
        part.ack(held.grant, "one/1/2")


def test_what_was_replaced_stays_while_somebody_reads_it(part: Partition) -> None:
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
    assert len(part.leader.home.kept) == 1
    part.ack(given.grant)
    assert not part.leader.waiting()
    part.ack(reader.grant)
    assert not part.leader.home.kept
    assert b"node-z-1".hex() in part.leader.waiting()


def test_what_was_replaced_goes_when_its_readers_leader_has(part: Partition) -> None:
    part.append(1)
    given = part.consume()
    extend = {"rows": given.rows, "holds": np.full(1, given.holds)}
    part.ask(r.Extend(client="c", sequence=part.sequence(), ref=part.ref(1, "z", node=b"node-z-1"), **extend))
    part.consume("score", columns=("z",))
    part.ask(r.Extend(client="c", sequence=part.sequence(), ref=part.ref(1, "z"), replace=True, **extend))
    assert not part.leader.waiting()
    part.fail_over()
    part.ask(r.Tick())
    assert list(part.leader.waiting()) == [b"node-z-1".hex()]


def test_entries_are_numbered_for_each_node_and_told_once(part: Partition) -> None:
    nodes = (b"node-one", b"node-two")
    for copies in ((), (nodes[1],), (), ()):
        part.append(1, ref=part.ref(1, "x", node=nodes[0]), nodes=copies)
    for task in SETTINGS.tasks:
        part.ack(part.consume(task, rows=3).grant)
    one, two = (node.hex() for node in nodes)
    assert sorted(part.leader.waiting()) == sorted((one, two))
    entries, last = part.leader.outbox(one, 2)
    assert (len(entries), last) == (2, 2)
    assert part.leader.outbox(two, 9) == (entries[1:], 1)
    part.ask(r.decode_request(part.leader.telling(one, last)))
    part.ask(r.decode_request(part.leader.telling(one, last)))
    part.fail_over()
    assert part.leader.outbox(one, 2)[1] == 3
    part.ask(r.decode_request(part.leader.losing(one)))
    assert list(part.leader.waiting()) == [two]
    assert part.leader.holders() == []
    (lost,) = part.ask(r.TakeLost(client="c", sequence=part.sequence(), most=9)).rows
    assert lost[0] == 3


def test_columns_of_an_append_that_is_refused_or_was_made_are_in_no_outbox(part: Partition) -> None:
    part.append(1, keys=["k"], digest=b"d")
    with pytest.raises(Misuse):
        part.append(1, keys=["k"], digest=b"e")
    assert not part.append(1, keys=["k"], digest=b"d").new
    given = part.consume()
    for _ in range(2):
        extend = r.Extend(client="c", sequence=part.sequence(), ref=part.ref(1, "x"), rows=given.rows)
        with pytest.raises(Misuse):
            part.ask(extend)
    assert not part.leader.waiting()
    assert part.leader.outboxes.holders == {b"the-node": 1}


def test_limits_hold_over_what_is_on_its_way(part: Partition) -> None:
    part = Partition(Settings(("train",), max_rows=4))
    asked = [r.Append(client="p", sequence=n, ref=part.ref(2, "x"), versions=at(0, 0)) for n in (8, 9, 10)]
    first, second = part.decide(asked[0]), part.decide(asked[1])
    with pytest.raises(Backpressure):
        part.decide(asked[2])
    assert isinstance(first, list)
    assert isinstance(second, list)
    part.commit(first[0])
    with pytest.raises(Backpressure):
        part.decide(asked[2])
    part.commit(second[0])
    admit = r.Admit(client="p", rows=1, nbytes=8, version=0)
    with pytest.raises(Backpressure):
        part.ask(admit)
    part.ack(part.consume(rows=2).grant)
    admitted = part.ask(admit)
    assert isinstance(admitted, r.Admitted)
    with pytest.raises(Backpressure):
        part.ask(asked[2])
    assert part.append(1, ticket=admitted.ticket).first == 4
    part.ask(r.GiveBack(client="p", ticket=admitted.ticket))


def test_what_a_lost_node_alone_had_is_named_once(part: Partition) -> None:
    part.append(2, keys=["k", "l"], ref=part.ref(2, "x", node=b"node-one"), digest=b"d")
    part.append(1, groups=["g"], ref=part.ref(1, "x", node=b"node-one"), nodes=(b"node-two",))
    part.append(1, ref=part.ref(1, "x", node=b"node-two"), versions=at(3))
    given = part.consume()
    ack = part.decide(r.Ack(client="c", sequence=part.sequence(), grant=given.grant))
    part.ask(r.Lose(node=b"node-one"))
    part.ask(r.Lose(node=b"node-one"))
    assert isinstance(ack, list)
    assert isinstance(refused := part.commit(ack[0]), r.Refused)
    assert isinstance(refused.error, LeaseExpired)
    part.fail_over()
    take = r.TakeLost(client="c", sequence=part.sequence(), most=10)
    lost = part.ask(take)
    assert lost == r.LostRows([(0, "k", None, 0, 0), (1, "l", None, 0, 0)])
    assert part.ask(take) == lost, "its answer was lost"
    assert part.ask(r.TakeLost(client="c", sequence=part.sequence(), most=10)) == r.LostRows([])
    assert part.consume().rows.tolist() == [2, 3]
    late = part.ref(1, "x", node=b"node-one")
    with pytest.raises(OwnerDied):
        part.append(1, ref=late)
    assert part.append(1, ref=late, nodes=(b"node-two",)).new
    part.ask(r.Lose(node=b"node-two"))
    assert not len(part.leader.home.books.rows.all())


def test_a_node_that_comes_back_stores_columns_again_and_what_was_lost_stays_lost(part: Partition) -> None:
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
    assert not len(part.leader.home.books.rows.all())


def test_a_client_that_has_ended_is_forgotten(part: Partition) -> None:
    part.append(1, client="p")
    part.consume(client="c")
    part.ask(r.Leave(client="c"))
    assert part.consume(client="d").rows.tolist() == [0]
    assert "p" in part.leader.sessions.producers
    part.ask(r.Leave(client="p", ended=True))
    assert [machine.sessions.producers for machine in part.machines] == [[], [], []]


def test_settings_change_by_command(part: Partition) -> None:
    part.append(1)
    part.ask(r.Configure(settings=Settings(("train", "score"), max_rows=1)))
    with pytest.raises(Backpressure):
        part.append(1)
    with pytest.raises(Misuse):
        part.ask(r.Configure(settings=Settings(("train",))))
    part.ask(r.Clear(client="p", sequence=part.sequence()))
    with pytest.raises(Closed):
        part.consume()


def test_rows_are_never_taken_for_older_than_they_are(part: Partition) -> None:
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
    assert part.leader.home.books.progress.tally(0)["expired"] == 1


@each_case(
    "broken",
    [
        lambda state: b"x",
        lambda state: state[:-1],
        lambda state: state[:8] + b"\x09" + state[9:],
        lambda state: state[:40] + bytes([state[40] ^ 1]) + state[41:],
    ],
)
def test_what_is_no_snapshot_of_it_is_corrupt(part: Partition, broken: Any) -> None:
    part.append(3)
    state = part.leader.snapshot()
    with pytest.raises(Corrupt):
        part.leader.restore(broken(state))
    assert part.leader.snapshot() == state, "nothing is overwritten"


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


def steps(part: Partition, rng: Random) -> Iterator[None]:
    """Something that a user, a clock or a failure does, again and again."""
    grants: list[tuple[r.Delivered, str, str]] = []
    while True:
        lives = [b"node-%d%02d" % (at, life) for at, life in enumerate(part.lives)]
        what = rng.random()
        if what < 0.3:
            count = rng.randint(1, 4)
            said: dict[str, Any] = {}
            if rng.random() < 0.5:
                said["groups"] = [rng.choice("abcdefg") for _ in range(count)]
            if rng.random() < 0.4:
                said["keys"] = [f"k{rng.randrange(40)}-{i}" for i in range(count)]
                said["digest"] = b"%d" % rng.randrange(3)
            if rng.random() < 0.3:
                said["tags"] = {rng.choice("st"): [rng.choice([None, 1, "v"]) for _ in range(count)]}
            if rng.random() < 0.3:
                said["lengths"] = {"x": at(*(rng.randrange(9) for _ in range(count)))}
            node = rng.choice((*lives, b"node-333"))
            said["nodes"] = tuple(n for n in lives if rng.random() < 0.4)
            columns = rng.choice((("x",), ("x", "y"), ("y",)))
            part.append(
                count, ref=part.ref(count, *columns, node=node), versions=at(*[rng.randrange(5)] * count), **said
            )
        elif what < 0.55:
            task = rng.choice(SETTINGS.tasks)
            sampler = rng.choice((Fifo(), CompleteGroups(2, timeout=4.0), Freshest(2)))
            columns = rng.choice((("x",), ("y",), ("x", "z")))
            client = rng.choice("cd")
            given = part.consume(task, rng.randint(3, 12), client, columns=columns, sampler=sampler, lease_s=3.0)
            grants.append((given, task, client))
        elif what < 0.8 and grants:
            given, _, client = grants.pop(rng.randrange(len(grants)))
            if rng.random() < 0.3:
                part.ask(
                    r.Extend(
                        client=client,
                        sequence=part.sequence(),
                        ref=part.ref(len(given.rows), *rng.choice((("z",), ("z", "y")))),
                        rows=given.rows,
                        holds=np.full(len(given.rows), given.holds),
                        replace=rng.random() < 0.3,
                    )
                )
            if rng.random() < 0.6:
                part.ack(given.grant, client)
            else:
                seen = rng.random() < 0.8
                part.ask(r.Nack(client=client, sequence=part.sequence(), grant=given.grant, seen=seen))
        elif what < 0.86:
            rows = part.leader.home.books.rows.all()
            if len(rows):
                part.ask(r.Drop(client="c", sequence=part.sequence(), rows=at(*rng.sample(rows.tolist(), 1))))
        elif what < 0.88:
            part.ask(r.Drop(client="c", sequence=part.sequence(), groups=[rng.choice("abcdefg")]))
        elif what < 0.91:
            lost = rng.randrange(2)
            part.ask(r.Lose(node=lives[lost]))
            part.lives[lost] += 1
        elif what < 0.92:
            for node in [*part.leader.waiting()][:1]:
                _, last = part.leader.outbox(node, 2)
                part.ask(r.decode_request(part.leader.telling(node, last)))
        elif what < 0.93:
            part.ask(r.TakeLost(client="c", sequence=part.sequence(), most=2))
        elif what < 0.95:
            part.ask(r.Leave(client=rng.choice("cd"), ended=rng.random() < 0.3))
        elif what < 0.97:
            part.fail_over()
            grants.clear()
        else:
            part.now += 2.0
            part.ask(r.Tick())
        yield


@each_case("seed", range(2))
def test_replicas_have_one_state_whatever_happens(seed: int) -> None:
    part, rng = Partition(), Random(seed)
    happening = steps(part, rng)
    for _ in range(150):
        try:
            next(happening)
        except DataplaneError:
            happening = steps(part, rng)
    again = StreamMachine("s", SETTINGS, "m")
    for command in part.log:
        again.apply(command)
    assert again.snapshot() == part.leader.snapshot()
    counted(part.leader)


def counted(machine: StreamMachine) -> None:
    """What is counted of rows is what a look at all of them says."""
    books = machine.home.books
    assert books.nbytes == sum(ref.stored_nbytes for ref in books.rows.patches)
    needed: dict[str, int] = {}
    for patch in books.rows.all_patches():
        for node in {*patch.nodes, *patch.spares}:
            needed[node.hex()] = needed.get(node.hex(), 0) + 1
    assert {node.hex(): count for node, count in machine.outboxes.holders.items()} == needed


def test_a_partition_that_is_not_open_is_opened_once() -> None:
    part = Partition()
    part.machines = [StreamMachine("s") for _ in range(3)]
    part.ask(r.Open(settings=SETTINGS, mark="g", first=1 << 40))
    assert part.append(1).first == 1 << 40
    part.ask(r.Open(settings=SETTINGS, mark="other"))
    part.fail_over()
    assert part.ask(r.Find(keys=[f"~g.{1 << 40}"])).rows.tolist() == [1 << 40]
    assert part.consume().rows.tolist() == [1 << 40]
