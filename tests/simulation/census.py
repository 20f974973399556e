"""Which replicas that the configuration names are there. With none, a partition in memory is lost, and nobody's
fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.coordinator import SimulatedCoordinator

if TYPE_CHECKING:
    from tests.simulation.node import Node


class Census:
    """Of partitions in memory. One on disk comes back, whoever is down."""

    def __init__(self, coordinator: SimulatedCoordinator, durable: bool) -> None:
        self._coordinator = coordinator
        self.nodes: list[Node] = []
        self._durable = durable
        self._led: list[Node] = []
        self._lives: list[int] = []

    def members(self) -> list[Node]:
        configuration = self._coordinator.configuration
        return [node for node in self.nodes if node.up and configuration.includes(node.me)]

    def last(self, node: Node) -> bool:
        """Whether without this node nobody would have what is committed."""
        return not self._durable and self.members() == [node]

    def lost(self) -> bool:
        """Whether nobody has it: a replica that died had asked, before, that the others be dropped."""
        return not self._durable and (not self.members() or self._unknown())

    def wiped(self) -> None:
        """The coordinator forgets everything now."""
        members, configuration = self.members(), self._coordinator.configuration
        whole = len(members) == 1 + len(configuration.followers)
        self._led = members if whole and any(node.replica.serves(node.clock()) for node in members) else []
        self._lives = [node.life for node in self._led]

    def _unknown(self) -> bool:
        """Whether a coordinator that was wiped is told of it by nobody, and nobody's fault: nobody led it then, or who
        did has died, or a follower, before or since, or a change of followers may have happened: so who leads can not
        prove that it does."""
        lives = [node.life for node in self._led if node.up]
        changing = any(node.up and node.replica._state.reconfiguration.asked for node in self._led)
        return self._coordinator.forgotten and (not lives or lives != self._lives or changing)
