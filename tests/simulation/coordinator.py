"""The coordinator of a run: the registry, behind a network, with lapses of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dataplane.replication.configuration import Configuration, ReplicaId, decode, encode
from tests.coordinator import Registry
from tests.simulation.world import COORDINATOR, World

KEY = "partition"
MEMBER_LEASE_S = 1.0


class SimulatedCoordinator:
    """What nodes ask arrives late, or never; so do its answers. What it does, it does at one moment."""

    def __init__(self, world: World, first: Configuration, changed: Callable[[Configuration], None]) -> None:
        self._world = world
        self._registry = Registry()
        self._registry.swap(KEY, None, encode(first))
        self.configuration = first
        """The last that there was."""
        self._changed = changed
        self.watches: dict[int, Callable[[Configuration], None]] = {}
        self.away = 0
        self.slow = 0
        self.mute = 0.0
        self.late = 0.0
        self._generation = 0

    def wipe(self) -> None:
        """Be another, that knows nothing; what was on its way to the one before never arrives."""
        self._generation += 1
        self._registry = Registry()

    @property
    def forgotten(self) -> bool:
        """Whether nobody has told it of the partition since it was wiped."""
        return self._registry.read(KEY) is None

    def swap(
        self, node: int, expected: Configuration | None, wanted: Configuration, told: Callable[[Any], None]
    ) -> None:
        self._ask(node, self._swap, node, expected, wanted, told)

    def check_in(
        self, node: int, replica: ReplicaId, told: Callable[[Configuration | None, Mapping[str, bytes]], None]
    ) -> None:
        """Be a member for a while, and read the configuration, if there is one, and the members."""
        self._ask(node, self._check_in, node, replica, told)

    def _ask(self, node: int, call: Callable[..., None], *arguments: object) -> None:
        world = self._world
        if world.cuts and world.cuts.get((node, COORDINATOR)):
            return
        delay = 0.001 + 0.005 * world.rng.random()
        if self.slow:
            delay += 0.3 * world.rng.random()
        if self.late and world.rng.random() < self.late:
            delay += 1.5 * world.rng.random()  # asked again meanwhile, and nobody expects it any more
        world.after(delay, self._arrive, self._generation, call, arguments)

    def _arrive(self, generation: int, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.away and generation == self._generation:
            call(*arguments)

    def _swap(
        self, node: int, expected: Configuration | None, wanted: Configuration, told: Callable[[Any], None]
    ) -> None:
        value = self._registry.swap(KEY, None if expected is None else encode(expected), encode(wanted))
        if value is None:
            self._answer(node, told, None)
            return
        now = decode(value)
        if now != self.configuration:
            self.configuration = now
            self._changed(now)
            for watcher, seen in self.watches.items():
                self._answer(watcher, seen, now)
        self._answer(node, told, now)

    def _check_in(
        self, node: int, replica: ReplicaId, told: Callable[[Configuration | None, Mapping[str, bytes]], None]
    ) -> None:
        self._registry.register(replica[0], str(replica[1]).encode(), MEMBER_LEASE_S, self._world.now)
        members = self._registry.members(self._world.now)
        self._answer(node, told, None if self.forgotten else self.configuration, members)

    def _answer(self, node: int, told: Callable[..., None], *arguments: object) -> None:
        if self.away or (self.mute and self._world.rng.random() < self.mute):
            return
        self._world.send(COORDINATOR, node, told, *arguments)
