"""A client's requests to a partition: numbered, within a window, and settled also when nobody waits any more."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, OutcomeUnknown, PeerUnavailable
from dataplane.node.clustered import append_merger, session
from dataplane.replication.sessions import WINDOW
from dataplane.stream import requests as r
from tests.unit.node.clustered.streambench import Client, clients, stream_nodes, streaming
from tests.unit.node.partitions.bench import WAIT_S, until


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits half a second for its answer."""
    monkeypatch.setattr(session, "ASK_S", 0.5)
    monkeypatch.setattr(append_merger, "_ASK_S", 0.5)


def appending(client: Client) -> r.Append:
    return r.Append(ref=client.put(2), versions=np.zeros(2, np.int64))


async def test_requests_beyond_the_session_window_are_executed_once_each() -> None:
    async with streaming(2) as (leader, others):
        (client,) = clients(others)
        replies = await asyncio.gather(*(client.append([0, 1]) for _ in range(3 * WINDOW)))
        assert sorted(reply.first for reply in replies) == [2 * at for at in range(3 * WINDOW)]
        assert leader.machine().leased.partition.rows.count == 6 * WINDOW


@pytest.mark.usefixtures("hasty")
async def test_a_request_beyond_the_window_that_was_not_sent_changes_nothing() -> None:
    async with streaming(2) as (leader, (node,)):
        (client,) = clients([node])
        asks, at, outcomes = client.session, client.partition, list[object]()
        node.deaf = True
        with pytest.raises(OutcomeUnknown):
            await asks.ask(at, appending(client), r.AppendResult)
        for _ in range(WINDOW - 1):
            await asks._sequences(at).take(Deadline.after(WAIT_S))
        with pytest.raises(PeerUnavailable, match=f"{WINDOW} calls .* are ahead, and stream 'rollouts' has not"):
            await asks.ask(at, appending(client), r.AppendResult, settled=outcomes.append)
        assert len(outcomes) == 1
        node.deaf = False
        await until(lambda: leader.machine().leased.partition.rows.count == 2)


@pytest.mark.usefixtures("hasty")
async def test_abandoned_requests_are_settled_once_each() -> None:
    async with streaming(2) as (leader, (node,)):
        (client,) = clients([node])
        asks, at, outcomes = client.session, client.partition, list[object]()
        node.deaf = True
        cut_off = asyncio.create_task(asks.ask(at, appending(client), r.AppendResult, settled=outcomes.append))
        with pytest.raises(OutcomeUnknown):
            await asks.ask(at, appending(client), r.AppendResult, settled=outcomes.append)
        cut_off.cancel()
        node.deaf = False
        await until(lambda: len(outcomes) == 2)
        assert {outcome.first for outcome in outcomes if isinstance(outcome, r.AppendResult)} == {0, 2}
        assert leader.machine().leased.partition.rows.count == 4


@pytest.mark.usefixtures("hasty")
async def test_a_request_refused_by_a_full_disk_on_retry_is_not_settled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader may have it in its log, and commits it once there is room: till then its columns are kept."""
    async with streaming(2) as (leader, (node,)):
        (client,) = clients([node])
        outcomes, ask, refusals = list[object](), node.router.ask, [True, True]
        node.deaf = True
        with pytest.raises(OutcomeUnknown):
            await client.session.ask(client.partition, appending(client), r.AppendResult, settled=outcomes.append)

        async def full(*args: Any, **how: Any) -> bytes:
            if refusals:
                refusals.pop()
                raise Backpressure("no room", spill_error="the disk is full")
            return await ask(*args, **how)

        monkeypatch.setattr(node.router, "ask", full)
        node.deaf = False
        await until(lambda: outcomes)
        assert [type(outcome) for outcome in outcomes] == [r.AppendResult]
        assert leader.machine().leased.partition.rows.count == 2


@pytest.mark.usefixtures("hasty")
async def test_an_unanswered_read_raises_peer_unavailable() -> None:
    async with streaming(2) as (_, (node,)):
        (client,) = clients([node])
        node.deaf = True
        for request, kind in ((r.Find(keys=["a"]), r.FoundRows), (r.Measure(), r.PartitionFigures)):
            with pytest.raises(PeerUnavailable):
                await client.session.ask(client.partition, request, kind)


async def test_a_cancelled_admission_takes_no_permit() -> None:
    async with stream_nodes(1) as [node]:
        client = await node.opened(max_rows=10)
        asks, at = client.session, client.partition
        wanted = r.Admit(rows=8, nbytes=8, version=0)
        first = await asks.ask(at, wanted, r.AdmitResult)
        waiting = asyncio.create_task(
            asks.ask(at, wanted, r.AdmitResult, Deadline.after(WAIT_S), waits=lambda: "append", late=lambda given: None)
        )
        await until(lambda: len(node.hosted().waiters))
        waiting.cancel()
        await until(lambda: not len(node.hosted().waiters))
        await asks.ask(at, r.GiveBack(ticket=first.ticket), r.Succeeded)
        assert await asks.ask(at, wanted, r.AdmitResult)


async def test_a_late_settlement_of_a_departed_client_uses_a_separate_sequence() -> None:
    """Or it would be answered as what had the same one before."""
    async with stream_nodes(1) as [node]:
        client = await node.opened()
        asks, at, machine = client.session, client.partition, node.machine()
        await asks.ask(at, appending(client), r.AppendResult)
        number = await asks._sequences(at).take(
            Deadline.after(WAIT_S)
        )  # of a request that is not settled when the client goes
        client.streams.leave()
        await asks.ask(at, r.Drop(rows=np.arange(2)), r.Succeeded)
        await until(lambda: machine.leased.partition.rows.count == 0)
        asks._sequences(at).over(number)
        await until(lambda: asks.client not in machine.sessions.producers)
