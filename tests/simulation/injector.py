"""Does the faults of a plan to a run. Each kind is a method of that name, which returns what ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tests.simulation.census import Census
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.faults import FOLLOWER, LEADER, Fault
from tests.simulation.node import Node
from tests.simulation.world import COORDINATOR, World

End = Callable[[], None] | None


class Partition(Protocol):
    """What faults are done to: a node is one of each partition."""

    nodes: Sequence[Node]
    coordinator: SimulatedCoordinator
    census: Census


class Injector:
    """Faults of one kind may overlap; each undoes what it did itself. Who leads is who leads the first partition."""

    def __init__(self, world: World, partitions: Sequence[Partition], *, durable: bool) -> None:
        self._world = world
        self._partitions = partitions
        self._nodes = partitions[0].nodes
        self._coordinator = partitions[0].coordinator
        self._durable = durable

    def _all(self, node: Node) -> list[Node]:
        """The node, in each partition."""
        return [partition.nodes[node.number] for partition in self._partitions]

    def _last(self, node: Node) -> bool:
        return any(each.census.last(each.nodes[node.number]) for each in self._partitions)

    def schedule(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._world.at(fault.start_s, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        end = getattr(self, fault.kind)(fault)
        if end is not None:
            self._world.after(fault.duration_s, end)

    def _node(self, which: int) -> Node:
        configuration = self._coordinator.configuration
        if which == LEADER:
            return self._named(configuration.leader[0])
        if which == FOLLOWER:
            followers = configuration.followers or (configuration.leader,)
            return self._named(followers[0][0])
        return self._nodes[which]

    def _named(self, name: str) -> Node:
        return self._nodes[int(name[1:])]

    # The network

    def _cut(self, links: list[tuple[int, int]]) -> End:
        cuts = self._world.cuts
        for link in links:
            cuts[link] = cuts.get(link, 0) + 1

        def heal() -> None:
            for link in links:
                cuts[link] -= 1

        return heal

    def cut(self, fault: Fault) -> End:
        a, b = self._node(fault.a).number, self._node(fault.b).number
        return self._cut([(a, b), (b, a)])

    def cut_one_way(self, fault: Fault) -> End:
        a, b = self._node(fault.a).number, self._node(fault.b).number
        return self._cut([(a, b) if fault.amount < 0.5 else (b, a)])

    def isolate(self, fault: Fault) -> End:
        """From all other nodes, and now and then from the coordinator; clients reach it."""
        a = self._node(fault.a).number
        others = [node.number for node in self._nodes if node.number != a]
        if fault.amount < 0.4:
            others.append(COORDINATOR)
        return self._cut([link for other in others for link in ((a, other), (other, a))])

    def cut_from_coordinator(self, fault: Fault) -> End:
        a = self._node(fault.a).number
        return self._cut([(a, COORDINATOR)] * (fault.amount < 0.7) + [(COORDINATOR, a)] * (fault.amount > 0.3))

    def _raise(self, of: Sequence[object], attribute: str, by: float) -> End:
        for each in of:
            setattr(each, attribute, getattr(each, attribute) + by)

        def lower() -> None:
            for each in of:
                setattr(each, attribute, getattr(each, attribute) - by)

        return lower

    @property
    def _coordinators(self) -> list[SimulatedCoordinator]:
        return [partition.coordinator for partition in self._partitions]

    def lossy(self, fault: Fault) -> End:
        return self._raise([self._world], "lossy", 0.5 * fault.amount)

    def duplicating(self, fault: Fault) -> End:
        return self._raise([self._world], "duplicating", 0.5 * fault.amount)

    def reordering(self, fault: Fault) -> End:
        return self._raise([self._world], "reordering", fault.amount)

    # Nodes

    def crash(self, fault: Fault) -> None:
        node = self._node(fault.a)
        if not self._last(node):
            for each in self._all(node):
                each.crash(fault.duration_s)

    def crash_between_effects(self, fault: Fault) -> None:
        """In the next step that has effects, after the first few."""
        node = self._node(fault.a)
        if node.up:
            node.restart_s = fault.duration_s
            node.doomed_after = int(4 * fault.amount)
            node.others = self._all(node)[1:]

    def crash_all(self, fault: Fault) -> None:
        if self._durable:
            for node in self._nodes:
                for each in self._all(node):
                    each.crash(fault.duration_s * (1 + node.number * fault.amount))

    def pause(self, fault: Fault) -> None:
        """The process is stopped; its clock is not."""
        for node in self._all(self._node(fault.a)):
            node.paused_until = max(node.paused_until, self._world.now + fault.duration_s)

    def slow_disk(self, fault: Fault) -> End:
        return self._raise(self._all(self._node(fault.a)), "slow_disk", 1)

    # The coordinator

    def coordinator_away(self, fault: Fault) -> End:
        return self._raise(self._coordinators, "away", 1)

    def coordinator_slow(self, fault: Fault) -> End:
        return self._raise(self._coordinators, "slow", 1)

    def coordinator_mute(self, fault: Fault) -> End:
        return self._raise(self._coordinators, "mute", fault.amount)

    def coordinator_late(self, fault: Fault) -> End:
        return self._raise(self._coordinators, "late", fault.amount)

    def coordinator_wiped(self, fault: Fault) -> End:
        """All that it knew is gone."""
        for partition in self._partitions:
            partition.census.wiped()
            partition.coordinator.wipe()
        return self.coordinator_away(fault)

    # What others ask of the partition

    def recruit(self, fault: Fault) -> None:
        """Recruit some node, whether it is wanted or not."""
        node = self._node(fault.b)
        self._node(LEADER).recruit(node.me)
