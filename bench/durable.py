"""The cost of durability, compared with the disk's own time for the same bytes in the same run.

`python -m bench.durable [--only NAME] [--dir DIRECTORY]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Row, finished, row, table, timed
from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.locations import ref_to
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.node.clustered.single_node import SingleNode
from dataplane.node.requests.stream_client import StreamClient
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.store import Store
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm

MIB, GIB = 1 << 20, 1 << 30
RUNS = 7
ROUNDS = 30  # of each kind in a run, alternately
ROWS = 512
_WAIT_S = 120.0


def layout(rows: int, nbytes: int) -> bytes:
    column = ColumnLayout(Field("dense", "uint8", (nbytes // rows,)), rows, rows, ((0, nbytes),))
    return ShardLayout((("x", column),)).encode()


def opened(scratch: Path, memory: int = 256 * MIB) -> Store:
    config = NodeConfig(memory=memory, spill=0, spill_dir=scratch, prewarm=0)
    return Store(config, directory=DataDirectory(scratch / "data"))


async def put(store: Store, data: bytes, described: bytes) -> int:
    """Put bytes like a client: they are written into the arena once. Returns the shard's number."""
    (reserved,) = await store.reservations.reserve("p", [len(data)], Deadline.after(_WAIT_S))
    with store.arena.view(reserved.extent) as view:
        view[:] = data
    store.seal("p", [(reserved.shard, described)], scope="", holder="p")
    return reserved.shard


async def _no_wait() -> bool:
    """There is always room for a reply."""
    return False


