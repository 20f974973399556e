"""Replicas of one partition, step by step: Random histories are in `tests/simulation`."""

from __future__ import annotations

import msgspec
import pytest

from dataplane.errors import Corrupt, DataplaneError, LimitExceeded
from dataplane.replication.configuration import GENERATION, Configuration, ReplicaId
from dataplane.replication.effects import Swap
from dataplane.replication.errors import NotLeader
from dataplane.replication.messages import Append, Entry, Install, Outdated, Snapshot
from dataplane.replication.replica import Replica
from dataplane.replication.storage import Extend, Rebase, Stored, Truncate
from tests.unit.replication.bench import SETTINGS, A, B, Bench, C, Words


@pytest.fixture
def three() -> Bench:
    bench = Bench(A, B, C)
    bench.begin()
    return bench


def test_a_leader_answers_when_all_followers_have_the_command(three: Bench) -> None:
    three.cut = {C}
    request = three.ask(A, "one")
    three.deliver()
    assert request not in three.answers  # b has it
    three.cut = set()
    three.pass_time(SETTINGS.retry_s + 0.4)  # sent again
    assert three.answers[request] == b"1"
    three.pass_time(2 * SETTINGS.beat_s)
    assert [three.words(name) for name in (A, B, C)] == ["one"] * 3


def test_commands_gather_while_a_batch_is_on_its_way(three: Bench) -> None:
    for word in ("one", "two", "three", "four"):
        three.ask(A, word)
    to_b = [message for _, to, message in three.mail if to == B]
    assert [len(m.entries) for m in to_b if isinstance(m, Append)] == [1]
    mail, three.mail = three.mail, []
    for sender, to, message in mail:
        three.hand(sender, to, message)
    acks, three.mail = three.mail, []
    for sender, to, message in acks:
        three.hand(sender, to, message)
    assert [len(m.entries) for _, to, m in three.mail if to == B and isinstance(m, Append)] == [3]
    three.deliver()
    assert [three.answers[number] for number in range(1, 5)] == [b"1", b"2", b"3", b"4"]


def test_a_request_may_be_several_commands_none_or_an_error(three: Bench) -> None:
    several, error = three.ask(A, "one,two"), three.ask(A, "nothing")
    three.deliver()
    question = three.ask(A, "?")
    assert three.answers[several] == b"2"
    assert isinstance(three.answers[error], DataplaneError)
    assert three.answers[question] == b"one two"


def test_who_does_not_lead_says_who_does(three: Bench) -> None:
    error = three.answers[three.ask(B, "one")]
    assert isinstance(error, NotLeader)
    assert (error.leader, error.epoch) == ("a", three.configuration.epoch)


def test_a_leader_that_does_not_hear_a_follower_stops_and_drops_it(three: Bench) -> None:
    three.cut = {C}
    pending = three.ask(A, "one")
    three.pass_time(SETTINGS.lease_s + SETTINGS.beat_s)
    assert not three.replicas[A].serves(three.now)
    assert isinstance(three.answers[three.ask(A, "two")], NotLeader)
    assert {swap.wanted.followers for _, swap in three.swaps} == {(B,)}
    three.decide()
    three.deliver()
    assert three.replicas[A].serves(three.now)
    assert three.answers[pending] == b"1"


def test_a_message_of_an_older_epoch_is_refused_with_the_newer(three: Bench) -> None:
    old = Append(Configuration(1, A, (B, C)), three.now, 1, 1, (Entry(1, b"old"),), 0)
    three.do(B, three.replicas[B].receive(A, old, three.now))
    assert three.mail == [(B, A, Outdated(three.configuration))]


