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
from dataplane.node.partitions import unconfirmed_grants
from dataplane.stream import requests as r
from dataplane.stream.sampler import CompleteGroups
from dataplane.wire import row_messages as rm
from tests.cases import each_case
from tests.unit.node.clustered.streambench import Client, StreamBench, clients, streaming
from tests.unit.node.partitions.bench import WAIT_S, until

Request = Callable[[Client], Awaitable[Any]]


async def rows(client: Client) -> Any:
    return await client.take(4)


async def groups(client: Client) -> Any:
    return await client.take(6, min_rows=4, sampler=CompleteGroups(4))


async def chosen(client: Client) -> Any:
    shown = await client.look()
    chosen = np.frombuffer(shown.rows, np.int64)[:8].tobytes()
    return await client.take(8, min_rows=8, sampler=None, chosen=chosen)


async def admission(client: Client) -> Any:
    return await client.ask(rm.AdmitRows(1, client.stream.token, 3, 24, 0, "", b"", 0.0))


REQUESTS: list[Request] = [rows, groups, chosen, admission]


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


def held(leader: StreamBench) -> int:
    """The leases and tickets that there are."""
    leased = leader.machine().leased
    return len(leased.leases) + len(list(leased.admission.clients()))


async def let_go(client: Client, given: Any) -> None:
    """Give back what a request was given."""
    if isinstance(given, r.Delivered):
        await client.settle(given, done=False, seen=False)
    else:
        client.streams.answer(rm.ReturnPermit(client.stream.token, given.ticket), Deadline.after(0.0))


async def test_a_cancelled_append_gives_its_permit_back() -> None:
    async with streaming(2, max_rows=100) as (leader, (node,)):
        client, other = clients([node, leader])
        admitted = await client.ask(rm.AdmitRows(1, client.stream.token, 4, 32, 0, "", b"", 0.0))
        columns = {"ticket": admitted.ticket, "staged": "", "ref": other.put(4).encode()}  # of another node
        versions = np.zeros(4, np.int64).tobytes()
        request = rm.AppendRows(1, client.stream.token, [], b"", [], versions, {}, None, {}, **columns)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(CancelledAt(client.ask(request), 0, ready=False))
        await until(lambda: not held(leader))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else notices what was lost, within a test."""
    monkeypatch.setattr(unconfirmed_grants, "CONFIRM_S", 10 * WAIT_S)


@each_case("ready", [False, True], ids=["as it waits", "as it is answered"])
@each_case("request_", REQUESTS)
async def test_a_request_that_is_cancelled_in_any_of_its_awaits_holds_nothing(request_: Request, ready: bool) -> None:
    async with streaming(2, max_rows=100) as (leader, (node,)):
        (client,) = clients([node])
        await client.append(range(8), groups=["g"] * 4 + ["h"] * 4)
        number = 0
        while True:
            work = CancelledAt(request_(client), number, ready=ready)
            task = asyncio.ensure_future(work)
            given = None
            with suppress(asyncio.CancelledError, NotReady):
                given = await task
            if given is not None:
                await let_go(client, given)
            await until(lambda: not held(leader))
            if given is not None and not work.reached:  # without it, what was cancelled before had only just come
                break
            number += work.reached
        assert number
