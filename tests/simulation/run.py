"""One run of a plan, from nothing to the end of its faults and the quiet after it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from dataplane.replication.configuration import Configuration
from dataplane.replication.settings import ReplicationSettings
from tests.simulation.census import Census
from tests.simulation.checker import Checker, Violation
from tests.simulation.clients import Call, Consumer, Producer
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.faults import Plan, plan
from tests.simulation.injector import Injector
from tests.simulation.node import Node
from tests.simulation.world import CLIENTS, World

DRIFT = 0.05
SETTINGS = ReplicationSettings(
    lease_s=0.30, grace_s=0.36, drift=DRIFT, beat_s=0.08, retry_s=0.12, max_batch=8, snapshot_every=12
)
CALM_S = 8.0
"""With faults over, everything that waits goes on, and all is consumed, within so long: some twenty times `grace_s`."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a run. `broken` is None where every invariant held."""

    plan: Plan
    broken: str | None
    lost: bool
    """Every replica of a partition in memory has died."""
    ended_s: float
    events: int
    epochs: int
    commands: int
    rows: int


class Going:
    """How a run goes, whatever is simulated: `partitions` have nodes, and `clients` use them."""

    plan: Plan
    world: World
    checker: Any

    @property
    def partitions(self) -> Sequence[Any]:
        """Those of the run, each with its nodes and their census; a run with one is that itself."""
        return [self]

    @property
    def clients(self) -> list[Any]:
        raise NotImplementedError

    def settled(self) -> bool:
        raise NotImplementedError

    def waiting(self) -> str:
        raise NotImplementedError

    def finish(self) -> None:
        """What must hold at the end. Raises Violation."""
        raise NotImplementedError

    def go(self) -> None:
        """Raises Violation where an invariant is broken."""
        world, plan = self.world, self.plan
        for partition in self.partitions:
            for node in partition.nodes:
                world.after(0.001 * node.number, node.start)
        for client in self.clients:
            world.after(0.02, client.run)
        Injector(world, self.partitions, durable=plan.durable).schedule(plan.faults)
        world.run(plan.duration_s)
        calm_s = max([plan.duration_s, *(fault.start_s + 2 * fault.duration_s for fault in plan.faults)])
        for client in self.clients:
            client.ending = True
        world.at(calm_s, self._calm)
        world.run(calm_s + CALM_S)
        if not world.stopped:
            raise Violation(f"6: {CALM_S} s after the last fault {self.waiting()}")
        if not self.lost():
            self.finish()

    def lost(self) -> bool:
        return any(partition.census.lost() for partition in self.partitions)

    def _calm(self) -> None:
        """Look, now and then, whether all is done."""
        if self.lost() or self.settled():
            self.world.stopped = True
        else:
            self.world.after(0.05, self._calm)


def lack(plan: Plan, coordinator: SimulatedCoordinator) -> bool:
    """Whether a partition has fewer followers than it is to have."""
    return len(coordinator.configuration.followers) < min(plan.followers, plan.nodes - 1)


class Run(Going):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.checker = Checker(self.world)
        rng = Random(f"run {plan.seed}")
        settings = msgspec.structs.replace(SETTINGS, durable=plan.durable, max_bytes=plan.max_bytes)
        incarnation = 0 if plan.durable else 1
        first = Configuration(1, ("n0", incarnation))
        self.coordinator = SimulatedCoordinator(self.world, first, self.checker.configurations.append)
        peers: dict[str, Node] = {}
        self.census = Census(self.coordinator, plan.durable)
        self.nodes = [
            Node(
                number,
                self.world,
                self.coordinator,
                self.checker,
                self.census,
                settings,
                plan.followers,
                rng.choice((1 - DRIFT, 1.0, 1 + DRIFT, rng.uniform(1 - DRIFT, 1 + DRIFT))),
                peers,
            )
            for number in range(plan.nodes)
        ]
        self.census.nodes.extend(self.nodes)
        for node in self.nodes:
            node.told_s = plan.told_s
        peers.update((node.name, node) for node in self.nodes)
        self.producers = [Producer(self.world, f"p{i}", plan.nodes, self._ask) for i in range(2)]
        self.consumers = [Consumer(self.world, f"c{i}", plan.nodes, self._ask) for i in range(3)]

    def _ask(self, node: int, call: Call) -> None:
        self.world.send(CLIENTS, node, self.nodes[node].request, call)

    @property
    def clients(self) -> list[Any]:
        return [*self.producers, *self.consumers]

    def settled(self) -> bool:
        idle = not any(producer.calls for producer in self.producers)
        return not lack(self.plan, self.coordinator) and idle and self.checker.drained()

    def waiting(self) -> str:
        calls = [client.name for client in self.producers if client.calls]
        return f"{calls} wait, rows {self.checker.missing()} were not acked, {self.coordinator.configuration} leads"

    def finish(self) -> None:
        """Every in-sync replica has the same state after the same commands, and what was answered is in it."""
        members = sorted(self.census.members(), key=lambda node: node.machine.state.applied)
        self.checker.agree((node.name, node.machine.state.applied, node.machine.snapshot()) for node in members)
        self.checker.final(members[-1].machine.state.rows)


def outcome(it: Going) -> Outcome:
    """Have a run go. An error in what is simulated is a broken run too."""
    broken: str | None = None
    try:
        it.go()
    except Exception as error:  # whatever it is, the seed has found it
        broken = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
    world, checker = it.world, it.checker
    return Outcome(
        it.plan,
        broken,
        it.lost(),
        world.now,
        world.events,
        len(checker.configurations),
        len(checker.log),
        len(checker.labels),
    )


def run(given: Plan) -> Outcome:
    return outcome(Run(given))


def run_seed(seed: int) -> Outcome:
    return run(plan(seed))
