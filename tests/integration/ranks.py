"""Ranks of a `torch.distributed` group for tests: real processes, each with a plane, that make the calls they are told.

`Ranks` is a context manager; what a rank answers to `call` is a batch as plain values, or the error that it raised.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dataplane as dp
from dataplane.collective.link import RankLink
from tests.processes import MIB, Worker
from tests.torches import torches


@dataclass(frozen=True)
class Outcome:
    """What a call gave in one rank: plain values, or an error; how long it took; how often and what the rank
    read, and the bytes that it sent to each other."""

    value: Any
    error: dp.DataplaneError | None
    reads: int
    read_bytes: int
    sent: dict[int, int]


class Counting:
    """A plane that counts what is read."""

    def __init__(self, plane: dp.Plane) -> None:
        self._plane = plane
        self.address = plane.address
        self.reads = self.read_bytes = 0

    def get(self, ref: dp.BatchRef, *, timeout: float) -> dp.Batch:
        self.reads += 1
        self.read_bytes += ref.nbytes
        return self._plane.get(ref, timeout=timeout)


def live(pipe: Any, rank: int, size: int, store: str, address: str, backend: str) -> None:
    """A rank: it makes each call that it hears of."""
    import torch
    import torch.distributed as dist

    sent, send = Counter[int](), RankLink.send

    def counted(link: RankLink, rank: int, data: Any, *tag: int) -> Any:
        sent[rank] += len(data)
        return send(link, rank, data, *tag)

    RankLink.send = counted  # type: ignore[method-assign]
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    pipe.send(os.getpid())
    with dp.connect(address) as plane:
        while (told := pipe.recv()) is not None:
            call, arguments, options = told
            sent.clear()
            outcome = _outcome(plane, dist.group.WORLD, call, arguments, options)
            pipe.send(replace(outcome, sent=dict(sent)))
    dist.destroy_process_group()


def _outcome(plane: dp.Plane, group: Any, call: str, arguments: Any, options: dict[str, Any]) -> Outcome:
    import torch

    for name in options.pop("lacks", ()):  # as an older torch does
        delattr(torch, name)
    counting = Counting(plane)
    value: Any = None
    error = None
    try:
        if call == "plane.get":
            value = plane.get(arguments, group=group, **options)
        elif call == "interrupt":
            dp.collective.interrupt(group)
        elif call == "aio.get":
            value = asyncio.run(_get(plane.address, arguments, group, options))
        else:
            value = getattr(dp.collective, call)(arguments, group, plane=counting, **options)
    except dp.DataplaneError as raised:
        error = raised
    return Outcome(_plain(value), error, counting.reads, counting.read_bytes, {})


async def _get(address: str, ref: dp.BatchRef, group: Any, options: dict[str, Any]) -> dp.Batch:
    async with dp.aio.connect(address) as plane:
        cancelled_s = options.pop("cancelled_s", None)
        getting = asyncio.create_task(plane.get(ref, group=group, **options))
        if cancelled_s is not None:
            done, _ = await asyncio.wait([getting], timeout=cancelled_s)
            assert not done
            getting.cancel()
            try:
                await getting
            except asyncio.CancelledError:
                raise dp.NotReady("it was cancelled") from None
        return await getting


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.to_dict() if isinstance(value, dp.Batch) and value.nbytes < MIB else None


class Ranks:
    """`size` ranks of one group, connected to the node at `address`, or each to another."""

    def __init__(self, size: int, directory: Path, address: str | Sequence[str], *, backend: str = "gloo") -> None:
        store = str(directory / f"store-{time.monotonic_ns()}")
        addresses = [address] * size if isinstance(address, str) else address
        self.workers = [
            Worker(live, rank, size, store, addresses[rank], backend, context=torches) for rank in range(size)
        ]

    def __enter__(self) -> Ranks:
        try:
            for worker in self.workers:
                worker.hear(60)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.__exit__(None, None, None)

    def begin(
        self,
        call: str | Callable[[int], str],
        arguments: Sequence[Any],
        ranks: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        """Have these ranks make a call, with one argument each; the group is all ranks."""
        for rank in range(len(self.workers)) if ranks is None else ranks:
            self.workers[rank].say((call if isinstance(call, str) else call(rank), arguments[rank], dict(options)))

    def hear(self, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """What the call gave in these ranks."""
        return [self.workers[rank].hear() for rank in (range(len(self.workers)) if ranks is None else ranks)]

    def call(self, call: str | Callable[[int], str], arguments: Sequence[Any], **options: Any) -> list[Outcome]:
        self.begin(call, arguments, **options)
        return self.hear()
