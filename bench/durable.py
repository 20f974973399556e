"""What durability costs, against what the disk itself takes for the same bytes in the same run.

`python -m bench.durable [--only NAME] [--dir DIRECTORY]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.measure import Row, row, table, timed, write_json
from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.replication.messages import Entry, Snapshot
from dataplane.replication.storage import Extend, Rebase
from dataplane.store.durable.database import Database
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.log import SQLiteStorage
from dataplane.store.store import Store

MIB, GIB = 1 << 20, 1 << 30
RUNS = 7
ROUNDS = 30  # of each kind in a run, by turns
ROWS = 512
COMMAND = 16 << 10  # bytes: 512 rows with group, version, tags and key
PARTITIONS = 16
_WAIT_S = 120.0


def layout(rows: int, nbytes: int) -> bytes:
    column = ColumnLayout(Field("dense", "uint8", (nbytes // rows,)), rows, rows, ((0, nbytes),))
    return ShardLayout((("x", column),)).encode()


def opened(scratch: Path, memory: int = 256 * MIB) -> Store:
    config = NodeConfig(memory=memory, spill=0, spill_dir=scratch, prewarm=0)
    return Store(config, directory=DataDirectory(scratch / "data"))


async def put(store: Store, data: bytes, described: bytes) -> int:
    """As a client's append: bytes are written into the arena once."""
    (reserved,) = await store.reserve("p", [len(data)], Deadline.after(_WAIT_S))
    with store.arena.view(reserved.extent) as view:
        view[:] = data
    store.seal("p", [(reserved.shard, described)], scope="", holder="p")
    return reserved.shard


def append(scratch: Path) -> list[Row]:
    """Columns into memory and to disk, then their command; beside a write and fdatasync of as many bytes."""
    return asyncio.run(_append(scratch))


async def _append(scratch: Path) -> list[Row]:
    store = opened(scratch)
    assert store.persistence is not None
    durable = store.persistence.durable
    log = SQLiteStorage(durable.directory.database, "p", ("node", 1))
    data, described = np.random.default_rng(0).bytes(MIB), layout(ROWS, MIB)
    command, file = np.random.default_rng(1).bytes(COMMAND), scratch / "plain"
    index = 0

    def plain() -> None:
        with file.open("wb", buffering=0) as target:
            target.write(data)
            os.fdatasync(target.fileno())

    async def ours() -> int:
        nonlocal index
        shard = await put(store, data, described)
        await store.persist([shard], Deadline.after(_WAIT_S), with_next=True)
        index += 1
        await durable.journal.write(log.writing([Extend(index, (Entry(1, command),))]))
        return shard

    ratios, fastest, times, spent, together = [], [], [], [], []
    for _ in range(RUNS):
        disk, one, cpu = [], [], []
        for _ in range(ROUNDS):
            disk.append(timed(plain))
            file.unlink()
            began, worked = time.perf_counter(), time.process_time()
            shard = await ours()
            one.append(time.perf_counter() - began)
            cpu.append(time.process_time() - worked)
            store.free([shard])
            await asyncio.sleep(0)
        ratios.append(float(np.median(one) / np.median(disk)))
        fastest.append(min(one) / min(disk))
        times.append(float(np.median(one)) * 1e3)
        spent.append(float(np.mean(cpu)) * 1e3)
        began = time.perf_counter()
        store.free(await asyncio.gather(*(ours() for _ in range(16))))
        together.append((time.perf_counter() - began) / 16 / float(np.median(disk)))
    await store.aclose()
    return [
        row("512 rows, 1 MiB: durable append over the disk's write + fdatasync", ratios, at_most=3.0, unit="x"),
        row("the same, the fastest of 30 of each", fastest, at_most=3.0, unit="x", detail="undisturbed"),
        row("the same, 16 at once, each", together, at_most=3.0, unit="x"),
        row("the same, one by one, time", times, at_most=1e3, unit="ms", detail="no bound: what the disk gives"),
        row("the same, processor time", spent, at_most=1e3, unit="ms", detail="no bound"),
    ]


