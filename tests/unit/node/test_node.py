"""A node's place on its host: where it listens, what it removes, what it leaves."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.config import NodeConfig
from dataplane.errors import LimitExceeded
from dataplane.node import memory_trim, telemetry
from dataplane.node.local.streams import LocalStream, LocalStreams
from dataplane.node.memory_trim import MemoryTrim
from dataplane.node.node import NodeServer
from dataplane.node.requests.row_requests import PendingShards
from dataplane.node.requests.waiting_bytes import WaitingBytes, footprint
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings
from dataplane.table import requests as t
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.boundary import encoded
from dataplane.wire.client_messages import AnyRequest, decoder
from tests.cases import each_case
from tests.processes import StandingNode, Worker


def config(directory: Path) -> NodeConfig:
    return NodeConfig(memory="1MiB", spill="1MiB", spill_dir=directory / "spill", prewarm=0)


async def once(node: NodeServer) -> str:
    """Serve, and stop at once."""
    stop = asyncio.Event()
    await node.serve(stop, ready=stop.set)
    return node.address


def test_a_node_leaves_no_files_when_one_of_its_parts_fails_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    node = NodeServer(config(tmp_path))
    monkeypatch.setattr(node._tables, "close", _refuse)
    with pytest.raises(OSError, match="refused"):
        asyncio.run(once(node))
    assert list(tmp_path.rglob("*")) == []


async def test_a_node_does_not_replace_a_running_node_at_its_address(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as living:
        with pytest.raises(FileExistsError, match="a node listens at"):
            NodeServer(NodeConfig(memory="1MiB", spill=0, prewarm=0), tmp_path / "node.sock")
        with dp.connect(living.address) as plane:
            assert plane.stats().pid == living.pid


async def test_a_node_does_not_replace_a_node_that_accepts_no_connection(tmp_path: Path) -> None:
    """Whoever connects to it would wait for ever."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
        stopped.bind(str(path))
        stopped.listen(0)
        waiting.connect(str(path))
        with pytest.raises(FileExistsError, match="accepts no connection"):
            NodeServer(NodeConfig(memory="1MiB", spill=0, prewarm=0), path)
    assert path.is_socket()


def come_and_go(pipe: Any, directory: Path, rounds: int) -> None:
    os.environ["XDG_RUNTIME_DIR"] = str(directory)
    for _ in range(rounds):
        asyncio.run(once(NodeServer(config(directory))))
    pipe.send("done")


def test_nodes_start_and_stop_concurrently_in_one_directory(tmp_path: Path) -> None:
    """Each sweeps what the dead have left, and the directory they share goes and comes back with them."""
    workers = [Worker(come_and_go, tmp_path, 60) for _ in range(4)]
    try:
        assert [worker.hear(60) for worker in workers] == ["done"] * 4
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)
    left = [path.name for path in tmp_path.rglob("*")]
    assert left in ([], ["spill"]), "the directory stays where another was in it when the one that made it ended"


@each_case("fails", ["listen", "store"])
def test_a_node_that_fails_to_start_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    if fails == "listen":
        monkeypatch.setattr(socket.socket, "bind", _refuse)
    else:
        monkeypatch.setattr("dataplane.store.store.Disk", _refuse)
    with pytest.raises(OSError, match="refused"):
        NodeServer(config(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("run", "spill")]


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOMEM, "refused")


# Memory is given back to the host together, and seldom.


async def test_memory_freed_together_is_trimmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trim, "_SOON_S", 0.01)
    cooled = asyncio.Event()
    trim = MemoryTrim(cooled.set)
    trim.freed((8 << 20) - 1)
    assert trim._timer is None
    for _ in range(100):
        trim.due()
    trim.freed(1)
    async with asyncio.timeout(60):
        await cooled.wait()
    assert trim.count == 1
    trim.freed(8 << 20)
    assert trim._timer is not None
    assert trim._timer.when() >= asyncio.get_running_loop().time() + 5, "trims are ten seconds apart"
    trim.close()


# What is about to be handed over is freed when who hands it goes, and only then.


def test_pending_shards_are_freed_once_when_their_client_leaves() -> None:
    freed: list[int] = []
    handing = PendingShards(freed.extend)
    handing.begin(1, [5, 6])
    handing.begin(2, [7])
    handing.begin(3, [])
    handing.begin(4, [8])
    handing.end(2)
    handing.end(9)
    assert len(handing) == 3
    handing.leave()
    assert freed == [5, 6, 8]
    handing.leave()
    assert (freed, len(handing)) == ([5, 6, 8], 0)


