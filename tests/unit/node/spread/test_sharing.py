"""Members of tasks whose replicas are on several hosts: what is remembered of them."""

from __future__ import annotations

import asyncio

from dataplane.node.spread.sharing import _Shared


async def test_the_turns_of_members_are_forgotten_with_the_last_who_waits() -> None:
    shared = _Shared()

    async def take(member: str, hold: asyncio.Event) -> None:
        turn = shared.turns.setdefault((0, member), asyncio.Lock())
        async with turn:
            await hold.wait()

    hold = asyncio.Event()
    tasks = [asyncio.create_task(take(f"member {number % 100}", hold)) for number in range(300)]
    await asyncio.sleep(0)
    assert len(shared.turns) == 100
    hold.set()
    await asyncio.gather(*tasks)
    assert len(shared.turns) == 0
