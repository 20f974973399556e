"""Partitions over real processes on hosts of their own: one is stopped, one is cut off, one is killed, and the
coordinator goes away, under load. Rows are appended and acked by all the time; nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bench.namespaces import enter
from dataplane.errors import DataplaneError, OutcomeUnknown, Retryable
from dataplane.node.partitions.replicas import SETTINGS
from dataplane.wire import auth
from tests.chaos.served import Client, Server
from tests.netns import ip, mute, needs_namespaces, switched
from tests.processes import Worker, eventually
from tests.unit.node.partitions.bench import Bench
from tests.unit.node.partitions.machine import Machine

pytestmark = needs_namespaces

S, TASK = "rollouts", "train"
_numbers = itertools.count(1)


class Host(Worker):
    """A namespace with a node in it, which produces and consumes."""

    def __init__(self, name: str, namespace: str, address: str, coordinator: Path, key: Path) -> None:
        self.name, self.namespace, self.address = name, namespace, address
        super().__init__(_host, name, namespace, f"tcp://{address}:7000", coordinator, key)

    def link(self, state: str) -> None:
        ip("-n", self.namespace, "link", "set", self.namespace, state)


def _host(pipe: Connection, name: str, namespace: str, listen: str, coordinator: Path, key: Path) -> None:
    enter(namespace)
    asyncio.run(_work(pipe, name, listen, coordinator, key))


async def _work(pipe: Connection, name: str, listen: str, coordinator: Path, key: Path) -> None:
    """Append and ack until told to end; say what was answered."""
    bench = Bench(name, Client(coordinator, name), settings=SETTINGS, key=auth.load(key), listen=listen, lease_s=3.0)
    await bench.join()
    while True:
        try:
            await bench.directory.open(S, b"settings")
            table, own = await bench.directory.own(S)
            break
        except Retryable:
            await asyncio.sleep(0.1)
    mine = table.key(own)
    appended: list[str] = []
    acked: list[str] = []
    unknown: list[str] = []
    slow = {"append": 0.0}
    producing = asyncio.Event()
    producing.set()
    ended = asyncio.Event()

    async def produce() -> None:
        number = 0
        while producing.is_set():
            number += 1
            label = f"{name}-{number}"
            began = time.monotonic()
            sequence = number
            while True:  # the same until it is known
                try:
                    await bench.append(mine, label, sequence=sequence, timeout_s=20)
                    break
                except OutcomeUnknown:
                    unknown.append(label)
                except Retryable:
                    await asyncio.sleep(0.05)
            slow["append"] = max(slow["append"], time.monotonic() - began)
            appended.append(label)
            await asyncio.sleep(0.01)

    async def consume() -> None:
        while not ended.is_set():
            partition, leased = await bench.lease(table, TASK, 16, timeout_s=0.5, lease_s=4.0)
            if not leased.rows:
                continue
            labels = [row[2] for row in leased.rows]
            try:
                await bench.ack(partition, TASK, leased)
            except OutcomeUnknown:
                unknown.extend(labels)
            except DataplaneError:  # the lease is over: others are given them
                continue
            acked.extend(labels)

    tasks = [asyncio.create_task(produce()), asyncio.create_task(consume())]
    pipe.send("ready")
    while not ended.is_set():
        said = await asyncio.to_thread(pipe.recv)
        for task in tasks:
            if task.done() and task.exception():
                raise AssertionError("work failed") from task.exception()
        if said == "quiet":
            producing.clear()
            await tasks[0]
            pipe.send(len(appended))
        elif said == "figures":
            led = {h.partition: len(h.configuration.followers) for h in bench.replicas if bench.at(h.partition)}
            machines = [h.machine for h in bench.replicas if bench.at(h.partition)]
            left = sum(len(m.state.rows) - len(m.state.done.get(TASK, ())) for m in machines if isinstance(m, Machine))
            pipe.send((len(appended), len(acked), dict(slow), led, len(bench.members.current), left))
            slow.update(append=0.0)
        elif said == "appended":
            pipe.send(appended)
        elif said == "told":
            ended.set()
            await tasks[1]
            machines = [h.machine for h in bench.replicas if bench.at(h.partition)]
            kept = [(m.state.rows, m.state.done.get(TASK, set())) for m in machines if isinstance(m, Machine)]
            rows = [(label, offset in done) for labels, done in kept for offset, label in enumerate(labels)]
            pipe.send((appended, acked, unknown, rows))
    await asyncio.to_thread(pipe.recv)  # who leaves passes on what it leads, and others would tell of it again
    with suppress(TimeoutError):
        await bench.leave(2.0)
    await bench.aclose()


@contextmanager
def hosts(count: int, directory: Path) -> Iterator[tuple[list[Host], Server]]:
    """So many hosts on one switch, and a coordinator that all reach."""
    key = directory / "key"
    auth.generate(key)
    number = next(_numbers)
    names = [f"dq{os.getpid() % 100000}x{number}{letter}" for letter in "abcdefgh"[:count]]
    bridge, net = f"{names[0]}s", f"10.{48 + number % 20}.{os.getpid() % 250}"
    with ExitStack() as undo:
        undo.enter_context(switched(bridge, names, net))
        server = undo.enter_context(Server(directory / "coordinator.sock"))
        made = [
            undo.enter_context(Host(f"n{i}", name, f"{net}.{i + 1}", server.path, key)) for i, name in enumerate(names)
        ]
        for host in made:
            assert host.hear() == "ready"
        yield made, server


def figures(host: Host) -> Any:
    return host.ask("figures")


def led(made: list[Host]) -> dict[str, int]:
    """The partitions that are led on these hosts, and how many followers each has. There may be more than hosts: when
    all that are open were closed, because their nodes were away, another is opened."""
    return {partition: followers for host in made for partition, followers in figures(host)[3].items()}


def followed(made: list[Host], partitions: set[str]) -> None:
    """Wait until each of the partitions has a leader and a follower, and forget how long appends took until then."""
    eventually(lambda: (now := led(made)).keys() >= partitions and {*now.values()} == {1}, "all are followed")
    rows = [figures(host)[0] for host in made]
    eventually(lambda: all(figures(h)[0] > n for h, n in zip(made, rows, strict=True)), "all go on")
    for host in made:
        figures(host)


def taken_over(others: list[Host], partitions: set[str]) -> list[Any]:
    """Wait until these hosts lead all of the partitions, and all append again; what they say then."""
    slowest = dict.fromkeys(others, 0.0)
    appended = dict.fromkeys(others, 0)

    def look() -> list[Any]:
        now = [figures(host) for host in others]
        for host, each in zip(others, now, strict=True):  # it forgets how long appends took
            each[2]["append"] = slowest[host] = max(slowest[host], each[2]["append"])
        return now

    def leading() -> bool:
        now = look()
        appended.update({host: each[0] for host, each in zip(others, now, strict=True)})
        return {partition for each in now for partition in each[3]} >= partitions

    def going_on() -> list[Any] | None:
        now = look()
        return now if all(each[0] > appended[host] for host, each in zip(others, now, strict=True)) else None

    eventually(leading, "others lead")
    return eventually(going_on, "others go on")


@pytest.mark.long
def test_partitions_survive_stops_cuts_kills_and_no_coordinator(tmp_path: Path) -> None:
    with hosts(3, tmp_path) as (made, server):
        a, b, c = made
        eventually(lambda: all(figures(host)[4] == 3 and figures(host)[1] > 20 for host in made), "rows flow")
        partitions = {*eventually(lambda: len(now := led(made)) == 3 and now, "each leads its partition")}
        followed(made, partitions)
        before = [figures(host)[3].keys() for host in made]

        server.away = True  # nothing is asked of it on the path of rows
        time.sleep(1.5)
        away = [figures(host) for host in made]
        server.away = False
        assert [each[3].keys() for each in away] == before, "nobody fails over"
        assert max(each[2]["append"] for each in away) < SETTINGS.lease_s

        b.freeze()
        stopped = taken_over([a, c], partitions)
        b.thaw()
        followed(made, partitions)

        server.cut.add(c.name)
        c.link("down")
        cut = taken_over([a, b], partitions)
        c.link("up")
        server.cut.clear()
        followed(made, partitions)

        leader = max((a, b, c), key=lambda host: len(figures(host)[3]))
        others = [host for host in made if host is not leader]
        answered = leader.ask("appended")
        leader.kill()
        killed = taken_over(others, partitions)
        for name, found in (("away", away), ("stopped", stopped), ("cut", cut), ("killed", killed)):
            print(name, [(each[2], each[3]) for each in found])  # noqa: T201

        for host in others:
            host.say("quiet")
        for host in others:
            host.hear()
        eventually(lambda: not sum(figures(host)[5] for host in others), "all rows are acked")
        told = [host.ask("told") for host in others]
        for host in others:
            host.say("end")
    acked = Counter(label for each in told for label in each[1])
    assert not [label for label, count in acked.items() if count > 1], "none is acked twice"
    rows = [label for each in told for label, _ in each[3]]
    assert not [label for label, count in Counter(rows).items() if count > 1], "none is there twice"
    assert not {label for each in told for label in each[0]} - {*rows}, "what was answered is there"
    assert not {*answered} - {*rows}, "of the one that was killed too"
    assert all(done for each in told for _, done in each[3]), "all are acked"


@pytest.mark.long
def test_a_leader_that_hears_nobody_is_replaced_though_it_is_heard(tmp_path: Path) -> None:
    """It can not drop its followers, since it does not reach the coordinator either; nor may it keep them waiting."""
    with hosts(3, tmp_path) as (made, server):
        a, b, c = made
        partitions = {*eventually(lambda: len(now := led(made)) == 3 and now, "each leads its partition")}
        followed(made, partitions)
        server.cut.add(c.name)
        for host in (a, b):
            mute(host.namespace, c.address)
        taken_over([a, b], partitions)
        for host in (a, b):
            mute(host.namespace, c.address, how="del")
        server.cut.clear()
        followed(made, partitions)
        for host in made:
            host.say("quiet")
        rows = sum(host.hear() for host in made)
        eventually(lambda: not sum(figures(host)[5] for host in made), "all rows are acked")
        told = [host.ask("told") for host in made]
        for host in made:
            host.say("end")
    there = [label for each in told for label, _ in each[3]]
    assert len(there) == len({*there}) == rows, "each once"