def test_a_recruit_is_brought_up_to_date_by_a_snapshot_and_the_rest() -> None:
    bench = Bench(A)
    bench.begin()
    for i in range(20):
        bench.ask(A, f"w{i}")
    assert bench.replicas[A].committed == 21
    bench.add(B, Stored())
    bench.do(A, bench.replicas[A].recruit(B, bench.now))
    bench.deliver(rounds=1)
    bench.deliver(rounds=1)
    assert [type(message) for _, to, message in bench.mail if to == B] == [Install]
    bench.deliver()
    bench.decide()
    bench.deliver()
    bench.pass_time(2 * SETTINGS.beat_s)
    assert bench.configuration.followers == (B,)
    assert bench.words(B) == bench.words(A)


def test_a_snapshot_comes_in_parts_that_fit_into_a_message() -> None:
    bench = Bench(A, settings=msgspec.structs.replace(SETTINGS, max_bytes=7))
    bench.begin()
    for i in range(20):
        bench.ask(A, f"w{i}")
    bench.add(B, Stored())
    bench.do(A, bench.replicas[A].recruit(B, bench.now))
    parts = []
    for _ in range(40):
        mail, bench.mail = bench.mail, []
        parts += [message for _, _, message in mail if isinstance(message, Install)]
        for each in mail * 2:  # each of them twice
            bench.now += 0.001
            bench.hand(*each)
    assert len(parts) > 4
    assert max(len(part.part) for part in parts) == 7
    bench.pass_time(SETTINGS.retry_s + SETTINGS.beat_s)
    bench.decide()
    bench.deliver()
    bench.pass_time(2 * SETTINGS.beat_s)
    assert bench.configuration.followers == (B,)
    assert bench.words(B) == bench.words(A)


def test_a_snapshot_with_more_bytes_than_it_has_is_corrupt() -> None:
    bench = Bench(A, B)
    with pytest.raises(Corrupt):
        bench.replicas[B].receive(A, Install(bench.configuration, 1.0, 9, 1, 2, 0, b"abc"), bench.now)


def test_a_command_that_fits_into_no_message_is_refused() -> None:
    bench = Bench(A, settings=msgspec.structs.replace(SETTINGS, max_command=3))
    bench.begin()
    assert isinstance(bench.answers[bench.ask(A, "long")], LimitExceeded)
    assert bench.answers[bench.ask(A, "one")] == b"1"


def test_a_follower_takes_the_place_of_a_leader_whose_process_has_ended(three: Bench) -> None:
    three.cut = {A}
    for follower in (B, C):
        three.do(follower, three.replicas[follower].gone("a", three.now, three.now))
    three.decide()
    three.deliver()
    assert three.configuration == Configuration(3, B, (C,))
    assert three.replicas[B].serves(three.now)  # without a wait


def test_a_leader_that_has_ended_is_not_heard_any_more(three: Bench) -> None:
    """What it sent may come later than the word of its end."""
    three.ask(A, "one")
    three.now += 0.01
    three.do(B, three.replicas[B].gone("a", three.now, three.now))
    three.swaps.clear()  # the coordinator does not answer
    three.deliver()
    assert three.words(B) == ""  # it has the command, and does not know yet that it is committed
    three.cut = {A}
    three.pass_time(SETTINGS.retry_s + SETTINGS.beat_s)
    three.decide()
    three.deliver()
    assert three.configuration == Configuration(3, B, (C,))
    three.pass_time(SETTINGS.grace_s)
    assert three.words(B) == "one"


# A coordinator that has forgotten the partition


def told(bench: Bench, *names: ReplicaId) -> list[tuple[ReplicaId, Configuration]]:
    """What these tell it."""
    bench.swaps.clear()
    for name in names:
        bench.do(name, bench.replicas[name].forgotten(bench.now))
    assert all(swap.expected is None for _, swap in bench.swaps)
    return [(name, swap.wanted) for name, swap in bench.swaps]


def test_a_leader_tells_a_coordinator_that_forgot_it_in_another_generation(three: Bench) -> None:
    three.pass_time(SETTINGS.beat_s)
    assert told(three, A, B, C) == [(A, Configuration(GENERATION, A, (B, C)))]


