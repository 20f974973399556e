"""One run of a plan with a table's partition, from nothing to the end of its faults and the quiet after it."""

from __future__ import annotations

from random import Random

import msgspec

from dataplane.replication.configuration import Configuration
from tests.simulation import faults
from tests.simulation.census import Census
from tests.simulation.checker import Violation
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.faults import Plan
from tests.simulation.injector import Injector
from tests.simulation.run import CALM_S, DRIFT, SETTINGS, Outcome, outcome
from tests.simulation.stream.machine import settings as stream_settings
from tests.simulation.stream.run import LENGTH
from tests.simulation.table.checker import Checker
from tests.simulation.table.clients import Call, Mourner, Reader, Taker, Writer
from tests.simulation.table.columns import Columns
from tests.simulation.table.node import Node
from tests.simulation.world import CLIENTS, World


class Run:
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
        self.clients = [
            *(Writer(world, f"w{i}", count, self._ask, self.stored) for i in range(2)),
            *(Taker(world, f"t{i}", count, self._ask) for i in range(2)),
            Reader(world, "r", count, self._ask),
        ]
        self.mourner = Mourner(world, "mourner", count, self._ask)

    def _ask(self, node: int, call: Call) -> None:
        self.world.send(CLIENTS, node, self.nodes[node].request, call)

    def _died(self, life: bytes) -> None:
        self.world.after(self.world.rng.uniform(0.1, 0.6), self.mourner.tell, life)

    def go(self) -> None:
        """Raises Violation where an invariant is broken."""
        world, plan = self.world, self.plan
        for node in self.nodes:
            world.after(0.001 * node.number, node.start)
        for client in self.clients:
            world.after(0.02, client.run)
        Injector(world, [self], durable=plan.durable).schedule(plan.faults)
        world.run(plan.duration_s)
        calm_s = max([plan.duration_s, *(fault.start_s + 2 * fault.duration_s for fault in plan.faults)])
        for client in self.clients:
            client.ending = True
        world.at(calm_s, self._calm)
        world.run(calm_s + CALM_S)
        if not world.stopped:
            calls = [client.name for client in (*self.clients, self.mourner) if client.calls]
            left = f"{calls} wait, {self.checker.missing()} differ, {self.coordinator.configuration} leads"
            raise Violation(f"6: {CALM_S} s after the last fault {left}")
        if not self.lost():
            self._finish()

    def lost(self) -> bool:
        return self.census.lost()

    def _calm(self) -> None:
        """Look, now and then, whether all is done."""
        lack = min(self.plan.followers, self.plan.nodes - 1) - len(self.coordinator.configuration.followers)
        waits = any(client.calls for client in (*self.clients, self.mourner))
        if self.lost() or (lack <= 0 and not waits and self.checker.settled()):
            self.world.stopped = True
        else:
            self.world.after(0.05, self._calm)

    def _finish(self) -> None:
        """Every in-sync replica has the same state after the same commands."""
        states: dict[int, bytes] = {}
        for node in self.census.members():
            applied, state = node.machine.count, node.machine.snapshot()
            if states.setdefault(applied, state) != state:
                raise Violation(f"4: the state of {node.name} after {applied} commands is not the others'")


def plan(seed: int) -> Plan:
    """What the run of a seed is."""
    return faults.plan(seed, LENGTH)


def run(given: Plan) -> Outcome:
    """Run a plan."""
    return outcome(Run(given))


def run_seed(seed: int) -> Outcome:
    """Run the plan of a seed."""
    return run(plan(seed))
