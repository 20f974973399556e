"""One run of a plan with a table's partition, from nothing to the end of its faults and the quiet after it."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from dataplane.replication.configuration import Configuration
from tests.simulation import faults
from tests.simulation.census import Census
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.faults import Plan
from tests.simulation.run import DRIFT, SETTINGS, Going, Outcome, lack, outcome
from tests.simulation.stream import node
from tests.simulation.stream.machine import settings as stream_settings
from tests.simulation.stream.run import LENGTH
from tests.simulation.table.checker import Checker
from tests.simulation.table.clients import Call, Mourner, Reader, Taker, Writer
from tests.simulation.table.columns import Columns
from tests.simulation.table.machine import WatchedMachine
from tests.simulation.world import CLIENTS, World


class Node(node.Node):
    machine: WatchedMachine  # type: ignore[assignment]

    def _new_machine(self) -> Any:
        return WatchedMachine(self._checker)  # type: ignore[arg-type]


class Run(Going):
    """The parts of a run, for `run` and for who looks into one."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = world = World(plan.seed)
        rng = Random(f"run {plan.seed}")
        self.nodes: list[Node] = []
        self.stored = Columns(self.nodes, durable=plan.durable)
        self.stored.died = self._died
        self.checker = Checker(world, self.stored)
        settings = msgspec.structs.replace(SETTINGS, durable=plan.durable, max_bytes=plan.max_bytes)
        life = 0 if plan.durable else 1
        followers = ((("n1", life),),) if rng.random() < 0.5 else ()  # a partition may be made with one
        first = Configuration(1, ("n0", life), *followers)
        self.checker.configurations.append(first)
        self.coordinator = SimulatedCoordinator(world, first, self.checker.configurations.append)
        self.census = Census(self.coordinator, plan.durable)
        peers: dict[str, Node] = {}
        for number in range(plan.nodes):
            rate = rng.choice((1 - DRIFT, 1.0, 1 + DRIFT, rng.uniform(1 - DRIFT, 1 + DRIFT)))
            node = Node(
                number,
                world,
                self.coordinator,
                self.checker,
                self.census,
                settings,
                plan.followers,
                rate,
                peers,
                partition=0,
                stream=stream_settings(),
            )
            node.told_s, node.columns, node.stored = plan.told_s, self.stored, self.stored
            self.nodes.append(node)
        self.census.nodes.extend(self.nodes)
        peers.update((node.name, node) for node in self.nodes)
        count = plan.nodes
        self.users = [
            *(Writer(world, f"w{i}", count, self._ask, self.stored) for i in range(2)),
            *(Taker(world, f"t{i}", count, self._ask) for i in range(2)),
            Reader(world, "r", count, self._ask),
        ]
        self.mourner = Mourner(world, "mourner", count, self._ask)

    def _ask(self, node: int, call: Call) -> None:
        self.world.send(CLIENTS, node, self.nodes[node].request, call)

    def _died(self, life: bytes) -> None:
        self.world.after(self.world.rng.uniform(0.1, 0.6), self.mourner.tell, life)

    @property
    def clients(self) -> list[Any]:
        return self.users

    def settled(self) -> bool:
        waits = any(client.calls for client in (*self.clients, self.mourner))
        return not lack(self.plan, self.coordinator) and not waits and self.checker.settled()

    def waiting(self) -> str:
        calls = [client.name for client in (*self.clients, self.mourner) if client.calls]
        return f"{calls} wait, {self.checker.missing()} differ, {self.coordinator.configuration} leads"

    def finish(self) -> None:
        members = self.census.members()
        self.checker.agree((node.name, node.machine.count, node.machine.snapshot()) for node in members)


def plan(seed: int) -> Plan:
    return faults.plan(seed, LENGTH)


def run(given: Plan) -> Outcome:
    return outcome(Run(given))


def run_seed(seed: int) -> Outcome:
    return run(plan(seed))
