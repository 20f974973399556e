"""A stream's figures over several nodes: of those that answer, and of partitions that are gone."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.errors import OutcomeUnknown, PeerUnavailable
from dataplane.node.clustered import measuring
from dataplane.node.clustered.measuring import measured
from tests.unit.node.clustered.readers import TASK, S, readers
from tests.unit.node.partitions.bench import WAIT_S, until


async def test_who_is_silent_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MEASURE_S", 0.5)
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put(range(number + 1))
        session = nodes[0].service.session()
        figures = await measured(session, nodes[0].stream)
        assert (figures["appended"], figures["rows"], figures["silent"]) == (6, 6, [])
        nodes[2].deaf = True
        figures = await measured(session, nodes[0].stream)
        assert nodes[2].own.key in figures["silent"]
        others = {0: 1, 1: 2}
        answered = [others[n] for n in others if nodes[n].own.key not in figures["silent"]]
        assert figures["rows"] == sum(answered) > 0


async def test_where_none_answers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MEASURE_S", 0.3)
    async with readers(2) as nodes:
        asking = nodes[0].service.session()
        await nodes[0].leave(WAIT_S)  # its partition is led by the other
        nodes[0].deaf = True
        with pytest.raises((PeerUnavailable, OutcomeUnknown)):
            await measured(asking, nodes[0].stream)


async def test_what_partitions_counted_that_were_drained_stays_counted() -> None:
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put(range(number + 1))
        first, last = nodes[0], nodes[2]
        drained = last.own.key
        client = first.reader()
        taken = 0
        while taken < 6:
            delivery = await client.take(6)
            taken += len(delivery.groups)
            await client.settle(delivery)
        await until(lambda: last.led(drained))
        await last.leave(WAIT_S)
        await last.aclose()

        async def gone() -> bool:
            try:
                return not (await first.directory.take_care(await first.directory.open(S, None))).named(drained)
            except (PeerUnavailable, OutcomeUnknown):  # of who takes over what the last had led
                return False

        async with asyncio.timeout(WAIT_S):
            while not await gone():
                await asyncio.sleep(0.01)
        figures = await measured(first.service.session(), first.stream)
        assert len(first.stream.partitions) < 3
        assert (figures["appended"], figures["rows"]) == (6, 0)
        assert figures["task"][TASK]["acked"] == 6
