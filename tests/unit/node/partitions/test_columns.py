"""What leaders do about columns on other nodes."""

from __future__ import annotations

from tests.simulation.machine import TASKS
from tests.unit.node.partitions.bench import benches, until
from tests.unit.node.partitions.machine import HOLDER, Machine

P = "rollouts/s1/0-n0"


async def test_nodes_are_told_of_rows_that_are_over_and_once() -> None:
    async with benches(2) as (a, b):
        await a.replicas.create(key := P, "n0", 1)
        await until(lambda: a.led(key))
        labels = [f"{HOLDER}n1 {number}" for number in range(20)]
        await a.append(key, *labels, f"{HOLDER}n0 own")
        for task in TASKS:
            leased = await a.lease(key, task, 21)
            await a.ack(key, task, leased)
        await until(lambda: sum(len(entries) for _, entries in b.settled) >= 20)
        assert [entry.decode() for _, entries in b.settled for entry in entries] == labels
        assert {partition for partition, _ in b.settled} == {key}
        await until(lambda: a.settled == [(key, (f"{HOLDER}n0 own".encode(),))])
        machine = a.at(key).machine  # type: ignore[union-attr]
        assert isinstance(machine, Machine)
        await until(lambda: not machine.waiting())


async def test_rows_whose_columns_died_with_a_node_are_lost_by_a_command() -> None:
    async with benches(3) as (a, b, c):
        await a.replicas.create(key := P, "n0", 1)
        await a.append(key, f"{HOLDER}n2 one", f"{HOLDER}n1 two")
        await until(lambda: a.led(key))
        await c.aclose()
        for node in (a, b):
            hosted = node.replicas.find(key)
            if hosted is not None:
                machine = hosted.machine
                assert isinstance(machine, Machine)
                await until(lambda: machine.lost == [f"{HOLDER}n2 one"])  # noqa: B023
        await until(lambda: a.led(key))
