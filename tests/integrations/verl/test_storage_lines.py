"""Requests over plain sockets, answered by a ZeroMQ socket as TransferQueue's controller has one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

zmq = pytest.importorskip("zmq", reason="needs TransferQueue: make test-integrations")

from dataplane.errors import Closed, Corrupt, PeerUnavailable  # noqa: E402
from dataplane.integrations.verl import zmtp  # noqa: E402
from dataplane.integrations.verl.lines import Lines  # noqa: E402

HOST = "127.0.0.1"


class Router:
    """Answers each message with itself, backwards, but for `b"wait"` once, which it keeps until the next comes."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://{HOST}:{port or '*'}")
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2])
        self.heard = threading.Semaphore(0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        kept = []
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            identity, *frames = self._socket.recv_multipart()
            self.heard.release()
            kept.append([identity, *frames[::-1]])
            if frames != [b"wait"]:
                for each in kept:
                    self._socket.send_multipart(each)
                kept = []
        self._socket.close()
        self._context.term()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.end()


@pytest.fixture
def lines(router: Router) -> Iterator[Lines]:
    made = Lines((HOST, router.port), "test", 20)
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, 255, 256, 1 << 20])
def test_each_request_has_its_own_answer(lines: Lines, size: int) -> None:
    async def many() -> None:
        asked = [[f"{number}".encode(), bytes(size)] for number in range(20)]
        assert await asyncio.gather(*map(lines.ask, asked)) == [frames[::-1] for frames in asked]

    for _ in range(2):  # a loop each
        asyncio.run(many())
    assert len(lines._lines) == 1, "that of the closed loop has gone"


def test_a_late_answer_is_nobodys(router: Router, lines: Lines) -> None:
    async def two() -> list[bytes]:
        given_up = asyncio.create_task(lines.ask([b"wait"]))
        assert await asyncio.to_thread(router.heard.acquire, timeout=20)
        given_up.cancel()
        return await lines.ask([b"other"])

    assert asyncio.run(two()) == [b"other"]


def test_a_controller_that_ends_is_told_of_and_the_next_is_found(router: Router, lines: Lines) -> None:
    async def over() -> None:
        waiting = asyncio.create_task(lines.ask([b"wait"]))
        assert await asyncio.to_thread(router.heard.acquire, timeout=20)
        await asyncio.to_thread(router.end)
        with pytest.raises(PeerUnavailable, match="has ended"):
            await waiting
        with pytest.raises(PeerUnavailable):
            await lines.ask([b"nobody"])
        again = Router(router.port)
        try:
            assert await lines.ask([b"again"]) == [b"again"]
        finally:
            again.end()

    asyncio.run(over())


def test_who_waits_as_it_is_closed_is_told(router: Router, lines: Lines) -> None:
    async def closed() -> None:
        waiting = asyncio.create_task(lines.ask([b"wait"]))
        assert await asyncio.to_thread(router.heard.acquire, timeout=20)
        await asyncio.to_thread(lines.close)
        for ask in (waiting, lines.ask([b"more"])):
            with pytest.raises(Closed):
                await ask

    asyncio.run(closed())


def test_messages_come_whole_in_whatever_pieces() -> None:
    said = zmtp.GREETING + zmtp.ready(b"x") + zmtp.message([b"a", b"b" * 300]) + zmtp.message([b""])
    for piece in (1, 7, 64, len(said)):
        incoming, found = zmtp.Incoming(), []
        for start in range(0, len(said), piece):
            found += incoming.feed(said[start : start + piece])
        assert incoming.greeted
        assert incoming.ready
        assert found == [[b"a", b"b" * 300], [b""]]


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n" * 3,
        zmtp.GREETING.replace(b"NULL", b"GSSA"),
        zmtp.GREETING + b"\x04\x0b\x05ERROR\x04oops",
        zmtp.GREETING + b"\x77\x01x",
    ],
)
def test_what_is_no_zmtp_is_refused(said: bytes) -> None:
    with pytest.raises(Corrupt):
        zmtp.Incoming().feed(said)
