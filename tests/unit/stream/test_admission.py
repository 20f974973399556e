"""Who is admitted to append, in which turn, and what a ticket is worth."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dataplane.errors import Closed, LimitExceeded
from dataplane.stream.admission import Admission, Entry, Held
from dataplane.stream.settings import Settings


@dataclass(eq=False)
class Asked:
    """What became of an entry."""

    tickets: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    entry: Entry = None  # type: ignore[assignment]

    @property
    def ticket(self) -> int:
        (ticket,) = self.tickets
        return ticket


class Gate:
    """The admission to a stream of which the test says what it holds."""

    def __init__(self, **limits: int) -> None:
        self.held = Held(0, 0, None)
        self.admission = Admission(Settings(("actor",), **limits), lambda: self.held)

    def ask(self, rows: int, *, nbytes: int = 0, version: int = 0, client: str = "p") -> Asked:
        asked = Asked()
        asked.entry = Entry(client, rows, nbytes, version, asked.tickets.append, asked.errors.append)
        self.admission.enter(asked.entry)
        return asked

    def come(self, asked: Asked) -> None:
        """What was admitted is in the stream."""
        self.held = Held(self.held.rows + asked.entry.rows, self.held.nbytes + asked.entry.nbytes, self.held.oldest)
        self.admission.give_back(asked.ticket)


def test_what_was_admitted_counts_until_it_comes_and_then_as_held() -> None:
    gate = Gate(max_rows=4)
    first, second = gate.ask(3), gate.ask(2)
    assert gate.admission.ticket(first.ticket) is first.entry
    assert (second.tickets, len(gate.admission)) == ([], 1)
    gate.come(first)
    assert gate.admission.ticket(first.ticket) is None
    assert second.tickets == []
    gate.held = Held(0, 0, None)
    gate.admission.let_in()
    assert second.tickets
    assert len(gate.admission) == 0


def test_a_ticket_is_given_back_once() -> None:
    gate = Gate(max_rows=4)
    first = gate.ask(4)
    for _ in range(3):
        gate.admission.give_back(first.ticket)
    assert gate.ask(4).tickets
    assert gate.ask(1).tickets == []


def test_nobody_passes_one_that_waits_for_room() -> None:
    gate = Gate(max_rows=4)
    gate.ask(3)
    large, small = gate.ask(2), gate.ask(1)
    assert (large.tickets, small.tickets) == ([], [])
    assert (gate.admission.full(large.entry), gate.admission.full(small.entry)) == ("max_rows", "")
    gate.admission.withdraw(large.entry)
    assert small.tickets
    gate.admission.withdraw(large.entry)
    gate.admission.withdraw(small.entry)
    assert gate.admission.ticket(small.ticket) is small.entry, "it waited no longer"


def test_older_rows_pass_those_that_wait_for_them() -> None:
    gate = Gate(max_lag=1)
    gate.held = Held(1, 0, 5)
    ahead, older = gate.ask(1, version=7), gate.ask(1, version=6)
    assert ahead.tickets == []
    assert older.tickets
    assert gate.admission.full(ahead.entry) == "max_lag"
    gate.held = Held(1, 0, 6)
    gate.come(older)
    assert ahead.tickets


def test_a_version_waits_for_older_ones_that_were_admitted_and_have_not_come() -> None:
    gate = Gate(max_lag=0)
    old = gate.ask(1, version=1)
    new = gate.ask(1, version=2)
    assert new.tickets == []
    gate.admission.give_back(old.ticket)
    assert new.tickets


def test_who_leaves_waits_no_longer_and_his_tickets_go_back() -> None:
    gate = Gate(max_rows=4)
    held, waiting = gate.ask(3, client="gone"), gate.ask(4, client="gone")
    behind = gate.ask(4)
    gate.admission.leave("gone")
    assert waiting.tickets == []
    assert behind.tickets
    assert gate.admission.ticket(held.ticket) is None
    assert len(gate.admission) == 0


def test_what_can_never_fit_is_refused_and_does_not_wait() -> None:
    gate = Gate(max_rows=4, max_bytes=100)
    for rows, nbytes, what in ((5, 0, "rows of a stream"), (1, 101, "bytes of a stream")):
        with pytest.raises(LimitExceeded) as refused:
            gate.ask(rows, nbytes=nbytes)
        assert (refused.value.what, refused.value.limit) == (what, 4 if rows == 5 else 100)
    assert len(gate.admission) == 0


def test_who_waits_is_told_that_nobody_is_admitted_any_more() -> None:
    gate = Gate(max_rows=1)
    first, second = gate.ask(1), gate.ask(1)
    gate.admission.refuse(Closed("the stream was closed"))
    assert (first.errors, [type(error) for error in second.errors]) == ([], [Closed])
    gate.admission.give_back(first.ticket)
    assert second.tickets == []


def test_who_was_admitted_and_has_not_come_is_named() -> None:
    """Such fill a stream as rows do, and somebody may wait for them."""
    admission = Admission(Settings(("a",)), lambda: Held(0, 0, None))
    tickets: list[int] = []
    for client, nbytes in (("p", 8), ("q", 16), ("p", 8)):
        admission.enter(Entry(client, 1, nbytes, 0, tickets.append, lambda error: None))
    assert admission.coming() == {"p": 16, "q": 16}
    admission.give_back(tickets[1])
    assert admission.coming() == {"p": 16}