def test_a_follower_tells_it_nothing_though_its_leader_has_ended(three: Bench) -> None:
    """Another may have led meanwhile, and dropped this one."""
    three.pass_time(SETTINGS.beat_s)
    three.cut = {A}
    three.do(B, three.replicas[B].gone("a", three.now, three.now))
    assert told(three, B, C) == []
    assert three.replicas[B].mute


def test_a_leader_that_starts_again_asks_for_a_new_epoch(three: Bench) -> None:
    three.ask(A, "one")
    three.deliver()
    three.cut = {B, C}
    three.add(A, Stored())  # with whatever log: it does not matter for this
    assert not three.replicas[A].leads
    assert three.swaps == [(A, Swap(three.configuration, three.configuration.restarted()))]


def test_a_replica_hears_nothing_before_it_has_read_the_configuration() -> None:
    replica = Replica(B, SETTINGS, Words(), Stored(), 0.0)
    assert replica.receive(A, Append(Configuration(7, A, (B,)), 0.0, 0, 0, (), 0), 0.0) == []
    assert replica.configuration.epoch == 0


def test_a_durable_partition_waits_for_disks() -> None:
    bench = Bench(A, B, settings=msgspec.structs.replace(SETTINGS, durable=True))

    def sync(name: tuple[str, int]) -> None:
        stores, bench.stores[name] = bench.stores[name], []
        if stores:
            bench.do(name, bench.replicas[name].stored(stores[-1][0], bench.now))
            bench.deliver()

    bench.decide()
    for _ in range(3):
        bench.deliver()
        sync(A)
        sync(B)
    bench.pass_time(SETTINGS.grace_s + 0.1)
    assert bench.replicas[A].serves(bench.now)
    request = bench.ask(A, "one")
    assert [type(operation) for _, operation in bench.stores[A]] == [Extend]
    bench.deliver()
    sync(B)
    assert request not in bench.answers  # the leader's own disk counts too
    sync(A)
    assert bench.answers[request] == b"1"


def test_what_was_stored_makes_the_same_log() -> None:
    stored = Stored()
    for operation in (
        Extend(1, (Entry(1, b"a"), Entry(1, b"b"), Entry(1, b"c"))),
        Truncate(2),
        Extend(3, (Entry(2, b"d"),)),
    ):
        stored.apply(operation)
    bench = Bench(A)
    bench.machines[A].restore(b"a b")
    snapshot = bench.machines[A].snapshot()
    assert [entry.command for entry in stored.entries] == [b"a", b"b", b"d"]
    stored.apply(Rebase(Snapshot(2, 1, snapshot), True))
    assert [entry.command for entry in stored.entries] == [b"d"]
    bench.add(A, stored)
    assert bench.words(A) == "a b"
    bench.decide()
    assert bench.words(A) == "a b d"  # proposed again, in a new epoch, alone


def test_leases_of_rows_are_forgotten_at_both_ends_of_a_term(three: Bench) -> None:
    forgotten = three.machines[A].forgotten
    three.cut = {A}
    for follower in (B, C):
        three.do(follower, three.replicas[follower].gone("a", three.now, three.now))
    three.decide()
    three.deliver()
    three.cut = set()
    three.watch()
    assert three.machines[A].forgotten == forgotten + 1
    assert three.machines[B].forgotten == 1


def test_a_large_state_is_not_encoded_before_its_log_is_as_large() -> None:
    bench = Bench(A)
    bench.begin()
    machine, taken = bench.machines[A], []
    encoded = machine.snapshot

    def snapshot() -> bytes:
        taken.append(len(taken))
        return encoded()

    machine.snapshot = snapshot  # type: ignore[method-assign]
    bench.ask(A, "w" * 8000)
    for _ in range(2 * SETTINGS.snapshot_every - 2):
        bench.ask(A, "few")
    assert len(taken) == 1
    for _ in range(6 * SETTINGS.snapshot_every):
        bench.ask(A, "more")
    assert len(taken) == 1
    for _ in range(10 * SETTINGS.snapshot_every):
        bench.ask(A, "enough")
    assert len(taken) == 2
