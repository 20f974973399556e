"""The connection: requests that end whatever happens, replies to nobody, errors that keep nothing alive."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import dataplane as dp
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.rows import RowIndices
from dataplane.client import ownership
from dataplane.client.connection import Connection
from dataplane.client.ownership import part_nbytes, parts_of, portions
from dataplane.client.reader import Getter
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings
from dataplane.stream.snapshot_format import Head
from dataplane.table import requests as t
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyRequest, decoder
from dataplane.wire.local import LocalChannel, format_address, listen
from dataplane.wire.places import pack
from tests.processes import MIB, StandingNode, pattern, until

_requests = decoder(AnyRequest)


class Scripted:
    """A node's end of one connection: remembers what it is asked, and answers what the test has it answer."""

    def __init__(self, path: Path) -> None:
        self.address = format_address(path)
        self.asked: list[Any] = []
        self.answer: Callable[[Any], list[m.Message]] = lambda request: []
        self.channel: LocalChannel | None = None
        self._listener = listen(path)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        connected.setblocking(False)
        self.channel = LocalChannel(connected, _requests, self._received, lambda error: None)

    def _received(self, request: Any) -> None:
        assert self.channel is not None
        if isinstance(request, m.Hello):
            self.channel.send(m.Welcome(request.id, m.MAJOR, 0, b"scripted", MIB, 0.2, [], 0, shared_s=0.05))
            return
        self.asked.append(request)
        for message in self.answer(request):
            self.channel.send(message)

    def kinds(self) -> list[str]:
        return [type(request).__name__ for request in self.asked]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if self.channel is not None:
            self.channel.close()


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[Scripted]:
    scripted = Scripted(tmp_path / "s")
    yield scripted
    scripted.close()


@pytest.fixture
async def connection(scripted: Scripted) -> AsyncIterator[Connection]:
    connection = await Connection.open(scripted.address, asyncio.get_running_loop().call_soon_threadsafe)
    yield connection
    connection.close()


def stats(connection: Connection) -> m.ReadStats:
    return m.ReadStats(connection.next_id())


CHANGES: dict[str, Callable[[int], Any]] = {
    "free": lambda i: sm.Free(i, [4], [], ""),
    "append": lambda i: rm.AppendRows(i, b"s", [], b"", [], b"", {}, None, {}, 0.0, rm.Inline(b"", b"", [])),
    "ack": lambda i: rm.AskStream(i, b"s", r.Ack(grant=1, replica=None)),
    "upsert": lambda i: rm.AskTable(i, "t", b"", t.ClearRows(rows=np.zeros(0, np.int64))),
}
READS: dict[str, Callable[[int], Any]] = {
    "stats": m.ReadStats,
    "put": lambda i: sm.PutShard(i, b"", b"", "", 0.0),
    "consume": lambda i: rm.AskStream(i, b"s", r.Measure()),
    "look": lambda i: rm.AskTable(i, "t", b"", t.DescribeColumns()),
}
ASKED = [
    *(pytest.param(made, dp.OutcomeUnknown, id=name) for name, made in CHANGES.items()),
    *(pytest.param(made, dp.PeerUnavailable, id=name) for name, made in READS.items()),
]


@pytest.mark.parametrize(("made", "error"), ASKED)
@pytest.mark.parametrize("gone", [False, True], ids=["late", "gone"])
async def test_an_unanswered_change_has_an_unknown_outcome(
    scripted: Scripted,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[int], Any],
    error: type[dp.DataplaneError],
    gone: bool,
) -> None:
    monkeypatch.setattr("dataplane.client.connection._ANSWER_S", 60.0 if gone else 0.05)
    waiting = asyncio.create_task(connection.request(made(connection.next_id()), m.Done, 60.0 if gone else 0.0))
    await until(lambda: bool(scripted.asked))
    assert scripted.channel is not None
    if gone:
        scripted.channel.close()
    with pytest.raises(error) as caught:
        await waiting
    assert type(caught.value) is error


@pytest.mark.parametrize("made", CHANGES.values(), ids=CHANGES)
async def test_a_change_that_was_not_sent_raises_peer_unavailable(
    scripted: Scripted, connection: Connection, made: Callable[[int], Any]
) -> None:
    await until(lambda: scripted.channel is not None)
    assert scripted.channel is not None
    scripted.channel.close()
    for _ in range(2):
        with pytest.raises(dp.PeerUnavailable):
            await connection.request(made(connection.next_id()), m.Done, 60.0)


