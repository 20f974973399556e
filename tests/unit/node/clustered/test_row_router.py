"""Requests about rows that are there: extends, drops and losses, wherever the rows' partitions are led."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataplane.errors import LeaseExpired, Misuse, ProtocolMismatch
from dataplane.wire import messages as m
from tests.unit.node.clustered.test_producer_router import GROUPS, opened
from tests.unit.node.clustered.writers import writers
from tests.unit.node.partitions.bench import until


async def test_rows_are_extended_by_what_was_delivered_and_by_key(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        reply = await clients[0].append(24, groups=GROUPS)
        keys = [f"key-{i}" for i in range(6)]
        await clients[1].append(6, keys=keys)
        await clients[2].extend(reply.keys, "y")
        await clients[0].extend(keys, "y")
        left = 30
        while left:
            taken = await clients[1].take(30, columns=("x", "y"))
            await clients[1].extend(taken, "z")
            left -= len(taken.given.rows)
            await taken.ack()
        for node in nodes:
            await until(lambda: node.kept == 0)  # noqa: B023
        with pytest.raises(Misuse):
            await clients[0].extend(reply.keys[:1], "late")
        with pytest.raises(Misuse, match="no row 'key-0'"):
            await clients[0].extend(keys[:1], "late")
        assert [node.kept for node in nodes] == [0, 0, 0]


async def test_what_went_to_others_meanwhile_is_not_extended(tmp_path: Path) -> None:
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(4)
        first = await clients[1].take(4)
        await first.ack(done=False)
        second = await clients[0].take(4)
        with pytest.raises(LeaseExpired):
            await clients[1].extend(first, "y")
        await second.ack()
        with pytest.raises(LeaseExpired):
            await first.ack()


async def test_origins_that_do_not_name_each_row_once_are_refused(tmp_path: Path) -> None:
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(4)
        taken = await clients[0].take(4)
        rows = taken.given.rows.tobytes()
        twice = [(taken.token, np.array([0, 1, 2, 3]).tobytes()), (taken.token, np.array([3]).tobytes())]
        backwards = [(taken.token, np.array([3, 2, 1, 0]).tobytes())]
        for origins in ([], twice, backwards):
            with pytest.raises(ProtocolMismatch):
                await clients[0].ask(m.DropRows(1, clients[0].stream.token, rows, [], [], origins))
        with pytest.raises(Misuse, match="another stream"):
            elsewhere = [(b"nobody's", np.arange(4).tobytes())]
            await clients[0].ask(m.DropRows(1, clients[0].stream.token, rows, [], [], elsewhere))


async def test_rows_whose_columns_died_are_told_once_to_whoever_asks(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[2].append(24, groups=GROUPS, version=4)
        for client in clients:
            assert client.stream.own is not None
            key = client.stream.own.key
            await until(lambda: any(node.led(key) for node in nodes))  # noqa: B023
        await nodes[2].aclose()
        told: list[tuple[str, str | int | None, int, int]] = []
        while len(told) < 24:
            for client in clients[:2]:
                told += (await client.ask(m.TakeLost(1, client.stream.token))).rows
        assert sorted(str(group) for _, group, *_ in told) == sorted(GROUPS)
        assert {version for *_, version, _ in told} == {4}
        assert (await clients[0].ask(m.TakeLost(1, clients[0].stream.token))).rows == []


async def test_figures_are_of_all_partitions_or_of_those_led_here(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(24, groups=GROUPS)
        assert (await clients[1].figures())["rows"] == 24
        led = [(await client.ask(m.Streams(1, None))).values for client in clients]
        assert sum(figures[clients[0].stream.name]["rows"] for figures in led) == 24
        assert (await clients[0].ask(m.Streams(1, clients[0].stream.name))).values == {}
