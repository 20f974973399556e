"""Pins of a connection: dropped once, from any thread, also after the plane was closed."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from dataplane.batch import locations
from dataplane.batch.batch import Batch
from dataplane.batch.field import Field
from dataplane.batch.locations import RowSpan, ref_to
from dataplane.batch.put_plan import layout_of, plan
from dataplane.batch.ref import BatchRef
from dataplane.client.memory import NodeSegment
from dataplane.client.pins import ClientPins, ShardPin, drop_later
from dataplane.client.reader import SpanShard
from dataplane.client.writer import _payload
from dataplane.clock import Deadline
from dataplane.errors import Corrupt
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyRequest, decoder
from dataplane.wire.framing import Framer, frame
from dataplane.wire.places import pack
from tests.processes import WAIT_S

requests = decoder(AnyRequest)


class Flushes:
    def __init__(self) -> None:
        self.count = 0
        self.pins = ClientPins(self.ask)

    def ask(self) -> None:
        self.count += 1


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The plane's end, not blocking, and the node's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    theirs.settimeout(60)
    yield ours, theirs
    ours.close()
    theirs.close()


def said(theirs: socket.socket) -> list[Any]:
    """Everything until the other end is closed."""
    framer = Framer()
    got = []
    while data := theirs.recv(1 << 16):
        got += [requests.decode(body) for body in framer.feed(data)]
    return got


def test_pins_dropped_by_many_threads_are_each_taken_once() -> None:
    flushes = Flushes()
    pins = flushes.pins
    expected: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    together = threading.Barrier(6)

    def drop(held: list[ShardPin]) -> None:
        together.wait()
        while held:
            held.pop()

    def take() -> None:
        together.wait()
        for _ in range(2000):
            taken.update(pins.take())

    threads = [threading.Thread(target=take)]
    for thread in range(5):
        shards = [thread * 1000 + i % 100 for i in range(400)]
        expected.update(shards)
        threads.append(threading.Thread(target=drop, args=([pins.hold(shard) for shard in shards],)))
    for running in threads:
        running.start()
    for running in threads:
        running.join()
    taken.update(pins.take())
    assert taken == expected
    assert pins.live == 0


def test_a_pin_is_taken_if_an_interrupt_ends_its_finalizer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    pins, before = Flushes().pins, sys.gettrace()
    held = [pins.hold(1, 2), pins.hold(3)]
    sys.settrace(interrupt)  # the first Python function that is called raises
    held.pop()
    sys.settrace(before)
    assert [each.exc_type for each in lost] == [KeyboardInterrupt]
    lost.clear()
    assert pins.live == 1
    assert pins.dropped
    assert pins.take() == [3]
    held.pop()
    assert (pins.take(), pins.live) == ([1, 2], 0)


def test_a_flush_finds_the_pin_that_asked_for_it() -> None:
    taken: list[int] = []
    pins = ClientPins(lambda: taken.extend(pins.take()))
    held = [pins.hold(1), pins.hold(2)]
    held.clear()
    assert sorted(taken) == [1, 2]


def test_a_fork_does_not_wait_for_a_thread_that_drops_a_pin() -> None:
    """The collector may run within the drop, and a finalizer then get a pin, which waits for the fork."""
    dropping, forked, passed = threading.Event(), threading.Event(), list[bool]()

    def flush() -> None:
        dropping.set()
        passed.append(forked.wait(WAIT_S))

    def fork() -> None:
        pins.before_fork(Deadline.after(0.0))
        forked.set()

    pins = ClientPins(flush)
    held = [pins.hold(1)]
    threads = [threading.Thread(target=held.clear), threading.Thread(target=fork)]
    threads[0].start()
    assert dropping.wait(WAIT_S)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert passed == [True]


def test_unpins_at_a_full_socket_neither_block_nor_corrupt_the_stream(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    pins = Flushes().pins
    held = {shard: pins.hold(shard) for shard in range(3)}
    filler = sm.PutShard(1, bytes(1 << 20), b"", "", 1.0)
    rest = memoryview(frame(filler))
    with suppress(BlockingIOError):
        while True:
            rest = rest[ours.send(rest) :]
    pins.inherit(ours, bytes(rest))
    del held[0]  # nobody reads
    framer = Framer()
    sent = len(frame(filler)) - len(rest)
    while sent:
        data = theirs.recv(min(sent, 1 << 16))
        sent -= len(data)
        assert list(framer.feed(data)) == []
    del held[1]  # now there is room for the rest, as far as it goes
    del held[2]
    theirs_got = bytearray()
    while data := theirs.recv(1 << 16):
        theirs_got += data
    got = [requests.decode(body) for body in framer.feed(bytes(theirs_got))]
    # What did not fit before the end is told by the end; what came is whole, and in order.
    assert got in ([], [filler], [filler, sm.UnpinShards([0])], [filler, sm.UnpinShards([0]), sm.UnpinShards([1])])


class Interrupted:
    """A socket; the first time that something is sent, a pin is dropped in the middle of it."""

    def __init__(self, connected: socket.socket, held: list[ShardPin]) -> None:
        self._connected = connected
        self._held = held
        self.close = connected.close

    def send(self, data: bytes) -> int:
        if self._held:
            self._held.pop()
        return self._connected.send(data)


def test_a_pin_dropped_during_the_send_of_another_is_sent_once_after_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    pins = Flushes().pins
    first, last = pins.hold(1), pins.hold(3)
    connected: Any = Interrupted(ours, [pins.hold(2)])
    pins.inherit(connected, b"")
    del first
    del last
    assert [message.shards for message in said(theirs)] == [[1], [2]]  # and the third by the end


def test_pins_dropped_in_a_forked_child_stay_held(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    pins = Flushes().pins
    held = {shard: pins.hold(shard) for shard in range(3)}
    pins.inherit(ours, b"")
    pid = os.fork()
    if pid == 0:
        held.clear()
        os._exit(0)
    os.waitpid(pid, 0)
    assert pins.live == 3
    for shard in range(3):
        del held[shard]
    assert [message.shards for message in said(theirs)] == [[0], [1]]  # and the third by the end


def test_a_pin_used_by_a_device_is_dropped_after_the_device_has_finished() -> None:
    flushes, done = Flushes(), False
    drop_later(flushes.pins.hold(1), lambda: done)
    assert not flushes.pins.dropped
    done = True
    assert flushes.pins.live == 1
    assert flushes.pins.dropped
    assert flushes.pins.take() == [1]
    assert flushes.pins.live == 0


# Rows in one run of one shard: the short way gives what the long one gives, and refuses what that refuses.

NODE = bytes(range(8))
COLUMNS = {
    "ids": [[1, 2, 3], [], [4]],
    "logp": np.arange(12, dtype=np.float32).reshape(3, 4),
    "flag": np.array([True, False, True]),
    "text": ["a", "", "ccc"],
    "info": [{"x": 1}, {"x": 2}, {"x": 3}],
}


def stored(columns: dict[str, Any]) -> tuple[BatchRef, bytes, bytes]:
    """A reference to all of a shard of these columns, its layout, and its bytes."""
    planned = plan(columns)
    placed = [(c.name, c.field, c.logical_nbytes, 7, i) for i, c in enumerate(planned.columns)]
    return ref_to(NODE, planned.rows, placed), layout_of(planned.columns), _payload(planned.columns)


def answer(layout: bytes, payload: bytes, *, places: bytes | None = None) -> sm.Held:
    """As a node answers for a small shard, whose bytes it carries."""
    told = pack([7, -1, 0, len(payload), 0, 0]) if places is None else places
    return sm.Held(1, told, [layout], [], carried=payload)


def opened(span: RowSpan | None, reply: sm.Held) -> Batch:
    assert span is not None
    segments: dict[int, NodeSegment] = {}
    return SpanShard(reply).opened(span, segments, ShardPin)


def test_only_contiguous_rows_of_one_shard_form_a_span() -> None:
    ref, _, _ = stored(COLUMNS)
    other = ref_to(NODE, 3, [("more", Field("dense", "float32", ()), 12, 8, 0)])
    assert locations.span_of(ref[[0, 2]]) is None
    assert locations.span_of(ref[[2, 1, 0]]) is None
    assert locations.span_of(ref.union(other)) is None
    assert locations.span_of(ref[0:0]) is None
    assert locations.span_of(locations.numbered(ref, lambda key: key[1] | 1 << 40)) is None  # a link


def test_an_answer_that_carries_too_little_is_refused() -> None:
    ref, layout, payload = stored(COLUMNS)
    reply = answer(layout, payload[:-64], places=pack([7, -1, 0, len(payload), 0, 0]))
    with pytest.raises(Corrupt):
        opened(locations.span_of(ref), reply)
