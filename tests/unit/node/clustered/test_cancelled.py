"""Requests that are cancelled at any moment leave nothing behind: what their answers gave is given back, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from dataplane.clock import Deadline
from dataplane.errors import NotReady
from dataplane.node.partitions import deliveries
from dataplane.stream.sampler import CompleteGroups
from dataplane.wire import messages as m
from dataplane.wire.partition_messages import Frame
from tests.cases import each_case
from tests.unit.node.clustered.readers import Client, ReaderBench, look, readers
from tests.unit.node.clustered.test_stream_promises import a_group_of
from tests.unit.node.partitions.bench import WAIT_S, until

Request = Callable[[Client, list[ReaderBench]], Awaitable[Any]]


async def of_one(client: Client, nodes: list[ReaderBench]) -> Any:
    return await client.take(4)


async def of_several(client: Client, nodes: list[ReaderBench]) -> Any:
    return await client.take(8, min_rows=8)


async def of_groups(client: Client, nodes: list[ReaderBench]) -> Any:
    return await client.take(6, min_rows=5, sampler=CompleteGroups(4))


async def of_chosen(client: Client, nodes: list[ReaderBench]) -> Any:
    shown: m.Shown = await client.ask(look())
    chosen = np.frombuffer(shown.rows, np.int64)[:8].tobytes()
    return await client.take(8, min_rows=8, sampler=None, chosen=chosen)


async def admission(client: Client, nodes: list[ReaderBench]) -> Any:
    groups = [await a_group_of(node, nodes[0]) for node in nodes]
    admit = m.Admit(1, b"", 3, 24, 0, "", b"", 0.0, groups, [], False, [])
    admitted: m.Admitted = await client.ask(admit)
    return admitted


REQUESTS: list[Request] = [of_one, of_several, of_groups, of_chosen, admission]


class CancelledAt(Awaitable[Any]):
    """Work whose task is cancelled in its await of this number: as it begins to wait or, `ready`, between the end of
    what it waits for and its noticing that."""

    def __init__(self, work: Awaitable[Any], number: int, *, ready: bool) -> None:
        self._work = work
        self._number = number
        self._ready = ready
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        sent: Any = None
        for number in range(1 << 20):
            try:
                waited = steps.send(sent) if sent is None or not isinstance(sent, BaseException) else steps.throw(sent)
            except StopIteration as end:
                return end.value
            if number == self._number:
                self.reached = True
                task = asyncio.current_task()
                assert task is not None
                if self._ready and waited is not None:
                    blocking = waited._asyncio_future_blocking
                    waited.add_done_callback(lambda _, task=task: task.cancel())
                    waited._asyncio_future_blocking = blocking
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                sent = yield waited
            except BaseException as error:
                sent = error
        raise AssertionError("it never ends")


def held(nodes: list[ReaderBench]) -> int:
    """The leases and tickets that there are."""
    homes = [node.machine(node.own.key).home for node in nodes]
    return sum(len(home.leases) + len(list(home.admission.clients())) for home in homes)


async def let_go(client: Client, given: Any) -> None:
    """Give back what a request was given."""
    if isinstance(given, m.Delivered):
        await client.settle(given, done=False, seen=False)
    else:
        client._client.streams.answer(m.GiveBack(client.node.stream.token, given.ticket), Deadline.after(0.0))


async def filled(nodes: list[ReaderBench], request: Request) -> Client:
    if request is not admission:
        for node in nodes[1:]:
            await node.put(range(4), groups=[1] * 4)
    return nodes[0].reader()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else notices what was lost, within a test."""
    monkeypatch.setattr(deliveries, "CONFIRM_S", 10 * WAIT_S)


@each_case("ready", [False, True], ids=["as it waits", "as it is answered"])
@each_case("request_", REQUESTS)
async def test_a_request_that_is_cancelled_in_any_of_its_awaits_holds_nothing(request_: Request, ready: bool) -> None:
    async with readers(3, max_rows=100 if request_ is admission else 0) as nodes:
        client = await filled(nodes, request_)
        number = 0
        while True:
            work = CancelledAt(request_(client, nodes), number, ready=ready)
            task = asyncio.ensure_future(work)
            given = None
            with suppress(asyncio.CancelledError, NotReady):
                given = await task
            if given is not None:
                await let_go(client, given)
            await until(lambda: not held(nodes))
            if not work.reached:
                assert given is not None
                break
            number += 1
        assert number


@each_case("request_", REQUESTS)
async def test_an_answer_that_comes_as_its_asker_is_cancelled_gives_nothing(request_: Request) -> None:
    """By so many turns of the loop after the cancellation, for each answer."""
    async with readers(3, max_rows=100 if request_ is admission else 0) as nodes:
        client = await filled(nodes, request_)
        receive, loop = nodes[0].receive, asyncio.get_running_loop()
        for turns in range(4):
            for number in range(1 << 10):
                task = asyncio.ensure_future(request_(client, nodes))
                frames = 0

                def later(frame: Frame, left: int) -> None:
                    if left:
                        loop.call_soon(later, frame, left - 1)
                    else:
                        receive(frame)

                def heard(frame: Frame, at: int = number, turns: int = turns, task: asyncio.Future[Any] = task) -> None:
                    nonlocal frames
                    if frames == at:
                        task.cancel()
                    frames += 1
                    later(frame, turns)

                nodes[0].receive = heard  # type: ignore[method-assign]
                given = None
                with suppress(asyncio.CancelledError, NotReady):
                    given = await task
                nodes[0].receive = receive  # type: ignore[method-assign]
                if given is not None:
                    await let_go(client, given)
                await until(lambda: not held(nodes))
                if given is not None:
                    break
