"""Settings, recruits, logs, sessions, lost nodes and snapshots, each by itself."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import Corrupt
from dataplane.replication import configuration as c
from dataplane.replication import sessions as producers
from dataplane.replication.effects import Send
from dataplane.replication.leader import choose
from dataplane.replication.log import StoredLog
from dataplane.replication.messages import AppendEntries, Install, LogEntry
from dataplane.replication.outbox import MAX_LOST_NODES, LostNodes
from dataplane.replication.replica import Replica
from dataplane.replication.sessions import Sessions
from dataplane.replication.settings import ReplicationSettings
from tests.cases import each_case
from tests.simulation.machine import StreamMachine

A, B, C, D = ("a", 1), ("b", 1), ("c", 1), ("d", 1)


@each_case(
    "wrong",
    [
        {"grace_s": 3.0}, {"grace_s": 3.05, "drift": 0.02}, {"beat_s": 3.0}, {"drift": 1.0}, {"drift": -0.1},
        {"retry_s": 0.0}, {"max_batch": 0}, {"snapshot_every": 0},
    ],
)  # fmt: skip
def test_settings_that_are_not_safe_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if len(wrong) == 1 else "grace_s"):
        ReplicationSettings(**wrong)


def test_recruits_are_other_nodes_and_chosen_deterministically() -> None:
    now = c.Configuration(4, A, (B,))
    candidates = [A, ("a", 2), B, C, D, ("e", 7)]
    chosen = choose("p", now, candidates, 3)
    assert len(chosen) == 2
    assert set(chosen) <= {C, D, ("e", 7)}
    assert choose("p", now, reversed(candidates), 3) == chosen
    assert choose("p", now, candidates, 1) == ()
    assert len({choose(f"p{i}", now, candidates, 2) for i in range(50)}) == 3


def test_a_snapshot_longer_than_its_declared_size_is_corrupt() -> None:
    configuration = c.Configuration(1, A, (B,))
    replica = Replica(B, ReplicationSettings(), StreamMachine(None), StoredLog(), 0.0)  # type: ignore[arg-type]
    replica.configured(configuration, 0.0)
    with pytest.raises(Corrupt):
        replica.receive(A, Install(configuration, 1.0, 9, 1, 2, 0, b"abc"), 0.5)


@each_case("fresh", [True, False])
def test_only_a_fresh_replica_follows_before_it_has_read_the_configuration(fresh: bool) -> None:
    """The leader of a new partition may read it first; a replica that was started again may be sent an old one."""
    machine: Any = StreamMachine(None)  # type: ignore[arg-type]
    replica = Replica(B, ReplicationSettings(), machine, StoredLog(), 0.0, fresh=fresh)
    first = AppendEntries(c.Configuration(1, A, (B,)), 1.0, 0, 0, (LogEntry(1, b""),), 0)
    answers = [effect for effect in replica.receive(A, first, 0.5) if isinstance(effect, Send)]
    stored = [effect for effect in replica.stored(1, 0.5) if isinstance(effect, Send)]
    assert {effect.to for effect in answers + stored} == ({A} if fresh else set())
    assert replica.configuration.epoch == fresh


def test_the_least_recently_used_producer_sessions_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_SESSIONS", 3)
    sessions = Sessions()
    for producer in ("a", "b", "c", "a", "d", "e"):
        sessions.keep(producer, len(sessions.snapshot()), b"")
    assert sessions.producers == ["a", "d", "e"]
    restored = Sessions()
    restored.restore(sessions.snapshot())
    assert restored.producers == sessions.producers


def test_a_restarted_node_has_lost_the_shards_of_its_earlier_processes() -> None:
    lost = LostNodes()
    lost.lose(b"restarted")
    lost.lose(b"restarted", before=5)
    assert b"restarted" not in lost
    assert not lost.there(b"restarted", 4)
    assert lost.there(b"restarted", 5)
    assert LostNodes(lost.state()).before(b"restarted") == 5


def test_the_most_recently_lost_nodes_are_remembered() -> None:
    lost = LostNodes()
    for number in range(MAX_LOST_NODES + 1):
        lost.lose(number.to_bytes(8, "big"))
    assert len(lost.state()) == len(lost.lost) == MAX_LOST_NODES
    assert (0).to_bytes(8, "big") not in lost
