"""A client's requests to partitions: numbered, within a window, and settled also when nobody waits any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, OutcomeUnknown
from dataplane.node.clustered import session
from dataplane.replication.sessions import WINDOW
from dataplane.stream import requests as r
from tests.unit.node.clustered.test_producer_router import opened, rows_of
from tests.unit.node.clustered.writers import writers
from tests.unit.node.partitions.bench import WAIT_S, until


def appending(ref: object) -> r.Append:
    return r.Append(ref=ref, versions=np.zeros(2, np.int64))  # type: ignore[arg-type]


async def test_more_requests_than_the_window_has_are_done_once_each(tmp_path: Path) -> None:
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        replies = await asyncio.gather(*(clients[0].append(2) for _ in range(3 * WINDOW)))
        assert sorted(reply.first for reply in replies) == [2 * at for at in range(3 * WINDOW)]
        assert rows_of(nodes[0], clients[0]) == 6 * WINDOW


async def test_what_nobody_waits_for_any_more_is_settled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ASK_S", 0.5)
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        own = clients[1].stream.own
        assert own is not None
        asks, outcomes = clients[0].streams._session, list[object]()
        nodes[0].deaf = True
        cut_off = asyncio.create_task(asks.ask(own, appending(clients[0].put(2)), r.Appended, settled=outcomes.append))
        with pytest.raises(OutcomeUnknown):
            await asks.ask(own, appending(clients[0].put(2)), r.Appended, settled=outcomes.append)
        cut_off.cancel()
        assert not outcomes or isinstance(outcomes[0], r.Appended)
        nodes[0].deaf = False
        await until(lambda: len(outcomes) == 2)
        assert {outcome.first for outcome in outcomes if isinstance(outcome, r.Appended)} == {0, 2}
        assert nodes[1].machine(own.key).home.books.rows.count == 4


async def test_a_client_is_forgotten_when_its_last_request_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ASK_S", 0.5)
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        own = clients[1].stream.own
        assert own is not None
        asks = clients[0].streams._session
        nodes[0].deaf = True
        with pytest.raises(OutcomeUnknown):
            await asks.ask(own, appending(clients[0].put(2)), r.Appended)
        clients[0].streams.leave()
        nodes[0].deaf = False
        machine = nodes[1].machine(own.key)
        await until(lambda: machine.home.books.rows.count == 2)
        await until(lambda: asks.client not in machine.sessions.producers)
        assert machine.home.books.rows.count == 2


async def test_what_was_given_to_who_waits_no_more_is_given_back(tmp_path: Path) -> None:
    async with writers(1, tmp_path) as nodes:
        (client,) = await opened(nodes, max_rows=10)
        own = client.stream.own
        assert own is not None
        asks = client.streams._session
        wanted = r.Admit(rows=8, nbytes=8, version=0)
        first = await asks.ask(own, wanted, r.Admitted)
        waiting = asyncio.create_task(
            asks.ask(own, wanted, r.Admitted, Deadline.after(WAIT_S), waits="append", late=lambda given: None)
        )
        hosted = nodes[0].replicas.find(own.key)
        await until(lambda: hosted is not None and len(hosted.waiters))
        waiting.cancel()
        await until(lambda: hosted is not None and not len(hosted.waiters))
        await asks.ask(own, r.GiveBack(ticket=first.ticket), r.Done)
        assert await asks.ask(own, wanted, r.Admitted)


async def test_what_a_client_that_has_gone_is_known_late_to_need_is_under_a_sequence_of_its_own(tmp_path: Path) -> None:
    """Or it would be answered as what had the same one before."""
    async with writers(1, tmp_path) as nodes:
        (client,) = await opened(nodes)
        own = client.stream.own
        assert own is not None
        asks, machine = client.streams._session, nodes[0].machine(own.key)
        await asks.ask(own, appending(client.put(2)), r.Appended)
        number = await asks._sequences(own).take()  # of a request that is not settled when the client goes
        client.streams.leave()
        await asks.ask(own, r.Drop(rows=np.arange(2)), r.Done)
        await until(lambda: machine.home.books.rows.count == 0)
        asks._sequences(own).over(number)
        await until(lambda: asks.client not in machine.sessions.producers)


async def test_an_answer_is_waited_for_while_the_disk_of_the_leader_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ASK_S", 0.2)
    async with writers(1, tmp_path) as nodes:
        (client,) = await opened(nodes)
        own = client.stream.own
        assert own is not None
        asks, request, refused = client.streams._session, nodes[0].replicas.request, list[object]()

        async def full(*args: object) -> bytes:
            if len(refused) < 9:
                refused.append(args)
                raise Backpressure("no room on the disk", spill_error="no space left")
            return await request(*args)  # type: ignore[arg-type]

        nodes[0].replicas.request = full  # type: ignore[method-assign]
        assert await asks.answer(own, r.Conclude(grant=1, keep=False)) == r.Done()
        assert len(refused) == 9
