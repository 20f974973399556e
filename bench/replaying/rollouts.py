"""A rollout worker: slots make responses at the trace's pace, and a prompt's rows are appended when all are made.

A prompt's pixels are written into the plane once, while its responses are made, and all of its rows refer to them.
Invariant: responses begin in the order of the plan, and not before their step may begin (`Plan`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import dataplane as dp
from bench.replaying import payloads
from bench.replaying.plan import COLUMNS, Plan
from bench.replaying.telling import Did, Ended, Policy, Ready, Spent

PATIENCE_S = 600.0
"""Timeout of calls that wait for room or bytes: longer than any step."""


@dataclass(eq=False)
class _Prompt:
    """A prompt in work. `left`: responses that are not made yet. `stored`: its pixels."""

    step: int
    number: int
    rows: list[int]
    left: int
    began: float = 0.0
    version: int = 0
    stored: asyncio.Task[tuple[dp.BatchRef, int]] | None = field(default=None)


def work(plan: Plan, address: str, worker: int, pipe: Connection) -> None:
    """The main function of the process."""
    asyncio.run(_Worker(plan, worker, pipe).run(address))


class _Worker:
    """The slots of one process."""

    def __init__(self, plan: Plan, worker: int, pipe: Connection) -> None:
        self._plan, self._worker, self._pipe = plan, worker, pipe
        self._name = f"rollout {worker}"
        self._spent = Spent()
        self._policy = Policy(-1, -1)
        self._told = asyncio.Condition()
        self._turn = asyncio.Lock()  # held to take the next response
        self._writing = asyncio.Lock()  # one prompt's pixels at a time
        self._next = self._responses()

    async def run(self, address: str) -> None:
        """Make all responses of this worker."""
        async with dp.aio.connect(address) as plane, asyncio.TaskGroup() as tasks:
            self._plane, self._tasks = plane, tasks
            self._stream = await plane.stream("replay")
            loop = asyncio.get_running_loop()
            loop.add_reader(self._pipe.fileno(), lambda: tasks.create_task(self._hear()))
            self._pipe.send(Ready(self._name))
            try:
                async with asyncio.TaskGroup() as slots:
                    for _ in range(self._plan.slots):
                        slots.create_task(self._slot())
            finally:
                loop.remove_reader(self._pipe.fileno())
        self._pipe.send(Ended(self._name, self._spent.told()))

    async def _hear(self) -> None:
        while self._pipe.poll():
            self._policy = self._pipe.recv()
        async with self._told:
            self._told.notify_all()

    def _responses(self) -> Iterator[tuple[_Prompt, int]]:
        for step in range(len(self._plan.trace.steps)):
            for number, rows in self._plan.groups(step, self._worker):
                prompt = _Prompt(step, number, rows, len(rows))
                for row in rows:
                    yield prompt, row

    async def _slot(self) -> None:
        """Make one response after another, until there are no more."""
        while True:
            async with self._turn:
                prompt, row = next(self._next, (None, 0))
                if prompt is None:
                    return
                await self._may_begin(prompt.step)
                if not prompt.began:
                    prompt.began, prompt.version = time.monotonic(), self._policy.version
                    if self._plan.pixels:
                        prompt.stored = self._tasks.create_task(self._store(prompt))
            began, seconds = time.monotonic(), float(self._plan.made_s[row])
            await asyncio.sleep(seconds)  # the engine's tokens, and the tools
            self._spent.paused(seconds, began)
            prompt.left -= 1
            if not prompt.left:
                await self._append(prompt)

    async def _may_begin(self, step: int) -> None:
        with self._spent.on("policy"):
            async with self._told:
                await self._told.wait_for(lambda: self._policy.done >= self._plan.begins_at(step))

    async def _store(self, prompt: _Prompt) -> tuple[dp.BatchRef, int]:
        """Write the prompt's pixels into the plane, like an image processor. Returns their reference and checksum."""
        step = self._plan.trace.steps[prompt.step]
        number = int(self._plan.starts[prompt.step]) + prompt.number
        spec = dp.ragged([int(self._plan.patches(step)[prompt.number])], (1176,), "float32")
        async with self._writing:
            with self._spent.on("room"):
                draft = await self._plane.draft({"pixel_values": spec}, timeout=PATIENCE_S)
            async with draft:
                checksum = await asyncio.to_thread(_written, draft["pixel_values"][0], number)
                ref = await draft.seal()
        self._spent.written += ref.nbytes
        return ref, checksum

    async def _append(self, prompt: _Prompt) -> None:
        """Append the rows of a prompt."""
        with self._spent.on("room"):
            stored, of_pixels = (None, 0) if prompt.stored is None else await prompt.stored
            rows: dict[str, Any] | dp.BatchRef = self._made(prompt.rows, of_pixels)
            if stored is not None:
                made = await self._plane.put(rows, timeout=PATIENCE_S)
                rows = stored.repeat(len(prompt.rows)).union(made)
            keys = [str(row) for row in prompt.rows]
            group = f"{prompt.step}.{prompt.number}"
            await self._stream.append(rows, keys=keys, group=group, version=prompt.version, timeout=PATIENCE_S)
        self._pipe.send(Did(self._name, "rollout", prompt.rows, prompt.began, time.monotonic()))

    def _made(self, rows: list[int], of_pixels: int) -> dict[str, Any]:
        """The columns of responses without pixels, and the checksums of all columns, pixels included."""
        columns: dict[str, Any] = {
            "input_ids": [payloads.tokens(count, row) for row, count in zip(rows, self._plan.tokens[rows], strict=True)]
        }
        for name, of in (("response_ids", payloads.tokens), ("log_probs", payloads.floats)):
            columns[name] = [of(int(self._plan.response_tokens[row]), row) for row in rows]
        sums = np.full((len(rows), len(COLUMNS)), of_pixels, np.int64)
        for name, arrays in columns.items():
            sums[:, COLUMNS.index(name)] = [payloads.checksum(array) for array in arrays]
            self._spent.written += sum(array.nbytes for array in arrays)
        return columns | {"row": np.array(rows), "sums": sums}


def _written(room: np.ndarray, number: int) -> int:
    payloads.fill(room, number)
    return payloads.checksum(room)
