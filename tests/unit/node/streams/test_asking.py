"""Questions about streams between two nodes on real sockets: done once, given back where nobody waits, told in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.cluster.membership import Member
from dataplane.errors import Closed, PeerUnavailable
from dataplane.node.spread.far import Far
from dataplane.node.streams import asking, telling
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.telling import Telling
from dataplane.stream.progress import ACKED
from dataplane.stream.rows import Rows
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers

ME, THEM = b"me......", b"them...."
CONSUME = m.Consume(1, b"stream", "a", 1, 1, ["x"], None, b"", b"", "", None, 0, 5.0, 30.0)


class Client:
    """A client as the other node serves it: it answers when it may, and writes down what it does."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = asyncio.Event()

    def answer(self, request: Any, deadline: Any) -> Any:
        if isinstance(request, m.GiveBack):
            return None
        if isinstance(request, m.Renew):
            raise Closed("gone", drained=True)
        if isinstance(request, m.Measure):
            self.done.append("measured")
            return m.Figures(request.id, {"n": len(self.done)})
        return self._wait

    async def _wait(self) -> Message:
        await self.go.wait()
        self.done.append("granted")
        return m.Delivered(1, b"stream", 7, None, b"", [], [], [], {}, {})

    def untold(self, request: Any, reply: Any) -> None:
        self.done.append("given back")

    def leave(self) -> None:
        self.done.append("left")


