"""Rings: the last events of a process, read by another."""

from __future__ import annotations

import fcntl
import os
import time
from typing import Any

import pytest

from dataplane.observe import ring
from dataplane.observe._writer import Writer
from dataplane.observe.ledger import Ledger, StreamCounts, TaskCounts
from dataplane.observe.ring import CODE, EVENTS, RING_BYTES, RingReader, RingWriter
from dataplane.observe.snapshot import NAMED, OTHERS, StreamFigures


def ring_of(count: int) -> RingWriter:
    recorder = RingWriter()
    for value in range(count):
        recorder.record(CODE["put"], time.monotonic_ns(), value)
    return recorder


def test_recorded_events_and_flows_are_read_as_they_were_written() -> None:
    recorder = RingWriter()
    reader = recorder.reader()
    began = time.monotonic_ns()
    recorder.record(CODE["append"], began, (1 << 64) - 1)
    recorder.writer.flow(CODE["flow append"], -1, 3)
    recorder.writer.last = 5
    recorder.writer.flow(CODE["flow ack"], 1 << 64 | 7)
    events = reader.fresh()
    assert events["code"].tolist() == [CODE["append"], CODE["flow append"], CODE["flow ack"]]
    assert events["began"].tolist() == [began, began, 5]
    assert events["ended"].tolist()[1:] == [(1 << 64) - 1, 7]
    assert began <= events["ended"][0] <= time.monotonic_ns()
    assert events["value"].tolist() == [(1 << 64) - 1, 3, 1]
    assert events["number"].tolist() == [1, 2, 3]
    assert recorder.writer.count == 3
    assert events["thread"].tolist() == [1, 1, 1]


def test_a_writer_refuses_memory_of_a_wrong_size_or_alignment() -> None:
    memory: Any = bytearray(4096)
    for offset, events in ((0, 256), (0, 100), (-8, 8), (4, 8), (4096, 1), (1 << 60, 8), (0, 1 << 61)):
        with pytest.raises(ValueError, match="fit"):
            Writer(memory, offset, events, int)
    with pytest.raises(BufferError):
        Writer(bytes(4096), 0, 8, int)  # type: ignore[arg-type]
    writer = Writer(memory, 0, 128, int)
    for code in (None, "x", 1.5):
        with pytest.raises(TypeError):
            writer.record(code, 1)  # type: ignore[arg-type]
    assert memory == bytes(4096)


def test_a_ring_holds_the_newest_events_in_fixed_memory() -> None:
    recorder = ring_of(EVENTS + 1000)
    assert len(recorder._memory) == RING_BYTES
    values = recorder.reader().recent(0)["value"]
    assert values[-1] == EVENTS + 999
    assert EVENTS - 100 < len(values) < EVENTS
    assert (values[1:] - values[:-1] == 1).all()


def test_fresh_gives_each_event_once_and_counts_those_that_were_missed() -> None:
    recorder = ring_of(10)
    reader = recorder.reader()
    assert len(reader.fresh()) == 10
    assert len(reader.fresh()) == 0
    recorder.record(CODE["get"], 1)
    assert reader.fresh()["code"].tolist() == [CODE["get"]]
    for _ in range(EVENTS + 10):
        recorder.record(CODE["put"], 1)
    seen = len(reader.fresh())
    assert seen + reader.missed == EVENTS + 10
    assert 0 < reader.missed < 200


def test_another_process_reads_the_ring_of_one_that_died() -> None:
    fd = ring.create()
    reader = RingReader.of(fd)
    child = os.fork()
    if not child:
        recorder = RingWriter(fd)
        recorder.record(CODE["consume"], 1, 3)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    os.close(fd)
    assert reader.recent(0)["value"].tolist() == [3]
    assert [thread.number for thread in reader.threads().values()] == [child]
    reader.close()


def test_a_client_cannot_truncate_or_seal_ring_memory() -> None:
    fd = ring.create()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_invalid_ring_contents_yield_only_valid_events() -> None:
    recorder = ring_of(3)
    rubbish = os.urandom(RING_BYTES)
    recorder._memory[:] = rubbish
    reader = recorder.reader()
    now = time.monotonic_ns()
    for events in (reader.recent(0), reader.fresh()):
        assert (events["code"] < len(ring.OPERATIONS)).all()
    events = reader.recent(0)
    assert (events["ended"][~ring.flows(events)] <= now + 10**9).all()
    assert all(thread.name.isprintable() for thread in reader.threads().values())


# Sums of streams' counts: bounded in number, and never going back.


def stream(name: str, lag: int = 0, acked: int = 0, appended: int = 0, **changed: Any) -> StreamCounts:
    task = TaskCounts(lag, 0, (acked, 0, acked, 0))
    given: dict[str, Any] = {"tasks": {"actor": task}} | changed
    return StreamCounts(given.pop("identity", name), name, lag, 10 * lag, 1.0, 0, appended, **given)


def test_streams_with_the_most_lag_are_named_and_the_rest_are_summed() -> None:
    found = Ledger().look([stream(f"s{n:04}", lag=n, acked=2 * n, appended=3 * n) for n in range(1000)])
    assert len(found) == NAMED + 1
    assert set(found) - {OTHERS} == {f"s{n:04}" for n in range(950, 1000)}
    others = StreamFigures.of(found[OTHERS])
    assert others.rows == sum(range(950))
    assert others.appended == 3 * sum(range(950))
    assert others.tasks[OTHERS].acked == 2 * sum(range(950))


def test_sums_never_decrease_when_streams_change_rank_or_are_dropped() -> None:
    ledger = Ledger(named=1)
    before = 0
    acked = {"a": 100, "b": 50}
    for step in range(20):
        lag = {"a": step % 3, "b": 1}
        for name in acked:
            acked[name] += 10
        found = ledger.look([stream(name, lag=lag[name], acked=acked[name]) for name in acked])
        others = StreamFigures.of(found[OTHERS]).tasks[OTHERS].acked
        assert others >= before
        before = others
    assert ledger.counts[2] == sum(acked.values())
    ledger.close(stream("b", acked=acked["b"] + 7))
    found = ledger.look([stream("a", acked=acked["a"])])
    assert ledger.counts[2] == sum(acked.values()) + 7
    assert StreamFigures.of(found[OTHERS]).tasks[OTHERS].acked >= before
