"""One run of a plan, from nothing to the end of its faults and the quiet after it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from dataplane.replication.configuration import Configuration
from tests.simulation import faults
from tests.simulation.census import Census
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.faults import Plan
from tests.simulation.run import DRIFT, SETTINGS, Going, Outcome, lack, outcome
from tests.simulation.stream.checker import Checker
from tests.simulation.stream.clients import Call, Client, Consumer, Gatherer, Janitor, Mourner, Producer
from tests.simulation.stream.columns import Columns
from tests.simulation.stream.machine import TASKS
from tests.simulation.stream.machine import settings as stream_settings
from tests.simulation.stream.node import Node
from tests.simulation.world import CLIENTS, World

LENGTH = 0.6
"""Of a run's time, to that of one with the toy: as many faults in less."""
SEVERAL_STREAMS, THREE_STREAMS = 0.2, 0.05
"""Of runs, as many have more than one, and three."""
LIMITED = 0.3
"""Of streams, as many have a limit."""
TOGETHER = 0.25
"""Of runs, as many have appends that come together."""


class Partition:
    """That of one stream: its replicas, and who uses it. Those of several streams share nodes and columns."""

    def __init__(self, number: int, run: Run, rng: Random, rates: Sequence[float]) -> None:
        plan, world = run.plan, run.world
        self.number = number
        self._world = world
        max_rows = rng.randint(8, 20) if rng.random() < LIMITED else 0
        self.checker = Checker(world, number, max_rows, run.stored)
        settings = msgspec.structs.replace(SETTINGS, durable=plan.durable, max_bytes=plan.max_bytes)
        first = Configuration(1, (f"n{number}", 0 if plan.durable else 1))
        self.checker.configurations.append(first)
        self.coordinator = SimulatedCoordinator(world, first, self.checker.configurations.append)
        self.census = Census(self.coordinator, plan.durable)
        peers: dict[str, Node] = {}
        stream = stream_settings(max_rows)
        self.nodes = [
            Node(
                node,
                world,
                self.coordinator,
                self.checker,
                self.census,
                settings,
                plan.followers,
                rates[node],
                peers,
                partition=number,
                stream=stream,
            )
            for node in range(plan.nodes)
        ]
        for each in self.nodes:
            each.told_s = plan.told_s
            each.columns = run.stored
        self.columns = run.stored
        run.stored.freeing[number] = self.checker.freeing
        self.census.nodes.extend(self.nodes)
        peers.update((node.name, node) for node in self.nodes)
        count, both = plan.nodes, run.partitions_wanted == 1
        self.producers = [
            Producer(world, f"p{i}", count, self.ask, run.stored, number) for i in ((0, 1) if both else (number,))
        ]
        self.consumers = [
            Consumer(world, f"c{i}", count, self.ask, run.stored, number, task=TASKS[i % len(TASKS)])
            for i in range(2 + both)
        ]
        self.gatherers: list[Client] = []
        if Random(f"together {plan.seed}").random() < TOGETHER:
            self.gatherers.append(Gatherer(world, "g", count, self.ask, run.stored, number))
        self.janitor = Janitor(world, "janitor", count, self.ask, self.checker)
        self.janitor.closes = rng.random() < 0.5
        self.mourner = Mourner(world, "mourner", count, self.ask)

        self.bringers: list[Client] = []

    @property
    def clients(self) -> list[Any]:
        return [*self.producers, *self.gatherers, *self.consumers, self.janitor, *self.bringers]

    def ask(self, node: int, call: Call) -> None:
        self._world.send(CLIENTS, node, self.nodes[node].request, call)

    def settled(self, plan: Plan) -> bool:
        quiet = not any(each.calls for each in (*self.producers, *self.gatherers)) and not self.mourner.calls
        return (
            not lack(plan, self.coordinator)
            and quiet
            and self.checker.drained()
            and not self.columns.needed(self.number)
        )

    def waiting(self) -> str:
        calls = [client.name for client in (*self.producers, *self.gatherers, self.mourner) if client.calls]
        needed = self.columns.needed(self.number)
        return f"{calls} wait, {self.checker.missing()}, {needed} are kept, {self.coordinator.configuration} leads"

    def finish(self) -> None:
        """Every in-sync replica has the same state after the same commands, and what was answered is in it."""
        members = self.census.members()
        self.checker.agree((node.name, node.machine.count, node.machine.snapshot()) for node in members)
        self.checker.final()


class Run(Going):
    """The parts of a run, for `run` and for who looks into one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        rng, drawn = Random(f"run {plan.seed}"), Random(f"stream {plan.seed}")
        rates = [rng.choice((1 - DRIFT, 1.0, 1 + DRIFT, rng.uniform(1 - DRIFT, 1 + DRIFT))) for _ in range(plan.nodes)]
        self.partitions_wanted = _several(drawn)
        holders: list[Node] = []
        self.stored = Columns(holders, durable=plan.durable)
        self._partitions = [Partition(n, self, drawn, rates) for n in range(self.partitions_wanted)]
        holders.extend(self.partitions[0].nodes)
        for node in holders:
            node.stored = self.stored
        self.stored.died = self._died

    @property
    def partitions(self) -> list[Partition]:
        return self._partitions

    @property
    def clients(self) -> list[Any]:
        return [client for partition in self.partitions for client in partition.clients]

    @property
    def checker(self) -> Checker:  # type: ignore[override]
        """That of the first partition."""
        return self.partitions[0].checker

    def _died(self, life: bytes) -> None:
        for partition in self.partitions:
            self.world.after(self.world.rng.uniform(0.1, 0.6), partition.mourner.tell, life)

    def settled(self) -> bool:
        return all(partition.settled(self.plan) for partition in self.partitions)

    def waiting(self) -> str:
        return f"{[partition.waiting() for partition in self.partitions]}"

    def finish(self) -> None:
        for partition in self.partitions:
            partition.finish()


def _several(drawn: Random) -> int:
    chance = drawn.random()
    return 3 if chance < THREE_STREAMS else 2 if chance < SEVERAL_STREAMS else 1


def streams(seed: int) -> int:
    return _several(Random(f"stream {seed}"))


def plan(seed: int) -> Plan:
    return faults.plan(seed, LENGTH)


def run(given: Plan) -> Outcome:
    return outcome(Run(given))


def run_seed(seed: int) -> Outcome:
    return run(plan(seed))
