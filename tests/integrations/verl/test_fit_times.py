"""Which time of a call of TransferQueue the benchmark takes for storage's (`fit.timed`)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verl.fit import timed as measured
from tests.integrations.verl.fit.timed import timed


class Clock:
    """The time, which passes where somebody is busy or a loop waits for a moment."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now

    def spend(self, seconds: float) -> tuple[float, float]:
        """Be busy; when."""
        self.now += seconds
        return self.now - seconds, self.now

    def run(self, coroutine: Any) -> Any:
        """What `asyncio.run` does, in this time."""
        loop: Any = asyncio.new_event_loop()
        loop.time = self.monotonic
        select = loop._selector.select

        def wait(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return select(timeout and 0.0)

        loop._selector.select = wait
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(coroutine)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measured, "time", made)
    return made


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The calls that this process has written."""
    monkeypatch.setenv("FIT_TIMES", str(tmp_path))

    def read() -> list[dict[str, Any]]:
        written = (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, written) if "name" in line]

    return read


def during(spans: list[list[float]], start: float, end: float) -> float:
    """Seconds of the spans between two times; spans of one call may overlap each other."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans)


def test_what_the_loop_computes_while_a_call_is_awaited_is_not_the_calls(clock: Clock, lines: Any) -> None:
    own: list[tuple[float, float]] = []

    async def kv_put(key: str, partition_id: str) -> str:
        own.append(clock.spend(2))
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        own.append(await asyncio.create_task(task()))
        return key

    async def task() -> tuple[float, float]:
        return clock.spend(3)

    async def run() -> tuple[float, float]:
        putting = asyncio.create_task(timed(kv_put)("key", partition_id="train"))
        await asyncio.sleep(0)  # it waits for a thread now
        others = clock.spend(10)
        assert await putting == "key"
        return others

    others = clock.run(run())
    (line,) = lines()
    assert (line["name"], line["partition"]) == ("kv_put", "train")
    assert during(line["spans"], *others) == 0
    assert [during(line["spans"], *each) for each in own] == [2, 3]


def test_a_loop_that_has_nothing_else_to_do_waits_for_the_call(clock: Clock, lines: Any) -> None:
    async def async_kv_get() -> None:
        await asyncio.sleep(4)

    async def run() -> None:
        await asyncio.sleep(1)
        await asyncio.gather(timed(async_kv_get)(), timed(async_kv_get)())
        await asyncio.sleep(1)

    clock.run(run())
    spans = [span for line in lines() for span in line["spans"]]
    assert during(spans, 0, float("inf")) == 4  # of two calls, once
    assert {line["name"] for line in lines()} == {"kv_get"}
