"""Copies through buffers that something else fills: here a thread, which takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from dataplane.client.loop_runner import LoopRunner
from dataplane.device import ordering
from dataplane.device.staging import Bytes, Staging
from tests.cases import each_case

SIZE = 64


class Slow:
    """A buffer that another thread fills, once it gets to it."""

    def __init__(self, device: ThreadPoolExecutor) -> None:
        self.memory = np.zeros(SIZE, np.uint8)
        self._device = device
        self._done: Future[None] | None = None
        self.fails = False

    def begin(self, source: Bytes) -> None:
        assert self._done is None, "who fills a buffer has waited for what it held"
        self.memory[:] = 0xEE
        self._done = self._device.submit(self._fill, source)

    def _fill(self, source: Bytes) -> None:
        if self.fails:
            raise RuntimeError("the device is gone")
        self.memory[: len(source)] = source

    def wait(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done.result(60)


@pytest.fixture
def device() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@each_case("size", [0, 1, SIZE - 1, SIZE, SIZE + 1, 7 * SIZE + 3])
@each_case("buffers", [1, 2, 4])
def test_staged_copies_of_any_size_are_complete(device: ThreadPoolExecutor, size: int, buffers: int) -> None:
    staging = Staging([Slow(device) for _ in range(buffers)])
    source = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    for _ in range(2):
        memory = np.zeros(size, np.uint8)
        staging.copy(memory, source)
        assert np.array_equal(memory, source)


def test_a_copy_that_fails_gives_its_buffers_back(device: ThreadPoolExecutor) -> None:
    buffers = [Slow(device) for _ in range(2)]
    staging, source = Staging(buffers), np.arange(9 * SIZE, dtype=np.uint8)
    buffers[1].fails = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        staging.copy(np.zeros_like(source), source)
    buffers[1].fails = False
    memory = np.zeros_like(source)
    staging.copy(memory, source)
    assert np.array_equal(memory, source)


def test_a_call_uses_the_device_streams_of_its_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.local()
    monkeypatch.setattr(ordering, "streams", lambda: (getattr(mine, "stream", "none"),))
    turns = LoopRunner()

    async def seen() -> object:
        return ordering.noted()

    def call(stream: str) -> object:
        mine.stream = stream
        with ordering.called():
            return turns.wait(seen())

    try:
        with ThreadPoolExecutor(8) as calling:
            names = [f"stream {i}" for i in range(64)]
            assert list(calling.map(call, names)) == [(name,) for name in names]
        assert ordering.noted() == ("none",)
    finally:
        turns.close()
