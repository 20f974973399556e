"""Turns: so many at a time, in a fair order, none lost."""

from __future__ import annotations

import asyncio
import random

from dataplane.node.shards.gate import Gate
from tests.cases import each_case


async def turns(gate: Gate, who: str, order: list[str], go: asyncio.Event) -> None:
    async with gate.turn(who):
        order.append(who)
        await go.wait()


async def test_a_caller_with_many_requests_delays_another_by_one_turn() -> None:
    gate, order = Gate(1, 1), list[str]()
    go = asyncio.Event()
    go.set()
    async with gate.turn("first"):
        waiting = [asyncio.create_task(turns(gate, "much", order, go)) for _ in range(100)]
        await asyncio.sleep(0)
        waiting += [asyncio.create_task(turns(gate, who, order, go)) for who in ("a", "b", "a")]
        await asyncio.sleep(0)
        assert not order
    await asyncio.gather(*waiting)
    assert order[:6] == ["much", "a", "b", "much", "a", "much"]
    assert len(order) == 103
    assert len(gate) == 0


@each_case("seed", range(20))
async def test_random_cancellations_lose_and_duplicate_no_turn(seed: int) -> None:
    """No turn is lost, and none is given twice."""
    chance, gate = random.Random(seed), Gate(3, 2)
    most = 0

    async def go_in(who: int) -> None:
        nonlocal most
        async with gate.turn(who):
            most = max(most, len(gate))
            assert len(gate) <= 3
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(go_in(chance.randrange(4))))
        if chance.random() < 0.4:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {type(None), asyncio.CancelledError}
    assert most == 3
    assert len(gate) == 0
    assert not gate._waiting
    assert not gate._inside
