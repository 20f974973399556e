"""Writes to a data directory as it is told, a line each: `python -m tests.faults.durable_subject DIRECTORY`.

`log` and `shard` write an entry, or a shard of 1 MiB; what came of it is printed: the index or number, or the error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.errors import DataplaneError
from dataplane.replication.log import ExtendLog
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.log import SQLiteStorage
from dataplane.store.store import Store

MIB = 1 << 20
ME = ("node", 1)


async def shard(store: Store) -> int:
    column = ColumnLayout(Field("dense", "uint8", (MIB,)), 1, 1, ((0, MIB),))
    layout = ShardLayout((("x", column),)).encode()
    number = await store.put("p", b"x" * MIB, layout, Deadline.after(10), scope="", holder="p")
    await store.persistence.persist([number], Deadline.after(0.3))
    return number


async def main(path: Path) -> None:
    directory = DataDirectory(path)
    store = Store(NodeConfig(memory=32 * MIB, spill=0, spill_dir=path.parent, prewarm=0), directory=directory)
    log, last = SQLiteStorage(directory.database, "p", ME), 0
    for line in sys.stdin:
        try:
            if line == "log\n":
                log.write([ExtendLog(last + 1, (LogEntry(1, b"entry %d" % (last + 1)),))])
                last += 1
                print(last, flush=True)  # noqa: T201
            else:
                print(await shard(store), flush=True)  # noqa: T201
        except DataplaneError as error:
            print(type(error).__name__, error.fields.get("reason", ""), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
