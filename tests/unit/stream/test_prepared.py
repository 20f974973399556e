"""An ack in two phases: rows that are prepared are nobody's, neither done nor lost, until it is decided."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import Corrupt, LeaseExpired, NotReady
from dataplane.stream import requests as r
from dataplane.stream.books import Books
from dataplane.stream.packing import pack
from dataplane.stream.prepared import PreparedRows
from dataplane.stream.settings import Settings
from tests.unit.stream.test_machine import Partition, at


class Prepared(Partition):
    """`grant` is the last that was prepared."""

    grant = 0

    def prepare(self, grant: int, client: str = "c", sequence: int = 0) -> None:
        self.ask(r.Prepare(client=client, sequence=sequence or self.sequence(), grant=grant))
        self.grant = grant

    def conclude(self, *, keep: bool, client: str = "c", grant: int = 0) -> None:
        self.ask(r.Conclude(client=client, sequence=self.sequence(), grant=grant or self.grant, keep=keep))

    @property
    def rows(self) -> list[int]:
        return sorted(self.leader.home.books.rows.all().tolist())

    def lost(self) -> list[tuple[int, int]]:
        """Lost rows, and by which tasks they were acked."""
        return [
            (row, acked) for row, *_, acked in self.ask(r.TakeLost(client="j", sequence=self.sequence(), most=9)).rows
        ]


@pytest.fixture
def part() -> Prepared:
    """With four rows, of which "c" has prepared the first two for the task "train"."""
    partition = Prepared()
    partition.append(2)
    partition.append(2, ref=partition.ref(2, "x", node=b"another1"))
    partition.prepare(partition.consume(rows=2).grant)
    return partition


def test_they_are_given_to_nobody_of_the_task_and_to_others(part: Prepared) -> None:
    assert part.consume(lease_s=1e9).rows.tolist() == [2, 3]
    assert part.consume("score").rows.tolist() == [0, 1, 2, 3]
    part.now += 1e6
    with pytest.raises(NotReady):
        part.consume()


def test_those_that_are_not_kept_are_given_again_and_that_was_a_delivery(part: Prepared) -> None:
    part.conclude(keep=False)
    again = part.consume(rows=2)
    assert again.rows.tolist() == [0, 1]
    part.prepare(again.grant)
    part.conclude(keep=False)
    assert part.consume().rows.tolist() == [2, 3]
    assert part.leader.home.books.dead_letters() == ["train"]


def test_the_grant_is_over_and_its_columns_are_refused(part: Prepared) -> None:
    given = part.consume(rows=2)
    part.prepare(given.grant)
    extend = r.Extend(
        client="c", sequence=part.sequence(), ref=part.ref(2, "y"), rows=given.rows, holds=np.full(2, given.holds)
    )
    refused = (
        r.Ack(client="c", sequence=part.sequence(), grant=given.grant),
        r.Nack(client="c", sequence=part.sequence(), grant=given.grant),
        r.Renew(client="c", grant=given.grant),
        r.Prepare(client="c", sequence=part.sequence(), grant=given.grant),
        extend,
    )
    for request in refused:
        with pytest.raises(LeaseExpired):
            part.ask(request)
    part.conclude(keep=False)
    part.ack(part.consume(rows=2).grant)  # by another, say
    with pytest.raises(LeaseExpired):
        part.ask(extend)


@pytest.mark.parametrize("keep", [True, False])
def test_who_leads_next_has_them_prepared_too(part: Prepared, keep: bool) -> None:
    for _ in range(2):
        part.fail_over()
        with pytest.raises(NotReady):
            part.consume(min_rows=3)
    part.conclude(keep=keep)
    part.fail_over()
    assert part.consume().rows.tolist() == ([2, 3] if keep else [0, 1, 2, 3])
    places = part.leader.home.books.rows.places(at(0, 1))
    assert part.leader.home.books.progress.tries(places, 2)[0].tolist() == ([1, 1] if keep else [2, 2])


def test_what_was_decided_is_prepared_by_who_leads_when_it_is_committed(part: Prepared) -> None:
    given = part.consume(rows=2)
    command = part.decide(r.Prepare(client="c", sequence=9, grant=given.grant))
    assert isinstance(command, list)
    part.fail_over()
    part.commit(command[0])
    part.prepare(given.grant, sequence=9)  # asked again, it is answered as it was
    with pytest.raises(NotReady):
        part.consume()
    part.conclude(keep=True)
    assert part.consume("score", rows=9).rows.tolist() == [0, 1, 2, 3]


def test_a_grant_that_is_over_is_not_prepared(part: Prepared) -> None:
    late, forgotten = part.consume(rows=1, lease_s=5.0), part.consume(rows=1)
    part.now += 6.0
    part.ask(r.Tick())
    with pytest.raises(LeaseExpired):
        part.prepare(late.grant)
    with pytest.raises(LeaseExpired):
        part.prepare(forgotten.grant, client="somebody")
    part.fail_over()
    with pytest.raises(LeaseExpired):
        part.prepare(forgotten.grant)
    assert part.consume().rows.tolist() == [2, 3]


def test_what_another_has_prepared_or_nobody_has_is_not_settled(part: Prepared) -> None:
    with pytest.raises(LeaseExpired):
        part.conclude(keep=True, client="somebody")
    part.conclude(keep=False, client="somebody")
    with pytest.raises(NotReady):
        part.consume(min_rows=3)
    part.conclude(keep=False)
    part.conclude(keep=False)
    with pytest.raises(LeaseExpired):
        part.conclude(keep=True)
    assert part.consume().rows.tolist() == [0, 1, 2, 3]


def test_what_is_settled_after_its_client_was_taken_for_dead_is_refused_when_it_is_committed(part: Prepared) -> None:
    late = part.decide(r.Conclude(client="c", sequence=9, grant=part.grant, keep=True))
    part.ask(r.Leave(client="c", ended=True))
    assert isinstance(late, list)
    refused = part.commit(late[0])
    assert isinstance(refused, r.Refused)
    assert isinstance(refused.error, LeaseExpired)
    assert part.consume().rows.tolist() == [0, 1, 2, 3]


def test_a_process_that_ends_has_too_though_its_sequences_are_forgotten() -> None:
    part = Prepared()
    part.append(2)
    part.prepare(part.consume(client="n1/7/3").grant, client="n1/7/3")
    for machine in part.machines:
        machine.sessions.drop("n1/7/3")
    assert "n1/7" in set(part.leader.clients())
    part.ask(r.LeaveAll(clients="n1/7/"))
    assert part.consume().rows.tolist() == [0, 1]


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_lost_with_its_node_while_it_is_prepared_is_looked_at_when_it_is_decided(
    part: Prepared, keep: bool
) -> None:
    part.ask(r.Lose(node=b"the-node"))
    assert part.rows == [0, 1, 2, 3]
    assert part.lost() == []
    part.fail_over()
    part.conclude(keep=keep)
    assert part.rows == [2, 3]
    assert part.lost() == [(0, keep), (1, keep)]


def test_what_two_tasks_have_prepared_is_lost_with_the_last(part: Prepared) -> None:
    first = part.grant
    part.prepare(part.consume("score", rows=2).grant)
    part.ask(r.Lose(node=b"the-node"))
    part.conclude(keep=False)
    assert part.rows == [0, 1, 2, 3]
    part.conclude(keep=True, grant=first)
    assert part.rows == [2, 3]
    assert part.lost() == [(0, 1), (1, 1)]


def test_rows_that_are_lost_before_it_is_committed_are_not_prepared(part: Prepared) -> None:
    part.conclude(keep=False)
    given = part.consume()
    command = part.decide(r.Prepare(client="c", sequence=99, grant=given.grant))
    assert isinstance(command, list)
    part.ask(r.Lose(node=b"another1"))
    refused = part.commit(command[0])
    assert isinstance(refused, r.Refused)
    assert isinstance(refused.error, LeaseExpired)
    assert part.consume().rows.tolist() == [0, 1]


@pytest.mark.parametrize("keep", [True, False])
def test_those_that_are_dropped_go_when_it_is_decided(part: Prepared, keep: bool) -> None:
    part.ask(r.Drop(client="j", sequence=part.sequence(), rows=at(0, 1, 2)))
    assert part.rows == [0, 1, 3]
    part.fail_over()
    part.ask(r.Tick())
    assert part.rows == [0, 1, 3]
    part.conclude(keep=keep)
    assert part.rows == [3]


def test_a_state_of_rows_that_are_not_there_or_done_is_refused(part: Prepared) -> None:
    books = Books(Settings(("a",)), lambda patches: None, "m")
    with pytest.raises(ValueError, match="prepared"):
        PreparedRows(books, [(1, "c", 0, pack(at(7)))])
    good = part.leader.snapshot()
    for wrong in ((7, "c", 0, at(9)), (7, "c", 9, at(0)), (7, "c", 0, at(2))):
        if wrong[3][0] == 2:
            part.ack(part.consume().grant)
        part.leader.home.prepared._prepared[7] = wrong[1:]
        with pytest.raises(Corrupt):
            part.machines[1].restore(part.leader.snapshot())
        del part.leader.home.prepared._prepared[7]
    part.machines[1].restore(good)
    assert len(part.machines[1].home.prepared) == 1
