"""The control channel between nodes: over real sockets, with keys, and against who speaks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import zmq

from dataplane.cluster.membership import Member
from dataplane.errors import Backpressure, DataplaneError, PeerUnavailable, Rejected
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from dataplane.wire.messages import MAX_FRAME, Done, Message
from dataplane.wire.partition_messages import pack
from dataplane.wire.peer import Peers
from tests.cases import each_case
from tests.keys import KEY, speak
from tests.processes import until

NODE = b"node....".hex()
ANY = "tcp://127.0.0.1:0"
SOON_S = 0.2  # a deadline that is meant to pass
encode = msgspec.msgpack.encode
decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(pm.PeerReply).decode

Start = Callable[..., Peers]


async def done(request: Any) -> Message:
    return Done(request.id)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts ends of the channel, and ends them."""
    started: list[Peers] = []

    def one(
        answer: Callable[[Any], Message | Awaitable[Message]] = done,
        key: Key = KEY,
        listen: str = ANY,
        node: str = NODE,
        freed: Callable[[int], object] = lambda nbytes: None,
    ) -> Peers:
        peers = Peers(node, listen, key, answer, freed=freed)
        started.append(peers)
        peers.start()
        return peers

    yield one
    stray = [socket for peers in started for socket in strays(peers)]
    for socket in stray:
        socket.close(linger=0)  # else the end would wait for it
    for peers in started:
        await peers.aclose()
    assert not stray


def strays(peers: Peers) -> list[zmq.Socket[bytes]]:
    """Sockets that nobody knows of any more."""
    links = [end for link in peers._links.values() for end in (link.socket, link._monitor)]
    ends = [*links, *filter(None, [peers._router])]
    known = {id(end._socket) for end in ends}
    made = [] if peers._context.closed else [each for each in peers._context._sockets if not each.closed]
    return [each for each in made if id(each) not in known]


def withdraw(peers: Peers, ticket: bytes = b"ticket") -> pm.Withdraw:
    return pm.Withdraw(peers.next_id(), b"node", ticket)


async def asks(one: Peers, other: Peers, timeout_s: float = 5.0) -> None:
    """Fails where one can not ask the other."""
    await one.request(other, withdraw(one), Done, timeout_s)


async def test_an_error_of_an_answering_peer_is_logged_and_rejects_the_request(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: Any) -> Message:
        if request.ticket == b"bad":
            raise ZeroDivisionError("secret")
        return Done(request.id)

    one, other = start(), start(answer)
    with pytest.raises(Rejected) as caught:
        await one.request(other, withdraw(one, b"bad"), Done, 5)
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text
    await asks(one, other)


async def test_a_flood_of_requests_is_bounded_and_refused_with_backpressure(start: Start) -> None:
    running = 0
    most = 0
    go = asyncio.Event()

    async def answer(request: Any) -> Message:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return Done(request.id)

    one, other, third = start(), start(answer), start()
    asked = [asyncio.create_task(asks(one, other)) for _ in range(400)]
    await until(lambda: sum(each.done() for each in asked) == 400 - 256)
    assert running == 256
    not_first = asyncio.create_task(asks(third, other))
    await until(lambda: running == 257)
    go.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(result is None for result in results) == 256
    assert {type(result) for result in results} == {type(None), Backpressure}
    await not_first
    assert most == 257
    await asks(one, other)
    assert not other._answering


async def test_a_message_for_another_node_is_not_handled(start: Start) -> None:
    heard: list[Any] = []

    def answer(request: Any) -> Message:
        heard.append(request)
        return Done(getattr(request, "id", 0))

    one, other = start(), start(answer)
    gone = Member(1, other.address, node=b"gone....".hex())
    one.post(gone, pack(NODE, 1, []))
    with pytest.raises(PeerUnavailable, match="another node listens"):
        await one.request(gone, withdraw(one), Done, 5)
    assert heard == []
    one.post(other, pack(NODE, 1, []))
    await asks(one, other)
    assert len(heard) == 2


async def test_a_missing_answer_raises_peer_unavailable_and_blocks_no_other(start: Start) -> None:
    go = asyncio.Event()
    late: list[Any] = []

    async def answer(request: Any) -> Message:
        if request.ticket == b"slow":
            await go.wait()
            late.append(request)
        return Done(request.id)

    one, other = start(), start(answer)
    with pytest.raises(PeerUnavailable, match=r"has not answered for 0\.2 s"):
        await one.request(other, withdraw(one, b"slow"), Done, SOON_S)
    await asks(one, other)
    go.set()
    await until(lambda: late)
    await asks(one, other)


