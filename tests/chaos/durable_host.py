"""A durable partition on one host, under load until it is killed: `python -m tests.chaos.durable_host DIRECTORY LAST`.

A replica with its log in SQLite, the simulator's stream for a state machine, and a store with durable shards: what an
append makes is persisted before its command. LAST is a JSON object, the last sequence that each producer had answered.
What clients are told is printed, a JSON list a line, when they are told.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import xxhash

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.errors import DataplaneError
from dataplane.replication.configuration import Configuration
from dataplane.replication.effects import Answer, Effect, Refuse, Store, Swap
from dataplane.replication.replica import Replica
from dataplane.replication.settings import Settings
from dataplane.store import store as stores
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.log import SQLiteStorage
from tests.simulation.machine import (
    Append,
    Appended,
    Leased,
    Request,
    Result,
    Settle,
    StreamMachine,
    decode_result,
    encode,
)
from tests.simulation.machine import (
    Lease as LeaseRows,
)

MIB = 1 << 20
TASK = "train"
PRODUCERS, CONSUMERS = 4, 2
AHEAD = 400  # rows that may be there and not acked
SIZES = (300, 5_000, 40_000, MIB)


def say(*what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def soon() -> Deadline:
    return Deadline.after(30.0)


class Unwatched:
    def applied(self, count: int, command: bytes, result: bytes) -> None:
        return


class Host:
    """The partition and the store. A request is answered once its commands are on disk."""

    def __init__(self, directory: DataDirectory, store: stores.Store) -> None:
        assert store.persistence is not None
        me = directory.identity.node.hex(), directory.identity.incarnation
        self.store = store
        self.machine = StreamMachine(Unwatched())
        self._journal = store.persistence.durable.journal
        self._storage = SQLiteStorage(directory.database, "p", me)
        _, stored = self._storage.load()
        epoch = stored.entries[-1].epoch if stored.entries else stored.snapshot.epoch
        settings = Settings(durable=True, snapshot_every=64)
        self._replica = Replica(me, settings, self.machine, stored, time.monotonic())
        self._asked: dict[int, asyncio.Future[Result]] = {}
        self._perform(self._replica.configured(Configuration(max(1, epoch), me), time.monotonic()))

    async def serving(self) -> None:
        while not self._replica.serves(time.monotonic()):
            await asyncio.sleep(0.001)

    async def request(self, request: Request) -> Result:
        number = len(self._asked)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._perform(self._replica.request(number, encode(request), time.monotonic()))
        return await self._asked[number]

    def _perform(self, effects: list[Effect]) -> None:
        stored = [effect for effect in effects if isinstance(effect, Store)]
        if stored:
            written = self._journal.write(self._storage.writing([effect.operation for effect in stored]))
            written.add_done_callback(lambda done: self._stored(done, stored[-1].ticket))
        for effect in effects:
            if isinstance(effect, Answer):
                self._asked[effect.request].set_result(decode_result(effect.result))
            elif isinstance(effect, Refuse):
                self._asked[effect.request].set_exception(effect.error)
            elif isinstance(effect, Swap):
                self._perform(self._replica.configured(effect.wanted, time.monotonic()))

    def _stored(self, done: asyncio.Future[None], ticket: int) -> None:
        done.result()
        self._perform(self._replica.stored(ticket, time.monotonic()))

    # Rows: a label is the producer's name of it, its shard and the hash of its bytes

    def shard_of(self, offset: int) -> tuple[int, str]:
        _, shard, digest = self.machine.state.rows[offset].split(":")
        return int(shard), digest

    async def recover(self) -> None:
        """Free the shards that no row needs, and say what there is."""
        found = set(await self.store.recover())
        done = self.machine.state.done.get(TASK, set())
        needed = {self.shard_of(offset)[0] for offset in range(len(self.machine.state.rows)) if offset not in done}
        self.store.free(found - needed)
        say("rows", self.machine.state.rows, sorted(done), sorted(needed - found))

    async def produce(self, name: str, last: int, draw: random.Random) -> None:
        for sequence in range(last + 1, 1 << 30):
            while len(self.machine.state.rows) - len(self.machine.state.done.get(TASK, ())) > AHEAD:
                await asyncio.sleep(0.001)
            rows = []
            for row in range(draw.randint(1, 3)):
                data = draw.randbytes(draw.choice(SIZES))
                column = ColumnLayout(Field("dense", "uint8", (len(data),)), 1, 1, ((0, len(data)),))
                layout = ShardLayout((("x", column),)).encode()
                shard = await self.store.put(name, data, layout, soon(), scope="", holder=name)
                rows.append((shard, f"{name}.{sequence}.{row}:{shard}:{xxhash.xxh3_64_hexdigest(data)}"))
            await self.store.persist([shard for shard, _ in rows], soon(), with_next=True)
            result = await self.request(Append(name, sequence, tuple(("", label) for _, label in rows)))
            assert isinstance(result, Appended)
            labels = [self.machine.state.rows[offset] for offset in result.offsets]
            say("appended", name, sequence, list(result.offsets), labels)
            if labels != [label for _, label in rows]:  # an earlier life's, of which the answer was lost
                self.store.free([shard for shard, _ in rows])

    async def consume(self, name: str, draw: random.Random) -> None:
        """A consumer of this life alone: what an earlier one asked last would be taken for its own."""
        for sequence in range(1, 1 << 30):
            leased = await self.request(LeaseRows(name, TASK, draw.randint(1, 8), 30.0))
            assert isinstance(leased, Leased)
            while not leased.rows:
                await asyncio.sleep(0.001)
                leased = await self.request(LeaseRows(name, TASK, draw.randint(1, 8), 30.0))
                assert isinstance(leased, Leased)
            say("leased", [offset for offset, _, _ in leased.rows])
            shards = [self.shard_of(offset) for offset, _, _ in leased.rows]
            for pinned, (number, digest) in zip(
                await self.store.pin(name, [number for number, _ in shards], soon()), shards, strict=True
            ):
                size = ShardLayout.decode(pinned.layout).columns[0][1].buffers[0][1]
                if xxhash.xxh3_64_hexdigest(self.store.arena.read(pinned.extent)[:size]) != digest:
                    say("wrong", number)
            self.store.unpin(name, [number for number, _ in shards])
            settled = tuple((offset, lease) for offset, lease, _ in leased.rows)
            await self.request(Settle(name, sequence, TASK, settled, True))
            say("acked", [offset for offset, _, _ in leased.rows])
            self.store.free([number for number, _ in shards])


async def main(path: Path, last: dict[str, int]) -> None:
    directory = DataDirectory(path)
    config = NodeConfig(memory=16 * MIB, spill=0, spill_dir=path.parent, prewarm=0)
    store = stores.Store(config, directory=directory)
    draw = random.Random()
    async with asyncio.TaskGroup() as group:
        group.create_task(store.run())
        host = Host(directory, store)
        await host.serving()
        await host.recover()
        for number in range(PRODUCERS):
            group.create_task(host.produce(f"p{number}", last.get(f"p{number}", 0), draw))
        for number in range(CONSUMERS):
            group.create_task(host.consume(f"c{directory.identity.starts}.{number}", draw))


if __name__ == "__main__":
    try:
        asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
    except* DataplaneError as errors:
        say("failed", repr(errors.exceptions))
        raise