class Appender:
    """A node with a durable stream, and the requests of a client, in this process."""

    def __init__(self, scratch: Path) -> None:
        self.store = opened(scratch)
        assert self.store.persistence is not None
        self._node = self.store.persistence.durable.directory.identity.node
        needed = NeededShards(self._node, self.store)
        self.durable = SingleNode(self.store.persistence, needed)
        self._client = StreamClient(self.durable.streams, StagedColumns(needed), _no_wait, owner="")
        self._numbers = itertools.count(1)
        self._token = b""

    async def start(self) -> None:
        """Recover, and open the stream."""
        await self.durable.recover()
        asked = rm.OpenStream(next(self._numbers), "rollouts", StreamSettings(("train",), durable=True))
        self._token = (await self._ask(asked)).stream

    async def _ask(self, request: Any) -> Any:
        answer = self._client.answer(request, Deadline.after(_WAIT_S))
        return answer if answer is None or isinstance(answer, m.Message) else await answer()

    async def append(self, data: bytes, described: bytes) -> None:
        """Put and append 512 rows in groups of 8, like a client."""
        shard = await put(self.store, data, described)
        ref = ref_to(self._node, ROWS, [("x", Field("dense", "uint8", (len(data) // ROWS,)), len(data), shard, 0)])
        number = next(self._numbers)
        admitted = await self._ask(rm.AdmitRows(number, self._token, ROWS, len(data), 0, "", b"", _WAIT_S))
        groups: list[str | int] = [ROWS * number + row // 8 for row in range(ROWS)]
        versions = np.full(ROWS, number).tobytes()
        said = [], b"", groups, versions, {}, None, {}
        await self._ask(rm.AppendRows(number, self._token, *said, ticket=admitted.ticket, ref=ref.encode()))

    async def take(self, rows: int = ROWS) -> r.Delivered:
        """Consume `rows` rows of the task."""
        asked = r.Consume(task="train", rows=rows, min_rows=rows, columns=("x",), lease_s=600.0)
        delivered: r.Delivered = (await self._ask(rm.AskStream(next(self._numbers), self._token, asked))).result
        return delivered

    async def ack(self, delivered: r.Delivered) -> None:
        """Ack a delivery, which frees the columns of its rows."""
        await self._ask(rm.AskStream(next(self._numbers), self._token, r.Ack(grant=delivered.grant)))

    async def aclose(self) -> None:
        await self.durable.aclose()
        await self.store.aclose()


def append(scratch: Path) -> list[Row]:
    """Durable appends, compared with a write and fdatasync of as many bytes."""
    return asyncio.run(_append(scratch))


async def _append(scratch: Path) -> list[Row]:
    node = Appender(scratch)
    await node.start()
    data, described = np.random.default_rng(0).bytes(MIB), layout(ROWS, MIB)
    file = scratch / "plain"

    def plain() -> None:
        with file.open("wb", buffering=0) as target:
            target.write(data)
            os.fdatasync(target.fileno())

    async def ours() -> None:
        await node.append(data, described)

    ratios, fastest, times, spent, together = [], [], [], [], []
    for _ in range(RUNS):
        disk, one, cpu = [], [], []
        for _ in range(ROUNDS):
            disk.append(timed(plain))
            file.unlink()
            began, worked = time.perf_counter(), time.process_time()
            await ours()
            one.append(time.perf_counter() - began)
            cpu.append(time.process_time() - worked)
            await node.ack(await node.take())
        ratios.append(float(np.median(one) / np.median(disk)))
        fastest.append(min(one) / min(disk))
        times.append(float(np.median(one)) * 1e3)
        spent.append(float(np.mean(cpu)) * 1e3)
        began = time.perf_counter()
        await asyncio.gather(*(ours() for _ in range(16)))
        together.append((time.perf_counter() - began) / 16 / float(np.median(disk)))
        for _ in range(16):
            await node.ack(await node.take())
    await node.aclose()
    return [
        row("512 rows, 1 MiB: durable append over the disk's write + fdatasync", ratios, at_most=3.0, unit="x"),
        row("the same, the fastest of 30 of each", fastest, at_most=3.0, unit="x", detail="undisturbed"),
        row("the same, 16 at once, each", together, at_most=3.0, unit="x"),
        row("the same, one by one, time", times, at_most=1e3, unit="ms", detail="no bound: what the disk gives"),
        row("the same, processor time", spent, at_most=1e3, unit="ms", detail="no bound"),
    ]


_FIRST_ROW = """
import asyncio, sys, time
from pathlib import Path
began = time.perf_counter()
from bench.durable import first_row
print(asyncio.run(first_row(Path(sys.argv[1]), began)))
"""


async def first_row(scratch: Path, began: float) -> str:
    """JSON of the seconds since `began` until the first durable row is in memory, and until all rows are known, and of
    the numbers of shards and rows."""
    node = Appender(scratch)
    mover = asyncio.create_task(node.store.residency.run())
    await node.start()
    known = time.perf_counter() - began
    ref = (await node.take(1)).ref
    await node.store.pin("c", [shard for _, shard in ref.shards()], Deadline.after(_WAIT_S))
    first = time.perf_counter() - began
    (figures,) = node.durable.streams.figures(None, 1).values()
    mover.cancel()
    shards = node.store.statistics().shards
    await node.aclose()
    return json.dumps([first, known, shards, figures["rows"]])


def recovery(scratch: Path) -> list[Row]:
    """The start of a process with 100,000 durable rows, 4 GiB of columns."""
    asyncio.run(_fill(scratch, 100_000 // ROWS + 1, 4 * GIB))
    command = [sys.executable, "-c", _FIRST_ROW, str(scratch)]
    found = []
    for _ in range(RUNS):
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        found.append(json.loads(done.stdout))
    detail = f"{found[0][2]} shards, {found[0][3]:,} rows; with the start of the process"
    return [
        row("100,000 rows, 4 GiB: until the first row", [f[0] for f in found], at_most=10, unit="s", detail=detail),
        row("the same: until all of them are known", [f[1] for f in found], at_most=10, unit="s"),
    ]


async def _fill(scratch: Path, appends: int, nbytes: int) -> None:
    node = Appender(scratch)
    mover = asyncio.create_task(node.store.residency.run())
    await node.start()
    each = -(-nbytes // appends // MIB) * MIB
    data, described = np.random.default_rng(0).bytes(each), layout(ROWS, each)
    for _ in range(appends):
        await node.append(data, described)
    mover.cancel()
    await node.aclose()


SECTIONS = {f.__name__: f for f in (append, recovery)}


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure only this")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "durable.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    scratch = arguments.dir / f"bench-durable-{os.getpid()}"
    for name in arguments.only or SECTIONS:
        scratch.mkdir()
        try:
            measured = SECTIONS[name](scratch)
        finally:
            shutil.rmtree(scratch)
        rows += measured
        print(table(measured), flush=True)
    return finished(arguments.json, rows, {})


if __name__ == "__main__":
    sys.exit(main())