@each_case("address", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "foo://a:1"])
async def test_an_invalid_peer_address_raises_a_typed_error(start: Start, address: str) -> None:
    one, other = start(), start()
    with pytest.raises(DataplaneError):
        await one.request(Member(1, address, node=NODE), withdraw(one), Done, SOON_S)
    await asks(one, other)


class Raw:
    """A DEALER that says what it likes."""

    def __init__(self, address: str, key: Key | None = KEY) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        if key is not None:
            speak(self.socket, key)
        self.socket.connect(address)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()


GARBAGE: dict[str, list[bytes]] = {
    "nothing": [b""],
    "no message": [b"\xc1\xc1\xc1"],
    "noise": [bytes(range(256))],
    "another type": [encode(["hello", 1])],
    "a reply": [encode(Done(1))],
    "too few fields": [encode(["describe"])],
    "a field of another type": [encode(["describe", "x", []])],
    "a number beyond 64 bits": [b"\x93\xa8describe\xcf" + b"\xff" * 9],
    "text that is no UTF-8": [b"\x97\xa5greet\x01\x01\x00\xc4\x00\xa1\xff\x80"],
    "half": [encode(pm.DescribeShards(1, [1, 2, 3]))[:-2]],
    "two parts": [encode(pm.DescribeShards(1, [1])), b""],
    "ten parts": [b"x"] * 10,
    "too deep": [b"\x94\xa8describe\x01\x90" + b"\x91" * 100_000],
    "too deep at once": [b"\x91" * 100_000],
    "an array that claims to be long": [b"\x93\xa8describe\x01\xdd\xff\xff\xff\xff"],
}


NUMBERS = {
    "another type": 1,
    "a reply": 1,
    "a number beyond 64 bits": 2**64 - 1,
    "text that is no UTF-8": 1,
    "half": 1,
    "too deep": 1,
    "an array that claims to be long": 1,
}
"""Of those whose number can be read."""


@each_case("what", GARBAGE)
async def test_an_invalid_message_is_skipped_and_the_next_one_is_answered(
    start: Start, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = start()
    with Raw(other.address) as raw:
        raw.socket.send_multipart([NODE.encode(), *GARBAGE[what]])
        raw.socket.send_multipart([NODE.encode(), encode(pm.Withdraw(7, b"", b""))])
        answers = []
        while not answers or answers[-1].id != 7:
            answers.append(decode(await asyncio.to_thread(raw.socket.recv)))
    number = NUMBERS.get(what)
    assert [(answer.id, answer.name) for answer in answers[:-1]] == [(number, "ProtocolMismatch")] * (
        number is not None
    )
    assert other.dropped == (number is None)
    assert caplog.text.count("no message") == len(caplog.records) == 1
    assert "peer " in caplog.text
    assert "Traceback" not in caplog.text
    await asks(start(), other)


@each_case("length", [MAX_FRAME + 1, 4 * MAX_FRAME])
async def test_a_message_that_is_too_large_is_not_handled(start: Start, length: int) -> None:
    heard: list[Any] = []

    async def answer(message: Any) -> Message:
        heard.append(message)
        return Done(message.id)

    other = start(answer)
    with Raw(other.address) as raw:
        raw.socket.send_multipart([NODE.encode(), encode(pm.Withdraw(1, b"", bytes(length)))])
        await asks(start(), other)
    assert [len(message.ticket) for message in heard] == [6]


async def test_invalid_answers_are_ignored(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    context = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.rcvtimeo = 5000
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = KEY.public, KEY.secret
        port = router.bind_to_random_port("tcp://127.0.0.1")
        one = start()
        address = f"tcp://127.0.0.1:{port}"
        asking = asyncio.create_task(one.request(Member(1, address, node=NODE), withdraw(one), Done, 5))
        who, _, request = await asyncio.to_thread(router.recv_multipart)
        identifier = msgspec.msgpack.decode(request)[1]
        for what, parts in GARBAGE.items():
            if what != "a reply":
                router.send_multipart([who, *parts])
        router.send_multipart([who, encode(Done(identifier + 1000))])  # to a question that nobody asked
        router.send_multipart([who, encode(Done(identifier))])
        router.send_multipart([who, encode(Done(identifier))])
        assert await asking == Done(identifier)
        assert "no message" in caplog.text
    finally:
        router.close()
        context.term()


async def test_requests_pending_at_close_raise_peer_unavailable(start: Start) -> None:
    asked = asyncio.Event()

    async def answer(request: Any) -> Message:
        asked.set()
        await asyncio.Event().wait()
        return Done(request.id)

    one, other = start(), start(answer)
    waiting = [asyncio.create_task(asks(one, other, 0.5)), asyncio.create_task(asks(other, other, 0.5))]
    await asked.wait()
    async with asyncio.timeout(60):
        await other.aclose()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [PeerUnavailable] * 2
