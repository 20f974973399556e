"""Addresses, listening, and the channel: messages and descriptors over a real socket."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from dataplane.errors import DataplaneError, Misuse, PeerUnavailable, ProtocolMismatch
from dataplane.wire import local
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyReply, AnyRequest, decoder
from dataplane.wire.framing import Framer, frame
from dataplane.wire.local import LocalChannel, connect, listen
from tests.cases import each_case
from tests.processes import until, without_descriptors

messages: msgspec.msgpack.Decoder[Any] = decoder(AnyRequest | AnyReply)


class End:
    """A channel that remembers what happened to it."""

    def __init__(self, connected: socket.socket, *, descriptors: bool = False) -> None:
        connected.setblocking(False)
        self.got: list[Any] = []
        self.closed: list[DataplaneError | None] = []
        self.taken: list[int] = []
        self.on_message: Callable[[Any], object] = lambda message: None
        self.channel = LocalChannel(connected, messages, self._received, self.closed.append, descriptors=descriptors)

    def _received(self, message: Any) -> None:
        self.got.append(message)
        for grant in getattr(message, "grants", ()):
            assert grant
            self.taken += self.channel.take_descriptors(1)
        self.on_message(message)

    async def message(self, count: int = 1) -> Any:
        await until(lambda: len(self.got) >= count or self.closed)
        assert len(self.got) >= count, self.closed
        return self.got[-1]

    async def end(self) -> DataplaneError | None:
        await until(lambda: self.closed)
        return self.closed[0]


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair = End(one), End(two, descriptors=True)
    yield pair
    for end in pair:
        end.channel.close()
        for descriptor in end.taken:
            os.close(descriptor)


Ends = tuple[End, End]


@pytest.fixture
def raw() -> Any:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one.settimeout(60)
    yield one, two
    one.close()
    two.close()


async def test_others_have_a_turn_among_the_slow_requests_of_one_client(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SLICE_S", -1.0)  # each request takes longer
    one, two = ends
    turns: list[int] = []

    def slow(request: Any) -> None:
        turns.append(request.id)
        asyncio.get_running_loop().call_soon(turns.append, 0)

    two.on_message = slow
    one.channel.gather()
    for number in (1, 2, 3):
        one.channel.send(m.ReadStats(number))
    await two.message(3)
    one.channel.send(m.ReadStats(4))
    await two.message(4)
    await until(lambda: len(turns) == 8)
    assert turns == [1, 0, 2, 0, 3, 0, 4, 0]


def test_a_listening_socket_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with listen(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_connect_without_free_descriptors_raises_peer_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(PeerUnavailable, match="Too many open files"):
        connect(tmp_path / "s")


async def test_the_last_message_of_a_closed_channel_is_received_by_a_sending_peer(ends: Ends) -> None:
    """Sending to a side that has gone must not lose what it said before it went."""
    one, two = ends
    one.channel.send(m.Failure(0, "Rejected", "because", {}))
    one.channel.close()
    for i in range(3):
        two.channel.send(m.ReadStats(i))
    assert await two.end() is None
    assert two.got == [m.Failure(0, "Rejected", "because", {})]


async def test_a_side_that_does_not_read_is_cut_off(raw: Any) -> None:
    _, ours = raw
    end = End(ours)
    sent = 0
    while not end.closed:
        end.channel.send(sm.PutShard(1, bytes(1 << 20), b"", "", 1.0))
        sent += 1
        assert sent < 40
    assert isinstance(end.closed[0], ProtocolMismatch)
    assert sent > 16


def pipes(count: int) -> tuple[list[int], list[int]]:
    both = [os.pipe() for _ in range(count)]
    return [read for read, _ in both], [write for _, write in both]


def grants(count: int) -> list[m.SegmentGrant]:
    return [m.SegmentGrant(i, 4096, False) for i in range(count)]


@pytest.mark.parametrize(
    "count", [1, pytest.param(5, marks=pytest.mark.long), pytest.param(64, marks=pytest.mark.long), 65, 200]
)
async def test_descriptors_arrive_with_their_message_in_order(ends: Ends, count: int) -> None:
    one, two = ends
    reads, writes = pipes(count)
    one.channel.send(sm.Reserved(1, [], grants(count)), writes)
    await two.message()
    assert len(two.taken) == count
    for number, (ours, theirs) in enumerate(zip(writes, two.taken, strict=True)):
        os.close(ours)
        os.write(theirs, number.to_bytes(2, "little"))
    assert [int.from_bytes(os.read(read, 9), "little") for read in reads] == list(range(count))
    for read in reads:
        os.close(read)


async def test_descriptors_of_messages_that_are_never_sent_are_closed(ends: Ends) -> None:
    one, _ = ends
    before = len(os.listdir("/proc/self/fd"))
    reads, writes = pipes(70)
    one.channel.send(sm.PutShard(0, bytes(3 << 20), b"", "", 1.0))
    one.channel.send(sm.Reserved(1, [], grants(70)), writes)
    assert len(os.listdir("/proc/self/fd")) == before + 210
    one.channel.close()
    for descriptor in (*reads, *writes):
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before - 1


async def test_a_descriptor_that_finds_no_room_in_the_process_ends_the_connection(ends: Ends) -> None:
    one, two = ends
    reads, writes = pipes(1)
    with without_descriptors():
        one.channel.send(sm.Reserved(1, [], grants(1)), writes)
        with pytest.raises(PeerUnavailable, match="ulimit -n"):
            raise await two.end() or AssertionError
    for descriptor in (*reads, *writes):
        os.close(descriptor)


async def test_received_descriptors_that_are_not_taken_are_closed(ends: Ends) -> None:
    one, two = ends
    reads, writes = pipes(2)
    one.channel.send(sm.Reserved(1, [], grants(1)), writes)  # two where one is announced
    await two.message()
    two.channel.close()
    os.close(writes[0])
    os.close(writes[1])
    os.close(two.taken.pop())
    for read in reads:
        assert os.read(read, 1) == b""  # no other end is open any more
        os.close(read)


async def taken(theirs: socket.socket, size: int) -> None:
    """The other side takes so many bytes."""
    loop, left = asyncio.get_running_loop(), size
    while left:
        left -= len(await loop.sock_recv(theirs, min(left, 1 << 20)))


async def test_senders_that_wait_for_room_proceed_one_by_one_in_order(raw: Any) -> None:
    theirs, ours = raw
    theirs.setblocking(False)
    end, order = End(ours), list[int]()
    message = sm.PutShard(1, bytes(2 << 20), b"", "", 1.0)

    async def answer(number: int) -> None:
        await end.channel.room()
        order.append(number)
        end.channel.send(message)

    end.channel.send(message)
    assert end.channel.full
    tasks = [asyncio.create_task(answer(number)) for number in range(20)]
    await asyncio.sleep(0)
    assert order == [], "there is no room"
    tasks.pop(3).cancel()
    await taken(theirs, len(frame(message)) * 20)
    await asyncio.gather(*tasks)
    assert order == [number for number in range(20) if number != 3]
    assert end.closed == []
    end.channel.close()


async def test_a_channel_does_not_read_while_its_answers_are_not_read(raw: Any) -> None:
    theirs, ours = raw
    theirs.setblocking(False)
    end = End(ours)
    end.on_message = lambda message: end.channel.send(sm.PutShard(message.id, bytes(2 << 20), b"", "", 1.0))
    theirs.sendall(b"".join(frame(m.ReadStats(number)) for number in range(10)))
    await end.message()
    await asyncio.sleep(0)
    assert len(end.got) == 1
    await taken(theirs, 10 * len(frame(sm.PutShard(1, bytes(2 << 20), b"", "", 1.0))))
    await end.message(10)
    end.channel.close()


async def test_a_failing_message_handler_closes_the_channel(raw: Any) -> None:
    theirs, ours = raw
    end = End(ours)

    def fail(message: Any) -> None:
        raise KeyError(message.id)

    end.on_message = fail
    theirs.sendall(frame(m.ReadStats(1)) + frame(m.ReadStats(2)))
    assert isinstance(await end.end(), ProtocolMismatch)
    assert end.got == [m.ReadStats(1)]


async def test_a_message_that_cannot_be_encoded_is_misuse_and_the_channel_stays_open(ends: Ends) -> None:
    one, two = ends
    with pytest.raises(Misuse, match="with an invalid field"):
        one.channel.send(sm.ShardStored(1, 1 << 64))
    one.channel.send(m.ReadStats(2))
    assert await two.message() == m.ReadStats(2)


# Frames: cut anywhere on the way, put together again; lengths that nobody may send.

bodies = st.lists(st.binary(max_size=200), max_size=12)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(bodies, st.data())
def test_messages_survive_any_fragmentation(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    framer = Framer()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += framer.feed(stream[start:end])
    assert got == sent
    assert list(framer.feed(b"")) == []


@each_case("size", [m.MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_an_invalid_frame_length_is_refused_before_buffering(size: int) -> None:
    framer = Framer()
    with pytest.raises(ProtocolMismatch, match=str(size)):
        list(framer.feed(struct.pack("<I", size)))
