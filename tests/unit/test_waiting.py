"""Who waits for what, and who ends it."""

from __future__ import annotations

import asyncio

from dataplane import waiting
from dataplane.waiting import BITS, Waits


def test_a_wait_counts_under_the_place_of_its_request_and_for_who_ended_it() -> None:
    async def scene() -> list[list[object]]:
        waits, ready = Waits(), asyncio.get_running_loop().create_future()

        async def consume() -> None:
            wait = waiting.begin(waits, 5 << BITS | 3, "permits")
            serve = waiting.turn("rows", "rollouts").noting(ready.set_result)
            asyncio.get_running_loop().call_later(0.01, append, serve)
            await ready
            wait.end()

        def append(serve: object) -> None:
            waiting.asked.set((7, 9 << BITS | 2))
            serve(None)  # type: ignore[operator]

        await asyncio.create_task(consume())
        return waits.told()

    # it may also have waited for permits, where the machine was busy between its first two lines
    ((place, _, what, count, seconds, enders),) = (each for each in asyncio.run(scene()) if each[1] == "rows")
    assert (place, what, count) == (3, "rollouts", 1)
    assert seconds >= 0.005
    assert [each[:3] for each in enders] == [[7, 2, 1]]
