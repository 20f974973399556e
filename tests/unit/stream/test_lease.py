"""Who holds which grant, until when, and who is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import LeaseExpired, LimitExceeded, Misuse
from dataplane.stream import lease
from dataplane.stream.admission import Admission, AppendSize, Usage
from dataplane.stream.lease import Leases, RowLease, Who
from dataplane.stream.settings import StreamSettings
from tests.cases import each_case


def given(leases: Leases, who: Who, now: float = 0.0, lease_s: float = 10.0) -> RowLease:
    grant = leases.give(0, np.array([1, 2]), ("x",), who, lease_s, now)
    leases.hand(grant, who, now)
    return grant


def test_a_grant_waits_for_all_known_replicas_of_its_member() -> None:
    leases = Leases()
    whos = [Who(client, "m", replica) for replica, client in enumerate("pqr")]
    seen = given(leases, whos[0])
    for who in whos[1:]:
        leases.hand(seen, who, 0.0)
    grant = given(leases, whos[0], now=1.0)
    leases.hand(grant, whos[1], 1.0)
    assert [leases.ack(grant.number, who.client, who.replica) for who in whos[:2]] == [None, None]
    leases.hand(grant, whos[2], 1.0)
    assert leases.ack(grant.number, "r", 2) is grant


def test_a_lost_replica_is_waited_for_until_its_lease_expires() -> None:
    leases = Leases()
    whos = [Who(client, "m", replica) for replica, client in enumerate("pqr")]
    seen = given(leases, whos[0])
    for who in whos[1:]:
        leases.hand(seen, who, 0.0)
    for now in (0.0, 10.0):
        grant = given(leases, whos[0], now=now)
        leases.hand(grant, whos[1], now)
        acked = [leases.ack(grant.number, who.client, who.replica) for who in whos[:2]]
        assert acked == ([None, None] if not now else [None, grant])
        assert all(over.done_as_far_as_known for over in leases.ended(now + 10.0) if over is grant)


def test_of_any_number_of_replicas_a_few_are_named() -> None:
    leases = Leases()
    assert len(leases.to_ack(given(leases, Who("p", "m", 0, replicas=1 << 60)))) == lease._SHOWN


def test_an_ack_of_long_ago_is_forgotten() -> None:
    leases = Leases()
    first = given(leases, Who("p"))
    leases.ack(first.number, "p", None)
    for _ in range(10_000):
        leases.ack(given(leases, Who("p")).number, "p", None)
    assert len(leases._acks) < 10_000
    with pytest.raises(LeaseExpired):
        leases.ack(first.number, "p", None)


def test_a_restarted_replica_gets_its_unacked_grants_again() -> None:
    leases = Leases()
    acked, open_ = (given(leases, Who("p", "m", 0, 2)) for _ in range(2))
    leases.ack(acked.number, "p", 0)
    assert leases.left("p") == []
    restarted = Who("p again", "m", 0, 2)
    assert leases.waiting(0, restarted) is open_
    leases.hand(open_, restarted, 5.0)
    assert open_.expires == 15.0
    assert leases.waiting(0, restarted) is None
    with pytest.raises(LeaseExpired):
        leases.ack(open_.number, "p", 0)


def test_a_replica_gets_the_grants_again_that_it_gave_back_unseen() -> None:
    leases, who = Leases(), Who("p", "m", 0, 2)
    first, second = (given(leases, who) for _ in range(2))
    leases.let_go(first, 0)
    asks = Who("p", "m", 0, 2, after=second.number)
    assert leases.waiting(0, asks) is first
    leases.hand(first, asks, 0.0)
    assert leases.waiting(0, asks) is None


def test_an_expired_lease_is_done_if_all_announced_replicas_have_acked() -> None:
    leases = Leases()
    announced, unsaid = given(leases, Who("p", "m", 0, 2)), given(leases, Who("p", "n", 0))
    for grant in (announced, unsaid):
        assert leases.ack(grant.number, "p", 0) is None
    assert [grant.done_as_far_as_known for grant in leases.ended(10.0)] == [False, True]


@each_case("who", [("", 0, 0), ("m", -1, 0), ("m", 2, 2), ("m", 1 << 40, 0), ("m", 0, -1)], ids=lambda who: str(who))
def test_invalid_replica_numbers_are_misuse(who: tuple[str, int, int]) -> None:
    with pytest.raises(Misuse):
        Who("c", *who)


def test_idle_members_are_forgotten_and_members_with_leases_are_not() -> None:
    leases = Leases()
    kept = [given(leases, Who("p", f"kept {number}", 0)) for number in range(20)]
    for number in range(5000):
        grant = given(leases, Who("p", f"member {number}", 0, 1))
        assert leases.ack(grant.number, "p", 0) is grant
        assert len(leases._replicas) <= lease._MEMBERS + len(kept)
    assert {(0, f"kept {number}") for number in range(20)} <= leases._replicas.keys()
    assert (0, "member 4999") in leases._replicas
    assert (0, "member 0") not in leases._replicas
    assert [each.number for each in leases] == [each.number for each in kept]


# Who is admitted to append, and what a ticket is worth.


class Gate:
    """The admission to a stream of which the test says what it holds."""

    def __init__(self, **limits: int) -> None:
        self.held = Usage(0, 0, None)
        self.admission = Admission(StreamSettings(("actor",), **limits), lambda: self.held)

    def ask(self, rows: int, *, nbytes: int = 0, version: int = 0, client: str = "p") -> int | None:
        return self.admission.admit(AppendSize(client, rows, nbytes, version))


def test_an_admission_that_can_never_fit_is_refused() -> None:
    gate = Gate(max_rows=4, max_bytes=100)
    for rows, nbytes, what in ((5, 0, "rows of a stream"), (1, 101, "bytes of a stream")):
        with pytest.raises(LimitExceeded) as refused:
            gate.ask(rows, nbytes=nbytes)
        assert (refused.value.what, refused.value.limit) == (what, 4 if rows == 5 else 100)


def test_clients_with_unused_permits_are_named() -> None:
    gate = Gate()
    tickets = [gate.ask(1, client=client, nbytes=nbytes) for client, nbytes in (("p", 8), ("q", 16), ("p", 8))]
    assert gate.admission.coming() == {"p": 16, "q": 16}
    gate.admission.give_back(tickets[1] or 0)
    assert gate.admission.coming() == {"p": 16}


def test_a_grant_fetched_ahead_is_unseen_until_its_loop_settles_the_one_before() -> None:
    leases = Leases()
    first, second, third = (given(leases, Who("p", loop=1)) for _ in range(3))
    other = given(leases, Who("p", loop=2))
    assert [grant.unseen for grant in (first, second, third, other)] == [False, True, True, False]
    leases.ack(first.number, "p", None)
    assert [grant.unseen for grant in leases.left("p")] == [False, True, False]
    late = [given(leases, Who("p", loop=1)) for _ in range(2)]
    assert leases.ended(11.0) == late, "the loop has not gone on"
    assert [grant.unseen for grant in late] == [False, True]
