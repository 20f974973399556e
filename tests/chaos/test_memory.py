"""Memory that is full or asked for too much: typed errors that name the holders, never more than the budget."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dataplane as dp
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from tests.cases import each_case
from tests.chaos.raw import Raw, int64s, one_column, token
from tests.processes import MIB, StandingNode, Worker, eventually, pattern


def holder(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    views = [plane.get(ref)["x"].numpy() for ref in pipe.recv()]
    pipe.send(os.getpid())
    pipe.recv()
    del views
    pipe.send("dropped")
    pipe.recv()


def test_backpressure_with_all_memory_pinned_names_the_holders(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane, Worker(holder, node.address) as worker:
        mine = plane.put({"x": pattern(1, 6 * MIB)})
        theirs = [plane.put({"x": pattern(seed, 3 * MIB)}) for seed in (2, 3, 4)]
        view = plane.get(mine)["x"].numpy()
        pid = worker.ask(theirs)
        assert plane.stats().pinned_bytes == 15 * MIB
        with pytest.raises(dp.Backpressure) as caught:
            plane.put({"x": pattern(5, 2 * MIB)}, timeout=0.3)
        error = caught.value
        assert error.needed == 2 * MIB
        assert error.waited_s > 0
        first, second = error.holders[:2]
        assert (first["bytes"], first["how"]) == (9 * MIB, "pinned")
        assert f"(pid {pid})" in first["holder"]
        assert (second["bytes"], second["how"]) == (6 * MIB, "pinned")
        assert f"(pid {os.getpid()})" in second["holder"]
        assert first["holder"] in str(error)
        worker.ask()
        ref = plane.put({"x": pattern(5, 2 * MIB)}, timeout=60)  # one of them goes to disk
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(5, 2 * MIB))
        assert np.array_equal(view, pattern(1, 6 * MIB))


@pytest.mark.long
def test_backpressure_names_reservations_as_reserved(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        with plane.draft({"x": dp.dense((15, MIB), "uint8")}):
            with pytest.raises(dp.Backpressure) as caught:
                plane.put({"x": pattern(5, 2 * MIB)}, timeout=0.1)
            assert [h["how"] for h in caught.value.holders] == ["reserved"]
        plane.put({"x": pattern(5, 2 * MIB)}, timeout=60)


@each_case("how", ["put", "draft"])
def test_an_object_larger_than_the_budget_is_refused_at_once(tmp_path: Path, how: str) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        with pytest.raises(dp.LimitExceeded) as caught:
            if how == "put":
                plane.put({"x": pattern(1, 20 * MIB)}, timeout=600)
            else:
                plane.draft({"x": dp.dense((20, MIB), "uint8")}, timeout=600)
        assert (caught.value.what, caught.value.asked, caught.value.limit) == ("memory", 20 * MIB, 16 * MIB)
        assert plane.stats().memory_used == 0


BUDGET = 32 * MIB
PIECE = 2 * MIB
PIECES = 128


def produce(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    for seed in range(PIECES):
        pipe.send(plane.put({"x": pattern(seed, PIECE, 8)}, timeout=60))


def resident(pid: int) -> int:
    """Bytes of the process's own memory (not of what it shares)."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")}
    return (kib["RssAnon"] + kib["RssFile"]) << 10


def shared(pid: int) -> int:
    blocks = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:dataplane" in os.readlink(fd):
                segment = os.stat(fd)
                blocks[segment.st_ino] = segment.st_blocks
    return 512 * sum(blocks.values())


