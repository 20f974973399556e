"""Configurations, settings, leases, recruits and messages, each by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dataplane.errors import Corrupt
from dataplane.replication import configuration as c
from dataplane.replication.attention import Attention
from dataplane.replication.lease import Lease, Promise
from dataplane.replication.messages import (
    Append,
    Appended,
    Entry,
    Install,
    Installing,
    Message,
    Missing,
    Outdated,
)
from dataplane.replication.recruitment import choose
from dataplane.replication.settings import Settings
from tests.cases import each_case

A, B, C, D = ("a", 1), ("b", 1), ("c", 1), ("d", 1)


def test_each_change_is_an_epoch() -> None:
    first = c.Configuration(1, A, (B, C))
    assert first.without(frozenset({B})) == c.Configuration(2, A, (C,))
    assert first.joined_by(D) == c.Configuration(2, A, (B, C, D))
    assert first.deposed_by(C) == c.Configuration(2, C, (B,))
    assert first.restarted() == c.Configuration(2, A, (B, C))
    assert [first.holds(replica) for replica in (A, C, D, ("a", 2))] == [True, True, False, False]
    assert c.decode(c.encode(first)) == first
    with pytest.raises(Corrupt):
        c.decode(b"\x93\x01")


@each_case(
    "wrong",
    [
        {"grace_s": 3.0},
        {"grace_s": 3.05, "drift": 0.02},
        {"beat_s": 3.0},
        {"drift": 1.0},
        {"drift": -0.1},
        {"retry_s": 0.0},
        {"max_batch": 0},
        {"snapshot_every": 0},
    ],
)
def test_settings_that_are_not_safe_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if len(wrong) == 1 else "grace_s"):
        Settings(**wrong)


def test_a_lease_counts_from_when_the_message_was_sent() -> None:
    lease = Lease(2.0)
    assert not lease.holds([A], 0.0)
    lease.renew(A, 1.0)
    lease.renew(B, 2.0)
    lease.renew(A, 0.5)  # an answer that was overtaken
    assert lease.holds([A, B], 2.9)
    assert not lease.holds([A, B], 3.0)
    assert lease.holds([B], 3.0)
    assert lease.holds([], 99.0)
    assert lease.silent(A, 0.0, 3.0)
    assert not lease.silent(C, 2.0, 3.0)  # nothing was due before
    lease.forget(B)
    assert not lease.holds([B], 3.0)


def test_a_promise_is_over_after_the_grace() -> None:
    promise = Promise(3.0, 10.0)
    assert not promise.over(12.9)
    assert promise.over(13.0)
    promise.hear(A, 12.0)
    assert promise.until(A) == 15.0


def test_a_promise_to_a_process_that_has_ended_is_over_and_no_other() -> None:
    promise = Promise(3.0, 0.0)
    promise.hear(A, 4.0)
    promise.hear(B, 5.0)
    promise.void("b", 4.9)  # that was the process before
    assert not promise.silent(B, 5.1)
    promise.void("b", 5.0)
    assert promise.silent(B, 5.1)
    assert not promise.over(5.1)  # A may hold a lease
    assert promise.over(7.0)
    for number in range(9):
        promise.hear(("c", number), 8.0 + 3 * number)
    assert not promise.over(34.9)


def test_recruits_are_of_other_nodes_and_the_same_for_all_who_choose() -> None:
    now = c.Configuration(4, A, (B,))
    candidates = [A, ("a", 2), B, C, D, ("e", 7)]
    chosen = choose("p", now, candidates, 3)
    assert len(chosen) == 2
    assert set(chosen) <= {C, D, ("e", 7)}
    assert choose("p", now, reversed(candidates), 3) == chosen
    assert choose("p", now, candidates, 1) == ()
    assert len({choose(f"p{i}", now, candidates, 2) for i in range(50)}) == 3


@each_case(
    "message",
    [
        Append(c.Configuration(2, A, (B,)), 1.5, 3, 1, (Entry(2, b"x"), Entry(2, b"")), 3),
        Install(c.Configuration(2, A), 1.5, 9, 2, 5, 0, b"state"),
        Installing(2, 1.5, 9, 5),
        Appended(2, 1.5, 9),
        Missing(2, 1.5, 6, 4),
        Outdated(c.Configuration(3, B)),
    ],
)
def test_messages_cross_a_wire(message: Message) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message


def test_who_was_not_running_judges_nobody_until_it_has_gone_on_for_a_while() -> None:
    attention = Attention(0.5, 0.0)
    assert attention.judges(1.0)
    assert not attention.judges(1.1)  # its tick is overdue
    attention.tick(5.0)
    assert not attention.judges(5.0)
    attention.tick(5.5)
    attention.tick(6.0)
    assert attention.judges(6.0)
