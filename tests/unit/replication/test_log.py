"""A log's entries, its snapshot, and how far it is on disk; and that disk and memory make the same of the changes."""

from __future__ import annotations

from random import Random

import pytest

from dataplane.errors import Corrupt
from dataplane.replication.log import Log
from dataplane.replication.messages import Entry, Snapshot
from dataplane.replication.storage import MemoryStorage, Stored
from tests.cases import each_case


def entries(*epochs: int) -> tuple[Entry, ...]:
    return tuple(Entry(epoch, f"{i}".encode()) for i, epoch in enumerate(epochs))


def test_an_entry_is_found_by_its_epoch() -> None:
    log = Log(Stored(), durable=False)
    log.append(entries(1, 1, 2))
    assert (log.last, log.persisted) == (3, 3)
    assert [log.has(3, 2), log.has(3, 1), log.has(4, 2), log.has(0, 0)] == [True, False, False, True]
    assert log.after(1, 1, 99) == entries(1, 1, 2)[1:2]
    assert log.after(1, 9, 0) == entries(1, 1, 2)[1:2]  # one, however large


def test_entries_that_are_there_are_left_and_those_that_differ_go() -> None:
    log = Log(Stored(), durable=False)
    log.append(entries(1, 1, 1, 1))
    log.merge(0, entries(1, 1), 0)
    assert log.last == 4  # an old batch takes nothing away
    log.merge(1, (Entry(1, b"1"), Entry(3, b"x")), 2)
    assert log.last == 3
    assert [log.epoch_at(i) for i in (1, 2, 3)] == [1, 1, 3]
    with pytest.raises(Corrupt):
        log.merge(0, (Entry(4, b"y"),), 2)


def test_a_snapshot_takes_the_place_of_entries() -> None:
    log = Log(Stored(), durable=False)
    log.append(entries(1, 1, 2))
    log.compact(Snapshot(2, 1, b"state"))
    assert (log.base, log.last, log.epoch_at(2), log.epoch_at(3)) == (2, 3, 1, 2)
    assert log.has(1, 9)  # committed: all logs agree on it
    log.merge(0, entries(1, 1, 2, 2), 2)
    assert log.last == 4
    log.install(Snapshot(9, 4, b"later"))
    assert (log.base, log.last, log.persisted) == (9, 9, 9)


def test_entries_beyond_a_snapshot_stay_where_the_log_agrees_with_it() -> None:
    log = Log(Stored(), durable=True)
    log.append(entries(1, 1, 2, 2))
    log.stored(1)
    log.install(Snapshot(3, 2, b"state"))
    assert (log.base, log.last, log.persisted, log.epoch_at(4)) == (3, 4, 4, 2)
    storage = MemoryStorage(("a", 0))
    storage.write(operation for _, operation in log.changes)
    assert storage.load()[1] == Stored(Snapshot(3, 2, b"state"), list(log.after(3, 9, 99)))


def test_entries_beyond_a_snapshot_go_where_the_log_differs_from_it() -> None:
    log = Log(Stored(), durable=False)
    log.append(entries(1, 1, 1))
    log.install(Snapshot(2, 3, b"state"))
    assert (log.base, log.last) == (2, 2)


def test_only_what_is_stored_is_persisted() -> None:
    log = Log(Stored(), durable=True)
    log.append(entries(1, 1))  # ticket 1
    log.append(entries(1))  # 2
    assert log.persisted == 0
    log.stored(1)
    assert log.persisted == 2
    log.merge(1, (Entry(2, b"x"),), 0)  # 3 truncates, 4 appends
    assert log.persisted == 1
    log.stored(2)  # it stored what is gone
    assert log.persisted == 1
    log.stored(4)
    assert log.persisted == 2
    assert [ticket for ticket, _ in log.changes] == [1, 2, 3, 4]


@each_case("seed", range(20))
def test_storage_makes_the_same_log(seed: int) -> None:
    rng = Random(seed)
    log, storage = Log(Stored(), durable=True), MemoryStorage(("a", 1))
    epoch = 1
    for _ in range(60):
        epoch += rng.random() < 0.2
        what = rng.random()
        if what < 0.7:
            previous = rng.randint(log.base, log.last)
            log.merge(previous, tuple(Entry(epoch, b"%d" % rng.randrange(99)) for _ in range(3)), log.base)
        elif what < 0.9 and log.last > log.base:
            index = rng.randint(log.base + 1, log.last)
            log.compact(Snapshot(index, log.epoch_at(index), b"s%d" % index))
        elif what > 0.97:
            log.install(Snapshot(log.last + 5, epoch, b"installed"))
        storage.write(operation for _, operation in log.changes)
        storage.sync()
        log.changes.clear()
    _, stored = storage.load()
    again = Log(stored, durable=True)
    assert (again.base, again.last, again.snapshot) == (log.base, log.last, log.snapshot)
    assert again.after(log.base, 999, 9999) == log.after(log.base, 999, 9999)