def commits(scratch: Path) -> list[Row]:
    """An entry for each of 16 partitions, on disk: in one database that they share, and in one each."""
    shared = Database(scratch / "shared.sqlite")
    apart = [Database(scratch / f"apart-{i}.sqlite") for i in range(PARTITIONS)]
    one = [SQLiteStorage(shared, f"p{i}", ("node", 1)) for i in range(PARTITIONS)]
    each = [SQLiteStorage(database, "p", ("node", 1)) for database in apart]
    command, index = np.random.default_rng(1).bytes(COMMAND), 0

    def write(logs: Sequence[SQLiteStorage]) -> None:
        for log in logs:
            log.write([Extend(index, (Entry(1, command),))])
        for log in logs:
            log.sync()

    ratios, alone = [], []
    for _ in range(RUNS):
        times: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            index += 1
            times.append((timed(lambda: write(one)), timed(lambda: write(each))))
        of_one, of_each = np.median(np.array(times), axis=0)
        ratios.append(float(of_each / of_one))
        alone.append(float(of_one) * 1e3)
    for database in (shared, *apart):
        database.close()
    return [
        row("16 partitions' commits: a database each over one for all", ratios, at_least=1.0, unit="x"),
        row("16 partitions' commits in one database", alone, at_most=1e3, unit="ms", detail="no bound"),
    ]


_FIRST_ROW = """
import asyncio, sys, time
from pathlib import Path
began = time.perf_counter()
from bench.durable import first_row
print(asyncio.run(first_row(Path(sys.argv[1]), began)))
"""


async def first_row(scratch: Path, began: float) -> str:
    """Seconds until the first durable row is in memory, and until log and index are."""
    store = opened(scratch)
    assert store.persistence is not None
    log = SQLiteStorage(store.persistence.durable.directory.database, "p", ("node", 1))
    stored = log.load()[1]
    shards = await store.recover()
    known = time.perf_counter() - began
    mover = asyncio.create_task(store.run())
    await store.pin("c", [shards[0]], Deadline.after(_WAIT_S))
    first = time.perf_counter() - began
    mover.cancel()
    await store.aclose()
    return json.dumps([first, known, len(shards), len(stored.entries)])


def recovery(scratch: Path) -> list[Row]:
    """A process that starts on 4 GiB of durable columns, and the log of 100,000 rows and a snapshot of as many."""
    asyncio.run(_fill(scratch, 4 * GIB // MIB))
    command = [sys.executable, "-c", _FIRST_ROW, str(scratch)]
    found = []
    for _ in range(RUNS):
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
        found.append(json.loads(done.stdout))
    detail = f"{found[0][2]} shards of 1 MiB, {found[0][3]} commands; with the start of the process"
    return [
        row("100,000 rows, 4 GiB: until the first row", [f[0] for f in found], at_most=10, unit="s", detail=detail),
        row("the same: until log and index are read", [f[1] for f in found], at_most=10, unit="s"),
    ]


async def _fill(scratch: Path, shards: int) -> None:
    store = opened(scratch)
    assert store.persistence is not None
    mover = asyncio.create_task(store.run())
    data, described = np.random.default_rng(0).bytes(MIB), layout(ROWS, MIB)
    for _ in range(0, shards, 32):
        numbers = [await put(store, data, described) for _ in range(32)]
        await store.persist(numbers, Deadline.after(_WAIT_S))
    log = SQLiteStorage(store.persistence.durable.directory.database, "p", ("node", 1))
    command = np.random.default_rng(1).bytes(COMMAND)
    log.write([Extend(1, (Entry(1, command),)), Rebase(Snapshot(1, 1, command * 640), True)])  # 10 MiB: 100 bytes a row
    log.write([Extend(2, (Entry(1, command),) * (100_000 // ROWS))])
    log.sync()
    mover.cancel()
    await store.aclose()


SECTIONS = {f.__name__: f for f in (append, commits, recovery)}


def main() -> None:
    """Measure, print, and write JSON."""
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
    write_json(arguments.json, rows, {})
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
