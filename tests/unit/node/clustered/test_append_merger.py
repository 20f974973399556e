"""Appends of one node's clients that are made as one request."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.errors import Misuse
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.settings import Settings
from tests.simulation.stream.machine import columns, versions
from tests.unit.node.clustered.streambench import TASK, ids, streaming
from tests.unit.node.partitions.bench import until


async def test_appends_of_many_clients_are_a_few_commands_and_each_is_done_once() -> None:
    async with streaming(2) as (leader, (far, *_)):
        before = leader.hosted().replica.committed
        made = [await far.opened() for _ in range(24)]
        appended = await asyncio.gather(*(client.append([number, number + 100]) for number, client in enumerate(made)))
        assert leader.hosted().replica.committed - before <= 6
        assert sorted(each.first for each in appended) == list(range(0, 48, 2))
        reader = made[0]
        delivery = await reader.take(48, min_rows=48)
        row_of = {row: number for number, each in enumerate(appended) for row in (each.first, each.first + 1)}
        assert [identifier % 100 for identifier in ids(delivery)] == [row_of[row] for row in delivery.rows.tolist()]
        assert far.kept == 24
        await reader.settle(delivery)
        await until(lambda: far.kept == 0)


async def test_who_cannot_go_with_others_is_told_by_itself() -> None:
    """One has rows of another's shard, one a key, one another column."""
    async with streaming(2) as (_, (far, *_)):
        first, second, third, fourth = [await far.opened() for _ in range(4)]
        await first.append([0])
        both = first.put(2)
        results = await asyncio.gather(
            first.append([1], ref=both[:1]),
            second.append([2], ref=both[1:]),
            third.append([3], keys=["a"]),
            fourth.append([4], ref=fourth.put(1, "y")),
            second.append([5]),
        )
        assert sorted(each.first for each in results) == [1, 2, 3, 4, 5]
        delivery = await first.take(5, min_rows=5)
        assert sorted(ids(delivery)) == [0, 1, 2, 3, 5]
        await first.settle(delivery)
        await until(lambda: far.kept == 1)


def test_a_request_that_comes_again_is_answered_as_it_was_and_a_part_by_itself_too() -> None:
    machine = StreamMachine("rows", Settings((TASK,)), "m")
    parts = [("a/1/1", 1, 1), ("b/1/1", 7, 2)]
    ref = columns(b"n" * 8, 1, 3, "x")
    together = r.encode_request(r.Append(ref=ref, versions=versions(3), parts=parts))

    def asked(request: bytes) -> r.AnyResult:
        decision = machine.decide(request, 1, 0.0)
        for command in decision.commands:
            result = machine.apply(command)
        return r.decode_result(result if decision.commands else decision.result)

    for _ in range(2):
        assert asked(together) == r.Appended(0, 3, True)
    second = r.Append(client="b/1/1", sequence=7, ref=ref[1:], versions=versions(2))
    assert asked(r.encode_request(second)) == r.Appended(1, 2, True)
    assert machine.leased.partition.rows.count == 3
    with pytest.raises(Exception, match="by themselves"):
        asked(r.encode_request(r.Append(ref=ref, versions=versions(3), parts=[*parts[:1], ("c/1/1", 1, 2)])))
    wrong = machine.decide(r.encode_request(r.Append(ref=ref, versions=versions(3), parts=[("d/1/1", 1, 2)])), 1, 0.0)
    refused = r.decode_result(machine.apply(wrong.commands[0]))
    assert isinstance(refused, r.Refused)
    assert isinstance(refused.error, Misuse)
