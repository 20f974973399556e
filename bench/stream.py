"""Streams: the cost of bookkeeping, delivery and waiting, compared with fixed limits and the machine.

`python -m bench.stream [--only NAME]`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import dataplane as dp
from bench import workload
from bench.measure import Row, finished, measured, row, timed
from bench.workloads import generate
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.node.local.unreplicated import UnreplicatedStream
from dataplane.stream import requests as r
from dataplane.stream.balance import balanced
from dataplane.stream.settings import StreamSettings

RUNS = 7
BLOCK = 1024
_ROW = {"ids": [list(range(512))], "logp": np.zeros((1, 512), np.float32), "reward": np.array([0.5])}
_BLOCKS = 60


class _Books:
    """A stream's state, called as by a node but without sockets, to measure the bookkeeping alone."""

    def __init__(self) -> None:
        self._stream = UnreplicatedStream("s", StreamSettings(("reward", "actor")), "", self, lambda: 0.0)
        self.shards = 0

    def free(self, batches: Any) -> None:
        """Do nothing: no batch is stored."""

    read = unread = free

    def _ref(self, names: tuple[str, ...]) -> BatchRef:
        self.shards += 1
        field = Field("dense", "float32", ())
        return ref_to(b"n" * 8, BLOCK, [(n, field, 4 * BLOCK, self.shards, i) for i, n in enumerate(names)])

    def append(self) -> None:
        groups = np.repeat(np.arange(self.shards * BLOCK, self.shards * BLOCK + BLOCK // 8), 8).tolist()
        ref = BatchRef.decode(self._ref(("prompt", "response")).encode())
        self._stream.run(r.Append(client="p", ref=ref, versions=np.zeros(BLOCK, np.int64), groups=groups))

    def grant(self, task: str, columns: tuple[str, ...]) -> r.Delivered:
        given: r.Delivered = self._stream.run(r.Consume(client="c", task=task, columns=columns, rows=BLOCK))
        given.ref.with_origin(b"s" * 8, given.rows, given.holds).encode()
        return given

    def step(self) -> None:
        """Append a block, consume, extend and ack it as a first task, and consume and ack it as a second."""
        self.append()
        first = self.grant("reward", ("response",))
        reward, holds = BatchRef.decode(self._ref(("reward",)).encode()), np.full(BLOCK, first.holds)
        self._stream.run(r.Extend(rows=first.rows, ref=reward, holds=holds))
        self._stream.run(r.Ack(client="c", grant=first.grant))
        second = self.grant("actor", ("prompt", "response", "reward"))
        self._stream.run(r.Ack(client="c", grant=second.grant))


def bookkeeping(scratch: Path) -> list[Row]:
    """Rows a second through one stream's state on one core, with few and with many rows in the stream."""
    streams = (_Books(), _Books())
    for books, blocks in zip(streams, (10, 1000), strict=True):
        for _ in range(blocks):
            books.append()
        for _ in range(20):
            books.step()

    def rate(books: _Books) -> float:
        def work() -> None:
            for _ in range(_BLOCKS):
                books.step()

        return _BLOCKS * BLOCK / timed(work)

    few, many = zip(*[(rate(streams[0]), rate(streams[1])) for _ in range(RUNS)], strict=True)  # alternately
    ratios = [b / a for a, b in zip(few, many, strict=True)]
    return [
        row("rows/s of bookkeeping, 10 thousand rows in the stream", list(few), at_least=300_000, unit="rows/s"),
        row("the same, 1 million", list(many), at_least=300_000, unit="rows/s"),
        row("the one over the other", ratios, at_least=0.8, unit="x", detail="flat"),
    ]


def _consume_in_child(address: str, pipe: Any) -> None:
    with dp.connect(address) as plane:
        stream = plane.stream("latency")
        pipe.send("ready")
        for delivery in stream.deliveries("t", rows=1, columns=["x"], prefetch=0):
            pipe.send(time.monotonic())
            delivery.ack()


def latency(scratch: Path) -> list[Row]:
    """The time from the return of `append` until a waiting consumer in another process has the row."""
    p50, p99 = [], []
    with dp.connect(config=dp.NodeConfig(memory="256MiB", prewarm=0, spill_dir=scratch)) as plane:
        stream = plane.stream("latency", tasks=["t"])
        ours, theirs = mp.get_context("spawn").Pipe()
        child = mp.get_context("spawn").Process(target=_consume_in_child, args=(plane.address, theirs))
        child.start()
        ours.recv()
        columns = {"x": np.zeros((1, 256), np.float32)}
        for _ in range(RUNS):
            waits = []
            for _ in range(200):
                time.sleep(0.002)  # the consumer waits again
                stream.append(columns)
                returned = time.monotonic()
                waits.append(max(0.0, ours.recv() - returned) * 1e3)
            p50.append(float(np.percentile(waits, 50)))
            p99.append(float(np.percentile(waits, 99)))
        stream.close()
        child.join()
    return [
        row("append returned to row held, p50", p50, at_most=0.6, unit="ms"),
        row("the same, p99", p99, at_most=3.0, unit="ms"),
    ]


def single(scratch: Path) -> list[Row]:
    """Single rows, as of agents: appends of 512 token ids as a list, 512 float32 and a float; extends by a score."""
    columns = _ROW
    p50, rates, extends, spent = [], [], [], []
    with dp.connect(config=dp.NodeConfig(memory="256MiB", prewarm=0, spill_dir=scratch)) as plane:
        stream = plane.stream("single", tasks=["t"])
        ours, node = psutil.Process(), psutil.Process(plane.stats().pid)
        for _ in range(RUNS):
            before = sum(ours.cpu_times()[:2]) + sum(node.cpu_times()[:2])
            keys, appended, extended = [], [], []
            for _ in range(400):
                began = time.perf_counter()
                keys += stream.append(columns)
                appended.append((time.perf_counter() - began) * 1e6)
            spent.append((sum(ours.cpu_times()[:2]) + sum(node.cpu_times()[:2]) - before) / 400 * 1e6)
            for key in keys:
                began = time.perf_counter()
                stream.extend([key], {"score": np.array([1.0])})
                extended.append((time.perf_counter() - began) * 1e6)
            p50.append(float(np.median(appended)))
            rates.append(1e6 * len(appended) / sum(appended))
            extends.append(float(np.median(extended)))
            stream.drop_rows(keys)
        together = [asyncio.run(_in_flight(plane.address, columns)) for _ in range(RUNS)]
        gathered = [_gathered(stream, columns) for _ in range(RUNS)]
    return [
        row("append of one row, p50", p50, at_most=300, unit="us"),
        row("processor time of it, client and node", spent, at_most=600, unit="us"),
        row("extend of one row, p50", extends, at_most=300, unit="us"),
        row("rows appended one at a time", rates, at_least=3000, unit="rows/s"),
        row("the same, 32 in flight", together, at_least=8000, unit="rows/s"),
        row("the same, with an appender", gathered, at_least=50_000, unit="rows/s"),
    ]


def _gathered(stream: Any, columns: dict[str, Any], rows: int = 20_000) -> float:
    """Rows a second of one process that sends single rows by an appender, until all are in the stream."""
    began = time.perf_counter()
    with stream.appender(max_rows=256) as appender:
        sent = [appender.send(columns) for _ in range(rows)]
    rate = rows / (time.perf_counter() - began)
    stream.drop_rows([key for each in sent for key in each.result()])
    return rate


def consumed(scratch: Path) -> list[Row]:
    """Rows of `single`, consumed 64 at a time: only acked, and with their columns read."""
    acked, read = [], []
    with dp.connect(config=dp.NodeConfig(memory="512MiB", prewarm=0, spill_dir=scratch)) as plane:
        stream = plane.stream("consumed", tasks=["t"])
        for reads in [False, True] * RUNS:
            with stream.appender() as appender:
                for _ in range(8192):
                    appender.send(_ROW)
            began = time.perf_counter()
            for _ in range(8192 // 64):
                with stream.consume("t", rows=64, min_rows=64, columns=list(_ROW)) as delivery:
                    if reads:
                        batch = delivery.get()
                        assert [len(batch[name].numpy()) for name in batch] == [64] * 3
            (read if reads else acked).append(8192 / (time.perf_counter() - began))
    return [
        row("rows consumed in 64s, acked", acked, at_least=60_000, unit="rows/s"),
        row("the same, three columns read", read, at_least=40_000, unit="rows/s"),
    ]


def _append_in_child(address: str, pipe: Any, rows: int) -> None:
    with dp.connect(address) as plane:
        stream = plane.stream("producers")
        stream.append(_ROW)
        while pipe.recv():
            pipe.send([key for _ in range(rows) for key in stream.append(_ROW)])


def producers(scratch: Path) -> list[Row]:
    """Rows a second that eight processes append to one node, each one row at a time."""
    rates, count, rows = [], 8, 250
    context = mp.get_context("spawn")
    with dp.connect(config=dp.NodeConfig(memory="512MiB", prewarm=0, spill_dir=scratch)) as plane:
        stream = plane.stream("producers", tasks=["t"])
        pipes = [context.Pipe() for _ in range(count)]
        children = [context.Process(target=_append_in_child, args=(plane.address, p, rows)) for _, p in pipes]
        for child in children:
            child.start()
        while stream.stats()["rows"] < count:
            time.sleep(0.01)
        for _ in range(RUNS):
            began = time.perf_counter()
            for ours, _ in pipes:
                ours.send(True)
            keys = [key for ours, _ in pipes for key in ours.recv()]
            rates.append(count * rows / (time.perf_counter() - began))
            stream.drop_rows(keys)
        for (ours, _), child in zip(pipes, children, strict=True):
            ours.send(False)
            child.join()
    return [row("rows that eight processes append, one at a time", rates, at_least=6000, unit="rows/s")]


async def _in_flight(address: str, columns: dict[str, Any], rows: int = 1600, most: int = 32) -> float:
    """Rows a second that one process appends by single rows, with `most` appends in flight."""
    async with dp.aio.connect(address) as plane:
        stream = await plane.stream("single")

        async def appending() -> list[str]:
            return [key for _ in range(rows // most) for key in await stream.append(columns)]

        began = time.perf_counter()
        keys = await asyncio.gather(*(appending() for _ in range(most)))
        rate = rows / (time.perf_counter() - began)
        await stream.drop_rows([key for each in keys for key in each])
        return rate


def idle(scratch: Path) -> list[Row]:
    """The node's processor time while 64 consumers wait on an empty stream."""

    async def wait() -> list[float]:
        config = dp.NodeConfig(memory="64MiB", prewarm=0, spill_dir=scratch)
        async with dp.aio.connect(config=config) as plane:
            stream = await plane.stream("idle", tasks=["t"])
            waiting = [asyncio.ensure_future(_waits(stream)) for _ in range(64)]
            while (await stream.stats())["task"]["t"]["waiting"] < 64:  # noqa: ASYNC110  another process knows it
                await asyncio.sleep(0.01)
            node = psutil.Process((await plane.stats()).pid)
            shares = []
            for _ in range(RUNS):
                before = sum(node.cpu_times()[:2])
                await asyncio.sleep(1.0)  # the measured time
                shares.append((sum(node.cpu_times()[:2]) - before) * 100)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return shares

    return [row("64 consumers waiting: the node's share of a core", asyncio.run(wait()), at_most=2.0, unit="%")]


async def _waits(stream: Any) -> None:
    await stream.consume("t", rows=1, columns=["x"])


def balance(scratch: Path) -> list[Row]:
    """The balance of 512 rows, of 64 groups of 8, over 64 ranks by tokens."""
    ratios = []
    for seed in range(RUNS):
        (step,) = generate("code_14b", prompts=64, samples=8, steps=1, seed=seed).steps
        lengths = step.turn_output_tokens  # one turn each
        totals = [int(lengths[rows].sum()) for rows in balanced(lengths, 64)]
        ratios.append(max(totals) / (sum(totals) / len(totals)))
    return [row("512 rows to 64 ranks: most over mean tokens", ratios, at_most=1.05, unit="x")]


def pipeline(scratch: Path) -> list[Row]:
    """288 MiB through a stream: the time from append until each column is a tensor."""
    columns = workload.dense()
    seconds = []
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch)) as plane:
        stream = plane.stream("pipeline", tasks=["t"])

        def once() -> float:
            began = time.perf_counter()
            stream.append(columns)
            with stream.consume("t", rows=workload.ROWS, columns=list(columns)) as delivery:
                batch = delivery.get()
                tensors = [batch[name].torch() for name in batch]
                took = time.perf_counter() - began
                assert tensors[0].shape[0] == workload.ROWS
            return took

        once()
        once()
        seconds = [once() for _ in range(RUNS)]
    return [row("288 MiB, append to tensors", [s * 1e3 for s in seconds], unit="ms")]


def checkpoint(scratch: Path) -> list[Row]:
    """A checkpoint of 288 MiB and its restore, compared with a plain write of as many bytes to the same disk."""
    columns, file, plain = workload.dense(), scratch / "bench-checkpoint", scratch / "bench-plain"
    data = np.random.default_rng(0).bytes(workload.ROWS * 9 * 8192 * 4)

    def write() -> None:
        with plain.open("wb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())

    saved, restored = [], []
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch)) as plane:
        stream = plane.stream("checkpointed", tasks=["t"])
        stream.append(columns)
        try:
            for _ in range(RUNS):
                reference = timed(write)
                saved.append(reference / timed(lambda: stream.checkpoint(file)))
                restored.append(reference / timed(lambda: plane.restore(file, name="restored")))
                plane.stream("restored").drop()
        finally:
            file.unlink(missing_ok=True)
            plain.unlink(missing_ok=True)
    return [
        row("288 MiB to a file: a plain write's time over ours", saved, unit="x"),
        row("and back: a plain write's time over ours", restored, unit="x"),
    ]


SECTIONS = {
    f.__name__: f for f in (bookkeeping, latency, single, consumed, producers, idle, balance, pipeline, checkpoint)
}


def main() -> int:
    """Measure, print, and write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure only this")
    parser.add_argument("--spill-dir", type=Path, default=Path("/var/tmp"), help="a directory on disk")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "stream.json")
    arguments = parser.parse_args()
    rows = measured([SECTIONS[name] for name in arguments.only or SECTIONS], arguments.spill_dir)
    return finished(arguments.json, rows, {})


if __name__ == "__main__":
    sys.exit(main())