class Two:
    """This node's questions, and the other, which answers them."""

    def __init__(self) -> None:
        self.client = Client()
        self.known = {ME}
        self.far = Far(lambda who: cast(Any, self.client), lambda node: node in self.known)
        self.heard: list[Any] = []
        self.hold: Callable[[Any], Awaitable[Message]] | None = None
        self.peers = Peers("tcp://127.0.0.1:0", None, lambda request: Done(request.id))
        self.others = Peers("tcp://127.0.0.1:0", None, self._answer)
        for each in (self.peers, self.others):
            each.start()
        self.members = {ME: Member(ME, ""), THEM: Member(THEM, self.others.address)}
        self.asking = Asking(ME, self.peers, cast(Any, SimpleNamespace(members=self.members, look=lambda: None)))

    def _answer(self, request: Any) -> Message | Awaitable[Message]:
        self.heard.append(request)
        if self.hold is not None:
            return self.hold(request)
        match request:
            case pm.Ask():
                return self.far.asked(request)
            case pm.NotAsked():
                self.far.not_asked(request.node, request.number)
        return Done(request.id)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.heard if isinstance(each, kind)]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    made = Two()
    yield made
    await made.far.aclose()
    await made.peers.aclose()
    await made.others.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_question_that_is_asked_again_is_done_once(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_AGAIN_S", 0.05)
    asked = asyncio.create_task(two.asking.ask(THEM, 1, CONSUME, m.Delivered, 30.0))
    await until(lambda: len(two.of(pm.Ask)) >= 3)
    assert len({each.number for each in two.of(pm.Ask)}) == 1
    two.client.go.set()
    assert (await asked).grant == 7
    assert two.client.done == ["granted"]


async def test_what_was_made_before_this_node_began_anew_is_not_sent_after(two: Two) -> None:
    before = pm.Still(two.asking.next_id(), members=b"")
    assert isinstance(await two.asking.tell(THEM, before, Done), Done)
    two.asking.begin_anew()
    with pytest.raises(PeerUnavailable, match="begun anew"):
        await two.asking.tell(THEM, before, Done)
    await two.asking.tell(THEM, pm.Still(two.asking.next_id(), members=b""), Done)
    assert len(two.of(pm.Still)) == 2


@pytest.mark.parametrize("busy", [False, True])
async def test_a_question_ends_when_this_node_begins_anew(two: Two, busy: bool) -> None:
    """Also one that was about to be asked again: who was asked has forgotten that it was, and would do it twice."""

    async def hold(request: Any) -> Message:
        two.members[ME] = Member(ME, "", since=3)
        return pm.Waits(request.id, busy=busy)

    two.hold = hold
    with pytest.raises(PeerUnavailable, match="begun anew"):
        await two.asking.ask(THEM, 1, CONSUME, m.Delivered, 30.0)
    assert len(two.of(pm.Ask)) == 1


async def test_an_answer_that_was_lost_is_told_again(two: Two) -> None:
    asked = pm.Ask(1, ME, client=1, number=5, answered=[], request=msgspec.msgpack.encode(m.Measure(3, b"stream")))
    first, again = two.far.asked(asked), two.far.asked(msgspec.structs.replace(asked, id=2))
    assert isinstance(first, pm.Answer)
    assert isinstance(again, pm.Answer)
    assert (first.reply, again.id, two.client.done) == (again.reply, 2, ["measured"])
    two.far.asked(msgspec.structs.replace(asked, number=6, answered=[5]))
    assert list(two.far._said[ME]) == [6], "what has arrived is forgotten"


async def test_who_does_not_wait_any_more_keeps_nothing(two: Two) -> None:
    """Not while it is waited for, nor when it was granted and its answer has gone."""
    asked = asyncio.create_task(two.asking.ask(THEM, 1, CONSUME, m.Delivered, 30.0))
    await until(lambda: two.of(pm.Ask))
    asked.cancel()
    await until(lambda: two.of(pm.NotAsked))
    await until(lambda: not two.far._said[ME])
    two.client.go.set()
    late = two.far.asked(pm.Ask(1, ME, client=1, number=9, answered=[], request=msgspec.msgpack.encode(CONSUME)))
    assert not isinstance(late, pm.Answer)
    await late
    two.far.not_asked(ME, 9)
    assert two.client.done == ["granted", "given back"]


async def test_what_a_node_was_granted_goes_with_it(two: Two) -> None:
    two.client.go.set()
    await two.asking.ask(THEM, 1, CONSUME, m.Delivered)
    two.far.gone(ME)
    assert two.client.done == ["granted", "given back", "left"]
    assert not two.far._said
    two.far.gone(ME)


async def test_errors_and_what_has_no_answer(two: Two) -> None:
    with pytest.raises(Closed) as caught:
        await two.asking.ask(THEM, 1, m.Renew(1, b"stream", 1, None), m.Done)
    assert caught.value.drained
    await two.asking.ask(THEM, 1, m.GiveBack(b"stream", 1), m.Done)
    with pytest.raises(PeerUnavailable):
        await two.asking.ask(b"nobody..", 1, CONSUME, m.Delivered)


async def test_a_question_ends_with_the_membership_of_who_is_asked(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_AGAIN_S", 0.05)
    asked = asyncio.create_task(two.asking.ask(THEM, 1, CONSUME, m.Delivered, 30.0))
    await until(lambda: two.of(pm.Ask))
    del two.members[THEM]
    with pytest.raises(PeerUnavailable):
        await asked


# telling


def rows_of_theirs() -> Rows:
    rows = Rows()
    rows.append(BatchRef.of(THEM, 4, [("x", Field("dense", "int64", ()), 32, 1, 0)]))
    rows.extend(np.array([1]), BatchRef.of(ME, 1, [("y", Field("dense", "int64", ()), 8, 1, 0)]), replace=False)
    return rows


async def test_what_became_of_rows_is_told_in_order_and_together(two: Two) -> None:
    told, rows = Telling(ME, two.asking), rows_of_theirs()
    for number in range(4):
        told.note(b"token", rows, number % 2, np.array([number]), ACKED)
    await told.told()
    said = [entry for each in two.of(pm.Settled) for entry in each.settled]
    assert [(task, int.from_bytes(of, "little")) for _, task, of, _, _ in said] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert [[node for node, _ in others] for *_, others in said] == [[], [ME], [], []]
    assert len(two.of(pm.Settled)) == 1
    await told.aclose()


async def test_what_is_large_is_told_in_several_messages(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_BYTES", 16)
    told, rows = Telling(ME, two.asking), rows_of_theirs()
    for _ in range(3):
        told.note(b"token", rows, 0, np.arange(4), ACKED)
    await told.told()
    assert [len(each.settled) for each in two.of(pm.Settled)] == [1, 1, 1]
    await told.aclose()


async def test_who_waits_until_it_was_told_waits_no_longer_than_there_is_somebody(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "_AGAIN_S", 0.05)
    never = asyncio.Event()

    async def hold(request: Any) -> Message:
        await never.wait()
        return Done(request.id)

    two.hold = hold
    told = Telling(ME, two.asking)
    told.note(b"token", rows_of_theirs(), 0, np.arange(4), ACKED)
    waiting = asyncio.create_task(told.told())
    await until(lambda: len(two.of(pm.Settled)) >= 2)
    assert not waiting.done(), "it is told again and again"
    del two.members[THEM]
    await waiting
    assert not told._queues
    never.set()
    await told.told()
    await told.aclose()
