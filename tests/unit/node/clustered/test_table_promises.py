"""Tables of nodes that were away, and of leaders that end between two steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dataplane.table import requests as r
from dataplane.table.machine import TableMachine
from tests.unit.node.clustered.tablebench import hosted_at, leader, table_nodes
from tests.unit.node.partitions.bench import until
from tests.unit.node.partitions.test_returning import absent, back


async def test_a_table_write_replaces_a_partition_retired_by_an_ended_leader(tmp_path: Path) -> None:
    """As when the leader ends after that, and before the record says so."""
    async with table_nodes(2, tmp_path, idle_s=60.0) as nodes:
        user = nodes[0].client()
        await user.write(["a"])
        found = await until(lambda: leader(nodes))
        hosted = hosted_at(found)
        assert hosted is not None
        machine = hosted.machine
        assert isinstance(machine, TableMachine)
        await user.ask(r.DropTable())
        await until(lambda: machine.idle)
        await found.replicas.request(hosted.partition, r.encode_request(r.Retire()), 5.0)
        async with asyncio.timeout(8.0):
            assert await user.write(["b"])


async def test_a_node_that_was_away_for_long_writes_again(tmp_path: Path) -> None:
    async with table_nodes(3, tmp_path, lost_s=0.5) as nodes:
        await nodes[0].client().write(["a"])
        leading = await until(lambda: leader(nodes))
        hosted = hosted_at(leading)
        assert hosted is not None
        machine = hosted.machine
        assert isinstance(machine, TableMachine)
        away = next(node for node in nodes if node is not leading)
        others = [node for node in nodes if node is not away]
        await away.client().write(["b"], "x")
        await absent(away, others)
        await until(lambda: machine.lost_nodes)
        await back(away, others)
        await until(lambda: leader(nodes, followers=None))
        assert await away.client().write(["c"], "x")
