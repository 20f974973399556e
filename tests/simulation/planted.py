"""Faults in the protocol itself, each of which the simulator has to find: one rule broken, the rest as it is.

A checker that finds nothing is not trusted. Each function here takes `plant(owner, name, value)`, which sets an
attribute for as long as the test runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.replication import messages as m
from dataplane.replication.configuration import Configuration
from dataplane.replication.effects import SendAnswer
from dataplane.replication.follower import Follower
from dataplane.replication.leader import Leader, Recruitment
from dataplane.replication.lease import Lease, Promise
from dataplane.replication.log import Log
from dataplane.replication.replica import Replica
from dataplane.replication.sessions import Sessions
from dataplane.replication.settings import ReplicationSettings
from dataplane.replication.state import Reconfiguration, State
from tests.simulation import run
from tests.simulation.machine import StreamMachine
from tests.simulation.node import Node

Plant = Callable[[Any, str, Any], None]


def a_follower_acks_before_it_has_appended(plant: Plant) -> None:
    """What it acknowledges it appends when the next message comes, if one does."""
    append = Follower.append
    waiting: dict[int, tuple[Any, m.AppendEntries]] = {}

    def late(self: Any, message: m.AppendEntries, now: float) -> None:
        log = self._state.log
        _, before = waiting.pop(id(self), (self, None))
        if before is not None and log.matches(before.previous, before.previous_epoch):
            log.merge(before.previous, before.entries, self._state.committed)
        append(self, msgspec.structs.replace(message, entries=()), now)
        if message.entries and log.matches(message.previous, message.previous_epoch):
            waiting[id(self)] = self, message
            configuration = message.configuration
            match = message.previous + len(message.entries)
            self._state.send(configuration.leader, m.EntriesAppended(configuration.epoch, message.sent_s, match))

    plant(Follower, "append", late)


def a_follower_acks_more_than_it_compared(plant: Plant) -> None:
    acknowledge = Follower._acknowledge

    def all_of_it(self: Any) -> None:
        self._matched = self._state.log.last
        acknowledge(self)

    plant(Follower, "_acknowledge", all_of_it)


def a_leader_ignores_its_lease(plant: Plant) -> None:
    plant(Lease, "holds", lambda self, peers, now: True)


def a_lease_counts_from_the_answer(plant: Plant) -> None:
    """And not from when the message was sent."""
    answered = Leader.answered

    def renewed_late(self: Any, sender: Any, message: Any, now: float) -> None:
        answered(self, sender, msgspec.structs.replace(message, sent_s=now), now)

    plant(Leader, "answered", renewed_late)


def a_grace_that_forgets_drift(plant: Plant) -> None:
    plant(run, "SETTINGS", ReplicationSettings(**{**_settings(), "grace_s": 0.301, "drift": 0.0}))


def _settings() -> dict[str, Any]:
    return {name: getattr(run.SETTINGS, name) for name in run.SETTINGS.__struct_fields__}


def a_new_leader_does_not_keep_its_promise(plant: Plant) -> None:
    over = Promise.over
    serves = Leader.serves

    def at_once(self: Any, now: float) -> bool:
        plant(Promise, "over", lambda self, now: True)
        try:
            return serves(self, now)
        finally:
            plant(Promise, "over", over)

    plant(Leader, "serves", at_once)


def reconciliation_is_skipped(plant: Plant) -> None:
    made = Leader.__init__

    def hasty(self: Any, state: State, now: float) -> None:
        made(self, state, now)
        self._start = 0

    plant(Leader, "__init__", hasty)


def an_old_epoch_is_accepted(plant: Plant) -> None:
    def any_epoch(self: Any, sender: Any, configuration: Configuration, now: float) -> bool:
        self._adopt(configuration, now)
        return self._leader is None

    plant(Replica, "_accept", any_epoch)


def a_recruit_is_promoted_that_was_not_in_sync(plant: Plant) -> None:
    plant(Recruitment, "in_sync", lambda self, progress, state: True)


def a_change_that_may_have_happened_is_not_counted(plant: Plant) -> None:
    """Its answer is lost: the leader commits without the follower that it asked for."""
    plant(Reconfiguration, "followers", lambda self, current: current.followers)


def a_restarted_leader_keeps_its_epoch(plant: Plant) -> None:
    configured = Replica.configured

    def goes_on(self: Any, configuration: Configuration, now: float) -> Any:
        state = self._state
        if not state.configuration.epoch and configuration.leader == state.me:
            state.configuration = Configuration(configuration.epoch - 1, ("", 0))
        return configured(self, configuration, now)

    plant(Replica, "configured", goes_on)


def a_replica_that_lost_its_log_comes_back_as_the_same(plant: Plant) -> None:
    plant(Node, "me", property(lambda self: (self.name, self.incarnation and 1)))


def the_entry_before_is_not_compared(plant: Plant) -> None:
    plant(Log, "matches", lambda self, index, epoch: index <= self.last)


def a_command_is_applied_twice(plant: Plant) -> None:
    commit = State.commit

    def twice(self: Any, to: int, requests: dict[int, int]) -> None:
        before = self.committed
        commit(self, to, requests)
        if before < to and to % 16 == 0 and self.log.command(to):
            self.machine.apply(self.log.command(to))

    plant(State, "commit", twice)


def a_sync_is_skipped(plant: Plant) -> None:
    """What is written counts as stored."""
    change = Log._change

    def at_once(self: Any, operation: Any) -> None:
        change(self, operation)
        self.persisted = self.last

    plant(Log, "_change", at_once)


def a_leader_does_not_wait_for_its_own_disk(plant: Plant) -> None:
    commit = Leader.commit

    def hasty(self: Any) -> None:
        log = self._state.log
        persisted, log.persisted = log.persisted, log.last
        commit(self)
        log.persisted = max(persisted, log.base)

    plant(Leader, "commit", hasty)


def a_snapshot_lacks_the_sequences(plant: Plant) -> None:
    plant(Sessions, "snapshot", lambda self: b"\x80")


def a_sequence_is_done_again(plant: Plant) -> None:
    plant(Sessions, "keep", lambda self, producer, sequence, result: None)


def an_ack_of_a_superseded_lease_is_taken(plant: Plant) -> None:
    plant(StreamMachine, "_check", lambda self, asked, now: None)


def a_command_is_answered_before_it_is_committed(plant: Plant) -> None:
    request = Leader.request

    def early(self: Any, number: int, asked: bytes, now: float) -> None:
        state = self._state
        request(self, number, asked, now)
        if self._requests.get(state.log.last) == number and state.log.last == state.committed + 1:
            del self._requests[state.log.last]
            machine = StreamMachine(_Deaf())
            machine.restore(state.machine.snapshot())
            state.effects.append(SendAnswer(number, machine.apply(state.log.command(state.log.last))))

    plant(Leader, "request", early)


class _Deaf:
    def applied(self, count: int, command: bytes, result: bytes) -> None:
        return


def nobody_takes_the_lead(plant: Plant) -> None:
    plant(Configuration, "deposed_by", lambda self, follower: self)


def a_change_is_asked_for_once(plant: Plant) -> None:
    made = Reconfiguration.__init__
    plant(Reconfiguration, "__init__", lambda self, retry_s: made(self, float("inf")))


def a_lost_batch_is_not_sent_again(plant: Plant) -> None:
    plant(run, "SETTINGS", ReplicationSettings(**{**_settings(), "retry_s": 1e9}))


def a_death_ends_every_promise(plant: Plant) -> None:
    plant(Promise, "end_of_node", lambda self, *_: self.end_all())


def a_late_word_of_a_death_counts_for_the_process_after_it(plant: Plant) -> None:
    end_of_node = Promise.end_of_node
    plant(Promise, "end_of_node", lambda self, node, before_s: end_of_node(self, node, math.inf))


def a_living_leader_is_said_to_have_ended(plant: Plant) -> None:
    gone = Replica.gone

    def somebody_else(self: Any, node: str, before_s: float, now: float) -> Any:
        return gone(self, self._state.configuration.leader[0], now, now)

    plant(Replica, "gone", somebody_else)


def a_leader_without_its_lease_tells_a_coordinator_that_was_wiped(plant: Plant) -> None:
    plant(Leader, "restored", lambda self, now: self._state.configuration.restored())


def a_part_is_taken_for_the_snapshot(plant: Plant) -> None:
    install = Follower.install

    def at_once(self: Any, message: m.Install, now: float) -> None:
        install(self, msgspec.structs.replace(message, size=message.offset + len(message.part)), now)

    plant(Follower, "install", at_once)


FAULTS: dict[str, Callable[[Plant], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name[0].islower()
}
