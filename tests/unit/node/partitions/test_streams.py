"""Streams as partitions of nodes: rows, consumers that wait, columns that are needed no more, and failovers."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.errors import Lost, OutcomeUnknown, PeerUnavailable
from dataplane.stream import requests as r
from tests.unit.node.partitions.bench import WAIT_S, benches, until
from tests.unit.node.partitions.streambench import S, StreamBench


async def test_groups_stay_where_they_began_when_a_node_joins_and_go_on_elsewhere_when_they_are_over() -> None:
    async with benches(2, make=StreamBench) as (a, b):
        await a.opened()
        table = await b.opened()
        groups = [f"g{at}" for at in range(40)]
        for number, version, positions in await a.directory.place(table, groups):
            for at in positions.tolist():
                await a.put(table.key(number), 1, groups=[groups[at]], table=version)
        late = StreamBench("n2", a.members._coordinator)
        try:
            await late.join()
            wider = await late.opened()
            assert wider.own(late.name) is not None
            placed = await late.directory.place(wider, [*groups, *(f"h{at}" for at in range(40))])
            began = {at: number for number, _, positions in placed for at in positions.tolist() if at < 40}
            assert began == dict(enumerate(table.place(groups).tolist())), "as long as a part is there"
            fresh = {at: number for number, _, positions in placed for at in positions.tolist() if at >= 40}
            assert wider.own(late.name) in fresh.values()
            number, version, positions = next(each for each in placed if each.number == wider.own(late.name))
            moved = f"h{int(positions[0]) - 40}"
            assert version == wider.version
            # who knows the old table alone is told so, and finds the group with the new one
            old = table.key(int(table.place([moved])[0]))
            assert await a.put(old, 1, groups=[moved], table=table.version) == r.Moved([moved])
            assert (await a.put(wider.key(number), 1, groups=[moved], table=version)).new
            # once nothing is left of what came by the old table, the new one alone counts
            while (given := await a.take(wider, 100, timeout_s=1.0)) is not None:
                await a.done(given[0], given[1].grant)
            seen = await until(lambda: (now := a.directory.find(S)) and now.version >= wider.version and now)
            settled = await a.directory.take_care(seen)  # a node has done so by itself, perhaps
            assert settled.older == ()
            assert await a.put(old, 1, groups=["g0"], table=table.version) == r.Moved(["g0"])
            placed = await b.directory.place(settled, groups)
            now = {at: number for number, _, positions in placed for at in positions.tolist()}
            assert now == dict(enumerate(settled.place(groups).tolist())) != began
        finally:
            await late.aclose()


async def test_a_partition_that_is_drained_is_deleted_once_nothing_is_left_to_tell() -> None:
    async with benches(3, make=StreamBench) as (a, b, c):
        await a.opened()
        table = await c.opened()
        own, number = c.own_key(table), table.own(c.name) or 0
        await c.put(own, 1, ref=b.ref(1))
        await until(lambda: c.led(own))
        await c.leave(WAIT_S)
        await c.aclose()
        table = await a.directory.take_care(await a.directory.open(S, None))
        assert table.find(number) is not None
        given = await a.take(table, 1)
        assert given is not None
        assert given[0] == own
        await a.done(own, given[1].grant)
        await until(lambda: b.settled)

        async def gone() -> bool:
            try:
                return (await a.directory.take_care(await a.directory.open(S, None))).find(number) is None
            except (PeerUnavailable, OutcomeUnknown):  # of who takes over what c had led, or who was slow
                return False

        while not await gone():
            await asyncio.sleep(0.01)
        # who led it may not have seen yet that it is deleted, and says that groups have moved
        await until(lambda: not any(each.replicas.find(own) for each in (a, b)))
        with pytest.raises(Lost):
            await a.put(own, 1)


async def test_what_clients_of_a_dead_node_held_goes_to_others_before_its_leases_are_over() -> None:
    async with benches(3, make=StreamBench) as (a, b, c):
        table = await a.opened()
        own = a.own_key(table)
        await a.put(own, 2)
        held = await c.take(table, 1)
        assert held is not None
        await c.put(own, 1, ref=a.ref(1))
        await until(lambda: a.led(own))
        assert set(a.machine(own).clients()) == {f"{a.name}/1", f"{c.name}/1"}
        await c.aclose()
        again = await b.take(table, 3, min_rows=3)
        assert again is not None
        assert again[1].rows.tolist() == [0, 1, 2]
        await until(lambda: set(a.machine(own).clients()) == {f"{a.name}/1", f"{b.name}/1"})


async def test_a_partition_that_is_lost_is_named_once_with_what_it_had() -> None:
    async with benches(4, make=StreamBench, lost_s=1.5) as nodes:
        for node in nodes:
            table = await node.opened()
        owner = nodes[3]
        own = owner.own_key(table)
        await until(lambda: owner.led(own))
        follower = owner.at(own).configuration.followers[0][0]  # type: ignore[union-attr]
        left = [node for node in nodes[:3] if node.name != follower]
        await left[0].put(own, 3)
        await left[1].put(own, 2)
        expected = 5, tuple(sorted(node.name for node in left))
        for node in left:
            node.replicas.recruiting.wanted = lambda partition: 0
        heard = [node.directory for node in left]
        await until(
            lambda: any((c.rows, c.producers) == expected for d in heard for c in d._caretaker._census._census.values())
        )
        care = next(d for d in heard if any(c.rows == 5 for c in d._caretaker._census._census.values()))
        both = [owner, *(node for node in nodes if node.name == follower)]
        for node in both:
            node.replicas.recruiting.wanted = lambda partition: 0
        await asyncio.gather(*(node.aclose() for node in both))
        await until(lambda: all(care._members.gone(node.name) for node in both))
        await care.take_care(await care.open(S, None))
        lost = {each.node: each for each in await left[0].directory.take_lost(S)}
        assert (lost[owner.name].rows, lost[owner.name].producers) == expected
        assert await left[1].directory.take_lost(S) == ()
