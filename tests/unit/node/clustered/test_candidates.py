"""Candidates of all partitions for a client's own sampler, and grants of those that it chose."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dataplane.errors import NotReady
from dataplane.wire import messages as m
from tests.unit.node.clustered.readers import Client, ids, look, readers
from tests.unit.node.partitions.bench import WAIT_S


async def shown(client: Client, seen: int = -1, timeout_s: float = WAIT_S) -> m.Shown:
    found: m.Shown = await client.ask(look(seen=seen), timeout_s)
    return found


def rows(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(packed, np.int64)


async def test_rows_of_all_partitions_are_shown_and_delivered_in_the_order_of_the_choice() -> None:
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put([number, number + 10], versions=[number, 7], groups=[f"g{number}"] * 2)
        client = nodes[1].reader()
        found = await shown(client)
        assert sorted(found.tags["id"]) == [0, 1, 2, 10, 11, 12]  # type: ignore[type-var]
        assert len(set(rows(found.rows))) == 6
        assert len(set(rows(found.group))) == 3
        assert (found.latest, found.left, found.whole, found.closed) == (7, 6, True, False)
        wanted = [12, 0, 11]
        chosen = rows(found.rows)[[found.tags["id"].index(each) for each in wanted]].tobytes()
        expired = rows(found.rows)[[found.tags["id"].index(1)]].tobytes()
        delivery = await client.take(3, min_rows=3, sampler=None, chosen=chosen, expired=expired)
        assert ids(delivery) == wanted
        await client.settle(delivery)
        assert sorted((await shown(client)).tags["id"]) == [2, 10]  # type: ignore[type-var]


async def test_what_is_shown_is_shown_again_once_a_partition_has_changed() -> None:
    async with readers(2) as nodes:
        await nodes[0].put([1])
        client = nodes[0].reader()
        found = await shown(client)
        with pytest.raises(NotReady):
            await shown(client, found.changes, 0.2)
        waiting = asyncio.create_task(shown(client, found.changes))
        await asyncio.sleep(0)
        await nodes[1].put([2])
        assert sorted((await waiting).tags["id"]) == [1, 2]  # type: ignore[type-var]


async def test_a_choice_that_others_have_taken_is_no_delivery_and_holds_nothing() -> None:
    async with readers(2) as nodes:
        for number, node in enumerate(nodes):
            await node.put([number])
        client = nodes[0].reader()
        found = await shown(client)
        taken = await nodes[1].reader().take(1)
        with pytest.raises(NotReady):
            await client.take(2, min_rows=2, sampler=None, chosen=found.rows)
        left = await nodes[1].reader().take(1)
        assert sorted(ids(taken) + ids(left)) == [0, 1]
