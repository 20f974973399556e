"""Who is admitted to append, and what a ticket is worth."""

from __future__ import annotations

import pytest

from dataplane.errors import LimitExceeded
from dataplane.stream.admission import Admission, Entry, Held
from dataplane.stream.settings import Settings


class Gate:
    """The admission to a stream of which the test says what it holds."""

    def __init__(self, **limits: int) -> None:
        self.held = Held(0, 0, None)
        self.admission = Admission(Settings(("actor",), **limits), lambda: self.held)

    def ask(self, rows: int, *, nbytes: int = 0, version: int = 0, client: str = "p") -> int | None:
        return self.admission.admit(Entry(client, rows, nbytes, version))


def test_what_was_admitted_counts_until_it_comes_and_then_as_held() -> None:
    gate = Gate(max_rows=4)
    first = gate.ask(3)
    assert first is not None
    assert gate.admission.ticket(first) == Entry("p", 3, 0, 0)
    assert gate.ask(2) is None
    gate.held = Held(3, 0, None)
    for _ in range(3):
        gate.admission.give_back(first)
    assert gate.admission.ticket(first) is None
    assert gate.ask(2) is None
    gate.held = Held(0, 0, None)
    assert gate.ask(4)
    assert gate.ask(1) is None


def test_a_version_waits_for_older_ones_also_for_those_that_have_not_come() -> None:
    gate = Gate(max_lag=1)
    gate.held = Held(1, 0, 5)
    assert gate.ask(1, version=7) is None
    assert gate.admission.full(Entry("p", 1, 0, 7)) == "max_lag"
    older = gate.ask(1, version=6)
    assert older is not None
    gate.held = Held(1, 0, 7)
    assert gate.ask(1, version=8) is None
    gate.admission.give_back(older)
    assert gate.ask(1, version=8)


def test_the_tickets_of_who_leaves_go_back() -> None:
    gate = Gate(max_rows=4)
    gate.ask(3, client="gone")
    assert gate.ask(4) is None
    gate.admission.leave("gone")
    assert gate.ask(4)
    assert gate.admission.clients() == {"p"}


def test_what_can_never_fit_is_refused() -> None:
    gate = Gate(max_rows=4, max_bytes=100)
    for rows, nbytes, what in ((5, 0, "rows of a stream"), (1, 101, "bytes of a stream")):
        with pytest.raises(LimitExceeded) as refused:
            gate.ask(rows, nbytes=nbytes)
        assert (refused.value.what, refused.value.limit) == (what, 4 if rows == 5 else 100)


def test_who_was_admitted_and_has_not_come_is_named() -> None:
    """Such fill a stream as rows do, and somebody may wait for them."""
    gate = Gate()
    tickets = [gate.ask(1, client=client, nbytes=nbytes) for client, nbytes in (("p", 8), ("q", 16), ("p", 8))]
    assert gate.admission.coming() == {"p": 16, "q": 16}
    gate.admission.give_back(tickets[1] or 0)
    assert gate.admission.coming() == {"p": 16}