@pytest.mark.long
def test_node_memory_stays_bounded_with_a_slow_consumer(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory=BUDGET, spill="1GiB", spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane, Worker(produce, plane.address) as producer:
        node = plane.stats().pid
        peak = 0
        for seed in range(PIECES):
            ref = producer.hear()
            if seed == 0:  # slow: it lets the producer run into the budget before it takes the first
                eventually(lambda: plane.stats().spilled_bytes >= 2 * BUDGET, "it spills")
            batch = plane.get(ref)
            assert np.array_equal(batch["x"].numpy(), pattern(seed, PIECE, 8))
            peak = max(peak, resident(node) + shared(node))
            del batch
            plane.free(ref)
        stats = plane.stats()
        assert stats.memory_peak <= BUDGET
        assert stats.spilled_bytes >= 2 * BUDGET
        assert peak <= BUDGET + 100 * MIB
        assert shared(node) <= BUDGET
        assert psutil.Process(node).is_running()


# Appends and extends that carry their columns in one request: whoever waits, goes or lies leaves nothing.

NODE = {"spill": 0, "memory": "8MiB"}


def take(stream: Any, rows: int = 100, columns: tuple[str, ...] = ("x",)) -> list[Any]:
    with stream.consume("a", rows=rows, columns=columns, timeout=60) as delivery:
        got = delivery.get()
        return [got[name].to_list() for name in columns]


def appending(raw: Raw, to: Any, /, nbytes: int = 64, timeout_s: float = 5.0, **how: Any) -> rm.AppendRows:
    columns = rm.Inline(bytes(nbytes), one_column(1, width=nbytes, rows=1), [nbytes])
    said: dict[str, Any] = {
        "id": raw.next(),
        "stream": token(to),
        "columns": columns,
        "keys": [],
        "digest": b"",
        "groups": [],
        "versions": int64s(0),
        "tags": {},
        "begin": None,
        "lengths": {},
        "timeout_s": timeout_s,
    }
    return rm.AppendRows(**(said | how))


ROW = one_column(64, rows=1, width=64)
FALSE = {
    "bytes of no column": {"columns": rm.Inline(bytes(64), ROW, [])},
    "bytes of two columns": {"columns": rm.Inline(bytes(64), ROW, [64, 64])},
    "fewer bytes than none": {"columns": rm.Inline(bytes(64), ROW, [-1])},
    "bytes beyond all memory": {"columns": rm.Inline(bytes(64), ROW, [1 << 62])},
    "no layout": {"columns": rm.Inline(bytes(64), b"nonsense", [64])},
    "a layout of other bytes": {"columns": rm.Inline(bytes(64), one_column(1, rows=1, width=5000), [64])},
    "no rows": {"columns": rm.Inline(b"", one_column(0, rows=0), [0])},
    "too many bytes": {"columns": rm.Inline(bytes(sm.MAX_INLINE + 1), ROW, [64])},
    "a time before now": {"timeout_s": -1.0},
}


@each_case("false", FALSE)
def test_an_invalid_inline_append_is_refused_and_leaves_nothing(node: StandingNode, false: str) -> None:
    with dp.connect(node.address) as plane, Raw(node.address) as raw:
        stream = plane.stream("s", ["a"], max_rows=1)
        request = appending(raw, stream, **FALSE[false])
        raw.send(request)
        reply = raw.hear()
        while reply.id != request.id:
            reply = raw.hear()
        assert isinstance(reply, m.Failure)
        with Raw(node.address) as another:
            assert isinstance(another.ask(appending(another, stream)), rm.RowsAppended)  # the place is free
        assert plane.stats().shards == 1
        assert len(take(stream)[0]) == 1
        eventually(lambda: plane.stats().memory_used == 0, "nothing else was kept")


# A limit of 256 descriptors: views do not take any, and running out of them is not the node's end.

LIMIT = 256
VIEWS = 1000


def limited_reader(pipe: Any, address: str) -> None:
    import torch

    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    plane = dp.connect(address)
    refs = [plane.put({"x": pattern(seed, 32 << 10, 4).view(np.int64)}) for seed in range(VIEWS // 4)]
    views: list[Any] = []
    for ref in refs:
        batch = plane.get(ref)
        views += [batch["x"].numpy(), batch["x"].torch(), batch["x"].arrow(), plane.get(ref[1:3])["x"].torch()]
    for seed, view in enumerate(views[1::4]):
        view[0, 0] = -seed
    assert torch.equal(views[3], torch.from_numpy(pattern(0, 32 << 10, 4).view(np.int64)[1:3]))
    used = len(os.listdir("/proc/self/fd"))
    plane.close()
    right = all(np.array_equal(view, pattern(seed, 32 << 10, 4)) for seed, view in enumerate(views[::4]))
    pipe.send((len(views), used, right))
    pipe.recv()
    views.clear()
    batch = view = None
    pipe.send("dropped")
    pipe.recv()


@pytest.mark.long
def test_a_thousand_live_views_need_fewer_than_256_descriptors(tmp_path: Path) -> None:
    with (
        StandingNode(tmp_path, memory="32MiB") as node,
        Worker(limited_reader, node.address) as worker,
        dp.connect(node.address) as plane,
    ):
        views, used, right = worker.hear(60)
        assert views == VIEWS
        assert right
        assert used < 64
        assert plane.stats().pinned_bytes >= VIEWS // 4 * (32 << 10)
        worker.ask()
        eventually(lambda: plane.stats().pinned_bytes == 0, "all pins dropped")
