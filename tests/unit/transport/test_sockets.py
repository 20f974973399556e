"""ByteRanges through real sockets: large and small, in any mixture, whole or not at all."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.transport import choice
from dataplane.transport.channels import Transport, TransportError
from dataplane.transport.choice import TransportChoice, started
from dataplane.transport.offers import DONE, OfferedMemory
from dataplane.transport.sockets import SMALL, ByteRange, Memory, connect, exactly, mapping, receive, send
from dataplane.transport.tcp import Tcp

SIZE, OFFSET = 4 << 20, 5000  # not at the start of a page
CONTENT = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    fd = os.memfd_create("offered")
    os.ftruncate(fd, OFFSET + SIZE)
    os.pwrite(fd, CONTENT, OFFSET)
    yield Memory(fd, OFFSET, SIZE)
    os.close(fd)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.settimeout(60)
    far.settimeout(60)
    with near, far:
        yield near, far


def through(
    ends: tuple[socket.socket, socket.socket], memory: Memory, mapped: mmap.mmap | None, chosen: list[ByteRange]
) -> bytes:
    target = bytearray(SIZE)
    sending = threading.Thread(target=send, args=(ends[0], memory, mapped, chosen, lambda: False))
    sending.start()
    receive(ends[1], memoryview(target), chosen)
    sending.join()
    return bytes(target)


@st.composite
def ranges(draw: st.DrawFn) -> list[ByteRange]:
    """Ascending and apart, some large, most small."""
    made, at = [], 0
    for gap, size in draw(
        st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 7, 4096, SMALL - 1, SMALL, 300_000])))
    ):
        if at + gap + size > SIZE:
            break
        made.append((at + gap, at + gap + size))
        at += gap + size
    return made


@given(chosen=ranges(), gathers=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exactly_the_named_byte_ranges_are_transferred(
    ends: tuple[socket.socket, socket.socket], memory: Memory, chosen: list[ByteRange], gathers: bool
) -> None:
    expected = np.zeros(SIZE, np.uint8)
    for start, stop in chosen:
        expected[start:stop] = CONTENT[start:stop]
    if not gathers:
        assert through(ends, memory, None, chosen) == expected.tobytes()
        return
    with mapping(memory) as mapped:
        assert through(ends, memory, mapped, chosen) == expected.tobytes()


def test_an_unreachable_address_is_followed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("255.255.255.255", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with connect("somewhere", port, 60.0, lambda: False) as connected:
            assert connected.getpeername() == ("127.0.0.1", port)


@pytest.mark.parametrize("say", [lambda stream: stream.close(), lambda stream: None])
def test_a_truncated_message_raises_an_error(
    ends: tuple[socket.socket, socket.socket], say: Callable[[socket.socket], None]
) -> None:
    ends[0].sendall(b"half")
    say(ends[0])
    with pytest.raises((EOFError, OSError)):
        exactly(ends[1], 8, 0.05)


# One offer: each byte once, and an end that is one.


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def offered() -> OfferedMemory:
    return OfferedMemory(Memory(0, 0, 100))


def test_each_byte_is_granted_once(offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]) -> None:
    stream, _ = pair
    wanted = [[(10, 20), (30, 40)], [(15, 16)], [(0, 11)], [(20, 30)], [(39, 41)], [(0, 10), (40, 100)]]
    assert [offered.take(stream, each) for each in wanted] == [True, False, False, True, False, True]


def test_an_offer_ended_before_its_confirmation_closes_the_connection(
    offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    stream, reader = pair
    assert offered.take(stream, [(0, 100)])
    ending = threading.Thread(target=offered.end, args=(10.0,))
    ending.start()
    assert reader.recv(1) == b""
    with pytest.raises(EOFError):
        offered.confirm(stream)
    offered.leave(stream)
    ending.join(60)
    assert not ending.is_alive()


def test_an_offer_ended_after_its_confirmation_leaves_the_connection_usable(
    offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The reader withdraws as soon as it has the last word, maybe before the thread that said it has gone on."""
    stream, reader = pair
    assert offered.take(stream, [(0, 100)])
    offered.confirm(stream)
    offered.end(0.0)
    stream.sendall(b"next")
    assert reader.recv(10) == DONE + b"next"


def test_a_reader_that_does_not_leave_an_ended_offer_is_disconnected(
    offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    stream, reader = pair
    assert offered.take(stream, [(0, 100)])

    def serve() -> None:
        stream.recv(1)  # until it is shut down on this side, too
        offered.leave(stream)

    serving = threading.Thread(target=serve)
    serving.start()
    offered.end(0.01)
    serving.join(60)
    assert reader.recv(1) == b""
    assert not offered.take(stream, [(0, 100)])


# Which transports a node has, and which of them reads from whom.

NODE, OTHER = b"node", b"other"
BOTH = {"first": "", "second": ""}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Named(Tcp):
    def __init__(self, name: str) -> None:
        super().__init__("127.0.0.1")
        self.name = name


class Missing(Named):
    async def start(self) -> None:
        raise OSError("its library is not installed")


FIRST, SECOND = Named("first"), Named("second")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def chosen(clock: Clock) -> TransportChoice:
    return TransportChoice([FIRST, SECOND], clock)


def fail(chosen: TransportChoice, node: bytes, transport: Transport, times: int = 1) -> None:
    for _ in range(times):
        chosen.failed(node, transport, TransportError("no"))


def test_a_failing_transport_is_tried_last_for_its_node_for_a_while(chosen: TransportChoice, clock: Clock) -> None:
    fail(chosen, NODE, FIRST, 2)
    assert chosen.of(NODE, BOTH) == [FIRST, SECOND]
    fail(chosen, NODE, FIRST)
    assert chosen.of(NODE, BOTH) == [SECOND, FIRST]
    assert chosen.of(OTHER, BOTH) == [FIRST, SECOND]
    assert chosen.of(NODE, {"first": ""}) == [FIRST]
    clock.now += 61
    assert chosen.of(NODE, BOTH) == [FIRST, SECOND]
    fail(chosen, NODE, FIRST)  # and at once again, where it has not worked meanwhile
    assert chosen.of(NODE, BOTH) == [SECOND, FIRST]


async def test_a_named_transport_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves none of the others listening: `no_leaks` sees to that."""
    monkeypatch.setattr(choice, "MAKERS", {"tcp": Tcp, "ucx": lambda host, told: Missing("ucx")})
    with pytest.raises(OSError, match="not installed"):
        await started(["tcp", "ucx"], "127.0.0.1")


async def test_an_automatic_transport_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "MAKERS", {"tcp": Tcp, "ucx": lambda host, told: Missing("ucx")})
    monkeypatch.setattr(choice, "automatic", lambda: ["ucx", "tcp"])
    with caplog.at_level(logging.WARNING):
        (only,) = await started([], "127.0.0.1")
    assert only.name == "tcp"
    assert caplog.messages == ["transport ucx is not available: its library is not installed"]
    await only.aclose()