HEAD = Head(StreamSettings(("a",)), "", 0, 0, 0, False, [])
GRANTED: list[tuple[Any, str]] = [
    (lambda i: sm.Reserved(i, [(4, 0, 0, 4096), (5, 0, 4096, 4096)], []), "Abort"),
    (lambda i: sm.Held(i, pack([4, 0, 0, 4096, 0, 0, 5, 0, 0, 64, 0, 0]), [b""], []), "UnpinShards"),
    (lambda i: sm.ShardStored(i, 4), "Free"),
    (lambda i: rm.StreamAnswer(i, b"s", r.SnapshotTaken(4, HEAD, [])), "AskStream"),
]


@pytest.mark.parametrize(("reply", "undone"), GRANTED)
async def test_resources_granted_to_a_cancelled_request_are_given_back(
    scripted: Scripted, connection: Connection, reply: Any, undone: str
) -> None:
    task = asyncio.create_task(connection.request(stats(connection), m.Figures, 5.0))
    await until(lambda: bool(scripted.asked))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scripted.channel is not None
    scripted.channel.send(reply(scripted.asked[0].id))
    await until(lambda: undone in scripted.kinds())
    (back,) = (request for request in scripted.asked if type(request).__name__ == undone)
    if undone == "AskStream":
        assert (back.stream, back.asked) == (b"s", r.ReleaseSnapshot(snapshot=4))
    else:
        assert back.shards == ([4] if undone == "Free" else [4, 5])


async def test_an_answer_to_nothing_ends_the_connection(scripted: Scripted, connection: Connection) -> None:
    scripted.answer = lambda request: [m.Done(999)]
    with pytest.raises(dp.ProtocolMismatch, match="999"):
        await connection.request(stats(connection), m.Figures, 5.0)
    with pytest.raises(dp.ProtocolMismatch):
        connection.check()


async def test_the_final_error_of_a_node_is_raised_by_all_waiting_requests(
    scripted: Scripted, connection: Connection
) -> None:
    waiting = [asyncio.create_task(connection.request(stats(connection), m.Figures, 5.0)) for _ in range(3)]
    await until(lambda: len(scripted.asked) == 3)
    assert scripted.channel is not None
    scripted.channel.send(m.Failure(0, "Unauthenticated", "not you", {"peer": "7", "of a later version": 1}))
    scripted.channel.close()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [dp.Unauthenticated] * 3
    assert len({id(error) for error in errors}) == 3  # each its own: one error raised twice grows two tracebacks
    with pytest.raises(dp.Unauthenticated) as caught:
        connection.check()
    assert caught.value.peer == "7"


async def test_a_request_that_is_too_large_is_refused_by_the_client(scripted: Scripted, connection: Connection) -> None:
    with pytest.raises(dp.LimitExceeded):
        await connection.request(sm.PinShards(connection.next_id(), [2**60] * 500_000, 1.0), sm.Held, 1.0)
    scripted.answer = lambda request: [m.Figures(request.id, {})]
    await connection.request(stats(connection), m.Figures, 5.0)
    assert scripted.kinds() == ["ReadStats"]


async def test_a_notification_that_is_too_large_leaves_no_pending_answer(connection: Connection) -> None:
    with pytest.raises(dp.LimitExceeded):
        connection.tell(sm.Free(connection.next_id(), [2**60] * 500_000))
    assert not connection.owed


async def test_a_prefetch_that_is_too_large_for_a_message_is_skipped(
    scripted: Scripted, connection: Connection
) -> None:
    """Rows of another node, so scattered that their numbers are too many for a message."""
    numbers = np.random.default_rng(0).integers(1, 100, 4_000_000).cumsum()
    rows = int(numbers[-1]) + 1
    ref = ref_to(bytes(8), rows, [("x", Field("dense", "uint8"), rows, 1, 0)])[numbers]
    Getter(connection).prefetch(ref, 1.0)
    assert not connection.owed
    scripted.answer = lambda request: [m.Figures(request.id, {})]
    await connection.request(stats(connection), m.Figures, 5.0)
    assert scripted.kinds() == ["ReadStats"]


async def test_a_free_that_fails_at_one_node_frees_the_rows_of_the_others(
    scripted: Scripted, connection: Connection
) -> None:
    away, there = b"a" * 8, b"b" * 8
    ref = dp.concat([ref_to(node, 1, [("x", Field("dense", "uint8"), 1, 1, 0)]) for node in (away, there)])

    def answer(request: Any) -> list[m.Message]:
        if request.node == away:
            return [m.Failure(request.id, "PeerUnavailable", "away", {"address": ""})]
        return [m.Done(request.id)]

    scripted.answer = answer
    with pytest.raises(dp.PeerUnavailable, match="away"):
        await ownership.free(connection, ref, "")
    assert [request.node for request in scripted.asked] == [away, there]


