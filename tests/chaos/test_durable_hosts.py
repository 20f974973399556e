"""Durable streams over three hosts, all of whose processes are killed at once, etcd's too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.etcd import EtcdServer, needs_etcd
from tests.processes import Command, eventually

pytestmark = needs_etcd


NODES = 3
SLOW_S = 60.0


def started(path: Path, number: int, join: str) -> Command:
    command = ["node", "--memory", "32MiB", "--spill", "0", "--prewarm", "0"]
    command += ["--socket", str(path / f"s{number}"), "--listen", "tcp://127.0.0.1:0", "--join", join]
    command += ["--data-dir", str(path / f"data{number}")]
    return Command(*command, log=path / f"log{number}")


@contextmanager
def hosts(
    path: Path, etcd: EtcdServer, count: int = NODES, processes: list[Command] | None = None
) -> Iterator[list[dp.Plane]]:
    """All of them, until all are killed at once. `processes`: where they are added."""
    processes = [] if processes is None else processes
    try:
        processes += [started(path, number, f"etcd://{etcd.address}/durable") for number in range(count)]
        with ExitStack() as stack:
            planes = []
            for number, process in enumerate(processes):
                assert process.stdout.readline(), (path / f"log{number}").read_text()
                planes.append(dp.connect(f"unix://{path / f's{number}'}"))
                stack.callback(planes[-1].close)
            eventually(lambda: all(len(plane.members()["members"]) == count for plane in planes), "they meet", SLOW_S)
            yield planes
            for process in processes:
                process.kill()
    finally:
        for process in processes:
            process.kill()
            with process:
                pass


@contextmanager
def restarted(
    path: Path, etcd: EtcdServer, processes: list[Command], planes: list[dp.Plane]
) -> Iterator[list[dp.Plane]]:
    """Planes of all nodes after the last one was killed and started again on its data directory."""
    last = len(planes) - 1
    with processes[last] as killed:
        killed.kill()
    eventually(lambda: len(planes[0].members()["members"]) == last, "the others notice", SLOW_S)
    processes[last] = started(path, last, f"etcd://{etcd.address}/durable")
    assert processes[last].stdout.readline()
    with dp.connect(f"unix://{path / f's{last}'}") as again:
        found = [*planes[:last], again]
        eventually(lambda: all(len(each.members()["members"]) == last + 1 for each in found), "it is back", SLOW_S)
        yield found


def opened(plane: dp.Plane) -> dp.Stream:
    return plane.stream("rows", ["train"], durable=True)


def take(stream: dp.Stream, most: int) -> dict[str, bytes]:
    delivery = stream.consume("train", rows=most, columns=["x"], min_rows=1, timeout=SLOW_S)
    found = dict(zip(delivery.keys, (bytes(row) for row in delivery.get()["x"]), strict=True))
    delivery.ack()
    return found


@pytest.mark.long
def test_durable_rows_survive_a_kill_of_all_processes(tmp_path: Path) -> None:
    put: dict[str, bytes] = {}
    acked: dict[str, bytes] = {}
    with EtcdServer(tmp_path) as etcd:
        for life in range(3):
            with hosts(tmp_path, etcd) as planes:
                streams = [opened(plane) for plane in planes]
                for number, stream in enumerate(streams):
                    for at in range(4):
                        rows = {f"{life}.{number}.{at}.{n}": bytes([life, number, at, n]) * 20_000 for n in range(3)}
                        stream.append({"x": list(rows.values())}, keys=list(rows), timeout=SLOW_S)
                        put |= rows
                for _ in range(3):
                    taken = take(streams[life], 4)
                    assert not acked.keys() & taken.keys(), "a row came again after its ack"
                    acked |= taken
            etcd.stop()
            etcd.start()
        with hosts(tmp_path, etcd) as planes:
            stream = opened(planes[0])
            stream.close()
            drain(stream, acked)
            assert acked == put
            assert stream.lost() == []


@pytest.mark.long
def test_a_killed_durable_node_returns_with_all_its_rows(tmp_path: Path) -> None:
    processes: list[Command] = []
    with EtcdServer(tmp_path) as etcd, hosts(tmp_path, etcd, processes=processes) as planes:
        streams = [opened(plane) for plane in planes]
        put: dict[str, bytes] = {}
        for number, stream in enumerate(streams):
            rows = {f"{number}.{at}": bytes([number, at]) * 20_000 for at in range(8)}
            stream.append({"x": list(rows.values())}, keys=list(rows), timeout=SLOW_S)
            put |= rows
        processes[2].kill()
        eventually(lambda: len(planes[0].members()["members"]) == NODES - 1, "the others notice", SLOW_S)
        streams[0].append({"x": [b"meanwhile"]}, keys=["meanwhile"], timeout=SLOW_S)
        with started(tmp_path, 2, f"etcd://{etcd.address}/durable") as process:
            try:
                eventually(lambda: len(planes[0].members()["members"]) == NODES, "it is back", SLOW_S)
                streams[0].close()
                found: dict[str, bytes] = {}
                drain(streams[0], found)
                assert found == {**put, "meanwhile": b"meanwhile"}
                assert streams[0].lost() == []
            finally:
                process.kill()


def test_replicated_durable_rows_survive_the_loss_of_a_data_directory(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd:
        put: dict[str, bytes] = {}
        with hosts(tmp_path, etcd, 2) as planes:
            for number, plane in enumerate(planes):
                stream = plane.stream("rows", ["train"], durable=True, replicas=2)
                for at in range(4):
                    rows = {f"{number}.{at}.{n}": bytes([number, at, n]) * 20_000 for n in range(3)}
                    stream.append({"x": list(rows.values())}, keys=list(rows), timeout=SLOW_S)
                    put |= rows
            acked = take(stream, 4)
        shutil.rmtree(tmp_path / "data0")
        with hosts(tmp_path, etcd, 2) as planes:
            stream = planes[1].stream("rows")
            found = acked
            stream.close()
            drain(stream, found)
            assert found == put
            assert stream.lost() == []
            stream.drop()
            eventually(lambda: planes[1].stats().shards == 0, "nothing is left of them", SLOW_S)


def test_a_restarted_owner_frees_replicas_of_columns_that_no_row_took(tmp_path: Path) -> None:
    processes: list[Command] = []
    with EtcdServer(tmp_path) as etcd, hosts(tmp_path, etcd, 2, processes) as planes:
        stream = planes[1].stream("rows", ["train"], durable=True, replicas=2)
        ref = planes[1].put({"x": [b"x" * 20_000] * 4, "y": [b"y" * 20_000] * 4}, replicas=2)
        stream.append(ref.select("x"), timeout=SLOW_S)
        with restarted(tmp_path, etcd, processes, planes) as both:
            again = both[1]
            assert len(take(again.stream("rows"), 4)) == 4
            eventually(lambda: not any(each.stats().shards - each.stats().copies for each in both), "all is freed")


def test_replicas_outlive_the_restart_of_their_owner_on_its_data_directory(tmp_path: Path) -> None:
    processes: list[Command] = []
    with EtcdServer(tmp_path) as etcd, hosts(tmp_path, etcd, processes=processes) as planes:
        sizes = (100, 20_000, 400_000)
        refs = [planes[2].put({"x": [bytes([at]) * size], "y": [size]}, replicas=2) for at, size in enumerate(sizes)]
        stream = planes[2].stream("rows", ["train"], replicas=2)
        rows = {str(at): bytes([at]) * 20_000 for at in range(4)}
        for key, row in rows.items():
            stream.append({"x": [row]}, keys=[key], timeout=SLOW_S)
        with restarted(tmp_path, etcd, processes, planes) as readers:
            for plane in readers:
                for at, ref in enumerate(refs):
                    assert bytes(plane.get(ref.select("x"))["x"][0]) == bytes([at]) * sizes[at]
            found: dict[str, bytes] = {}
            while len(found) < len(rows):
                found |= take(readers[-1].stream("rows"), 4)
            assert found == rows
            for plane, ref in zip(readers, refs, strict=True):
                plane.free(ref)
            eventually(lambda: not any(each.stats().shards - each.stats().copies for each in readers), "all is freed")


def test_replicas_of_lost_columns_stay_while_rows_of_a_table_share_them(tmp_path: Path) -> None:
    """The restarted owner does not know what rows of tables need."""
    processes: list[Command] = []
    with EtcdServer(tmp_path) as etcd, hosts(tmp_path, etcd, 2, processes) as planes:
        ref = planes[1].put({"x": [b"x" * 20_000] * 2}, replicas=2)
        led = planes[0].table("rows")
        led.upsert(["there"], {"y": [1]})
        for keys in (["a", "b"], ["c", "d"]):
            planes[1].table("rows").upsert(keys, ref)
        with restarted(tmp_path, etcd, processes, planes) as both:
            again = both[1]
            assert bytes(again.get(led.read(["c"], ["x"]))["x"][0]) == b"x" * 20_000
            again.table("rows").upsert(["later"], {"x": [b"y" * 20_000]})
            led.clear(["a", "b"])
            led.clear(["later"])
            eventually(lambda: again.stats().shards == again.stats().copies, "both are released, in this order")
            for plane in both:
                assert bytes(plane.get(led.read(["c"], ["x"]))["x"][0]) == b"x" * 20_000
            again.free(ref)
            eventually(lambda: planes[0].stats().shards - planes[0].stats().copies <= 1, "only `y` is left")


@pytest.mark.long
def test_durable_nodes_refuse_an_emptied_coordinator_and_accept_the_restored_one(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd:
        with hosts(tmp_path, etcd) as planes:
            rows = {str(number): bytes([number]) * 20_000 for number in range(12)}
            opened(planes[0]).append({"x": list(rows.values())}, keys=list(rows), timeout=SLOW_S)
            acked = take(opened(planes[1]), 5)
            eventually(lambda: followed(planes), "each partition is on two nodes", SLOW_S)
        etcd.stop()
        with etcd.emptied():
            etcd.start()
            for number in range(NODES):
                with started(tmp_path, number, f"etcd://{etcd.address}/durable") as node:
                    assert node.wait(SLOW_S) != 0
                assert "Restore etcd's data" in (tmp_path / f"log{number}").read_text()
            etcd.stop()
        etcd.start()
        with hosts(tmp_path, etcd) as planes:
            stream = planes[2].stream("rows")
            stream.close()
            drain(stream, acked)
            assert acked == rows
            assert stream.lost() == []


def drain(stream: Any, acked: dict[str, bytes]) -> None:
    """Take and ack what is left of a stream that is closed."""
    with suppress(dp.Closed):
        while True:
            taken = take(stream, 64)
            assert not acked.keys() & taken.keys(), "a row came again after its ack"
            acked |= taken


def followed(planes: list[dp.Plane]) -> bool:
    """Whether each partition that is led has a follower."""
    nodes = [node for plane in planes for node in plane.members()["members"].values()]
    led, follows = ({name for node in nodes for name in node[what]} for what in ("leads", "follows"))
    return led <= follows