# What requests that wait keep: how much that is, and that clients share a bound.

REQUESTS: dict[str, Callable[[], Any]] = {
    "a payload": lambda: sm.PutShard(1, bytes(1 << 20), b"", "", 1.0),
    "numbers": lambda: sm.PinShards(1, list(range(1000, 101_000)), 1.0),
    "large numbers": lambda: sm.PinShards(1, [(1 << 62) + i for i in range(100_000)], 1.0),
    "short names": lambda: rm.AskTable(1, "t", b"", t.FindReady(columns=[f"{i:05d}" for i in range(50_000)]), 1.0),
    "shards of others": lambda: sm.Prefetch(1, [], [(b"12345678", 300 + i, []) for i in range(50_000)], 1.0),
    "empty lists": lambda: sm.Prefetch(1, [], [(b"", 1, [([], (0, 1, b""))]) for _ in range(30_000)], 1.0),
    "numbers of rows": lambda: rm.AskTable(1, "t", b"", t.ClearRows(rows=np.arange(100_000)), 1.0),
    "tags": lambda: rm.AskTable(1, "t", b"", t.Upsert(tags=[{"a": i, f"b{i}": "x"} for i in range(20_000)])),
}


@each_case("what", REQUESTS)
def test_the_estimated_footprint_of_a_request_is_close_to_its_memory(what: str) -> None:
    """As it is decoded: too little would let clients use more than they may, too much would refuse them for nothing."""
    body = bytes(encoded(REQUESTS[what]()))
    requests = decoder(AnyRequest)
    gc.collect()
    tracemalloc.start()
    try:
        request = requests.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 1.6 < footprint(request, 1 << 40) < 3 * taken


def test_clients_share_a_bound_and_each_has_a_guaranteed_share() -> None:
    waits = WaitingBytes(bound=1000, share=100)
    greedy, modest = waits.client(), waits.client()
    greedy.take(1000)
    with pytest.raises(LimitExceeded) as caught:
        greedy.take(1)
    assert (caught.value.asked, caught.value.limit) == (1001, 1000)
    modest.take(100)
    with pytest.raises(LimitExceeded):
        modest.take(1)
    assert (greedy.nbytes, modest.nbytes, waits.nbytes) == (1000, 100, 1100)
    greedy.give_back(500)
    modest.take(300)
    for client in (greedy, modest):
        client.give_back(client.nbytes)
    assert waits.nbytes == 0


# Streams of one node.


class Needed:
    """Shards that rows need, of which this test looks at none."""

    def released(self, batches: Any, stream: str) -> None:
        pass


async def test_a_failing_waiter_does_not_fail_the_request_that_wakes_it() -> None:
    needed: Any = Needed()
    stream = LocalStream("s", StreamSettings(("a",)), "m", needed, lambda: 0.0)
    outcomes: list[Any] = []
    nothing: Any = object()  # no request that there is
    stream.wait(nothing, "q", outcomes.append, 60.0)
    (error,) = outcomes
    assert isinstance(error, KeyError)
    waits = r.Consume(client="c", task="a", columns=("x",), rows=1)
    stream.wait(waits, "r", outcomes.append, 60.0)
    stream.wait(nothing, "q", outcomes.append, 60.0)
    ref = ref_to(b"the-node", 1, [("x", Field("dense", "int64", ()), 8, 1, 0)])
    stream.run(r.Append(client="c", ref=ref, versions=np.zeros(1, np.int64)))
    assert [type(each) for each in outcomes] == [KeyError, KeyError, r.Delivered]
    stream.end()


async def test_a_stream_that_is_dropped_while_statistics_are_taken_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "_SLICE", 1)
    needed: Any = Needed()
    streams = LocalStreams(needed, lambda: 0.0)
    observing = telemetry.Telemetry(streams, dict, records=False)
    opened = [await streams.open(name, StreamSettings(("a",))) for name in "st"]
    ref = ref_to(b"the-node", 2, [("x", Field("dense", "int64", ()), 16, 1, 0)])
    for stream in opened:
        stream.run(r.Append(client="c", ref=ref, versions=np.zeros(2, np.int64)))
    taking = asyncio.create_task(observing.snapshot())
    await asyncio.sleep(0)
    await streams.drop(opened[0])
    assert (await taking)["appended"] == 4
    assert (await observing.snapshot())["appended"] == 4
    await streams.drop(opened[1])
    await observing.aclose()