async def test_heartbeats_are_sent_only_while_reservations_exist(scripted: Scripted, connection: Connection) -> None:
    connection.heartbeat.due(+1)
    await until(lambda: scripted.kinds().count("Alive") >= 4)
    connection.heartbeat.due(+1)
    connection.heartbeat.due(-2)
    count = len(scripted.asked)
    await asyncio.sleep(3 * 0.2 / 5)
    assert len(scripted.asked) <= count + 1


async def test_messages_waiting_at_a_full_socket_are_sent_before_the_close(
    scripted: Scripted, connection: Connection
) -> None:
    await until(lambda: scripted.channel is not None)
    assert scripted.channel is not None
    pin = connection.pins.hold(7)
    asyncio.get_running_loop().remove_reader(scripted.channel._socket.fileno())
    shards = list(range(1 << 20, (1 << 20) + 20_000))
    for _ in range(40):  # 4 MB, of which the socket takes a part
        connection.tell(sm.UnpinShards(shards))
    settling = asyncio.create_task(connection.settle())
    await asyncio.sleep(0)
    assert not settling.done()
    scripted.channel._read_on()
    await settling
    connection.close()
    await until(lambda: "Disconnect" in scripted.kinds())
    assert scripted.kinds() == ["UnpinShards"] * 40 + ["Disconnect"]
    del pin


@pytest.mark.parametrize("pinned", [False, True])
async def test_a_put_pending_at_close_is_cancelled_and_freed(
    scripted: Scripted, connection: Connection, pinned: bool
) -> None:
    pin = connection.pins.hold(7) if pinned else None
    put = sm.PutShard(connection.next_id(), b"", b"", "", 5.0)
    waiting = asyncio.create_task(connection.request(put, sm.ShardStored, 5.0))
    await until(lambda: bool(scripted.asked))
    scripted.answer = lambda request: {
        m.Cancel: lambda: [sm.ShardStored(put.id, 4)],
        sm.Free: lambda: [m.Done(request.id)],
    }.get(type(request), list)()
    await connection.settle()
    connection.close()
    with pytest.raises(dp.Closed):
        await waiting
    assert [type(request).__name__ for request in scripted.asked][:3] == ["PutShard", "Cancel", "Free"]
    assert scripted.asked[2].shards == [4]
    del pin


async def test_a_silent_node_delays_the_close_for_a_bounded_time(
    scripted: Scripted, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.connection._ANSWER_S", 0.05)
    waiting = asyncio.create_task(connection.request(stats(connection), m.Figures, 5.0))
    await until(lambda: bool(scripted.asked))
    async with asyncio.timeout(30):
        await connection.settle()
    connection.close()
    with pytest.raises(dp.Closed):
        await waiting


async def test_a_notification_to_a_lost_node_does_not_delay_the_close(
    scripted: Scripted, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.connection._ANSWER_S", 3600.0)
    await until(lambda: scripted.channel is not None)
    assert scripted.channel is not None
    scripted.channel.close()
    with pytest.raises(dp.PeerUnavailable):
        await connection.request(stats(connection), m.Figures, 5.0)
    connection.tell(sm.Free(connection.next_id(), [4]))
    async with asyncio.timeout(30):
        await connection.settle()


class Array(np.ndarray[Any, Any]):
    """An array that can be watched."""


@contextmanager
def uncollected() -> Iterator[None]:
    """With the garbage collector off: what goes, goes by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched(size: int) -> tuple[Any, weakref.ref[Any]]:
    column = pattern(1, size).view(Array)
    return column, weakref.ref(column)


sizes = pytest.mark.parametrize("size", [4096, 8 * MIB])


@sizes
def test_a_failed_put_releases_its_columns_with_its_error(tmp_path: Path, size: int) -> None:
    """Who tries again after Backpressure must not pile up what was refused until the collector comes."""
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as plane:
        kept = plane.get(plane.put({"x": pattern(0, 16 * MIB)}))["x"].numpy()
        with uncollected():
            column, gone = watched(size)
            try:
                plane.put({"x": column}, timeout=0.01)
            except dp.Backpressure:
                del column
            assert gone() is None
        assert kept[0, 9] == 9


# What is freed is told in messages, and none is too large for one.


def test_a_free_of_millions_of_rows_is_split_into_valid_messages() -> None:
    rows = RowIndices.index(np.arange(0, 6_000_000, 2))
    told = list(portions([*parts_of(1, (0,), rows), *parts_of(2, (0, 1), RowIndices.range(0, 9))], part_nbytes))
    assert all(len(msgspec.msgpack.encode(sm.Free(1, [], portion, ""))) < m.MAX_FRAME for portion in told)
    parts = [part for portion in told for part in portion]
    found = np.concatenate([RowIndices.decode(encoded).array() for shard, _, encoded in parts if shard == 1])
    assert np.array_equal(found, rows.array())
    assert parts[-1] == (2, [0, 1], (0, 9, b""))
