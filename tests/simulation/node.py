"""A node of a run: a thin driver around one replica, with a clock, a disk and a way to die at any step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dataplane.errors import DataplaneError
from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Effect, Refuse, Send, SendAnswer, StoreOperation, Swap
from dataplane.replication.leader import choose
from dataplane.replication.messages import Message
from dataplane.replication.replica import Replica
from dataplane.replication.settings import ReplicationSettings
from tests.simulation.census import Census
from tests.simulation.checker import Checker
from tests.simulation.clients import Call
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.disk import Disk
from tests.simulation.machine import StreamMachine
from tests.simulation.world import CLIENTS, World

CHECK_IN_S = 0.4


class Node:
    """See the module. `rate` is how many of its seconds a true one has."""

    def __init__(
        self,
        number: int,
        world: World,
        coordinator: SimulatedCoordinator,
        checker: Checker,
        census: Census,
        settings: ReplicationSettings,
        wanted_followers: int,
        rate: float,
        peers: dict[str, Node],
    ) -> None:
        self.number = number
        self.name = f"n{number}"
        self._world = world
        self._coordinator = coordinator
        self._checker = checker
        self._census = census
        self._settings = settings
        self._wanted_followers = wanted_followers
        self._rate = rate
        self._offset = 1000.0 * number
        self._peers = peers
        self.life = 0  # how often it was started; what was on its way to an earlier life does not arrive
        self.incarnation = 0
        self.up = False
        self.paused_until = 0.0
        self.doomed_after = -1  # effects of the next step, then it crashes
        self.restart_s = 0.0
        self.others: list[Node] = []
        """This node in other partitions, which crash with it."""
        self.slow_disk = 0
        self.told_s = 0.0  # others are told, within so long, when this process has ended; 0: they are not
        self._disk = Disk()
        self.replica: Replica
        self.machine: Any

    @property
    def me(self) -> ReplicaId:
        return self.name, self.incarnation

    @property
    def last(self) -> bool:
        """Whether without this node nobody would have what is committed."""
        return self._census.last(self)

    def clock(self) -> float:
        return self._offset + self._world.now * self._rate

    # Life and death

    def start(self) -> None:
        if self.up:
            return
        self.up = True
        self.life += 1
        if not self._settings.durable:
            self._disk = Disk()
            self.incarnation = self.life
        self._requests: dict[int, Call] = {}
        self._request = 0
        self._syncing = False
        self._wake_s = float("inf")
        self.machine = self._new_machine()
        fresh = self.told_s > 0 and not self._settings.durable
        self.replica = Replica(self.me, self._settings, self.machine, self._disk.load(), self.clock(), fresh=fresh)
        self._coordinator.watches[self.number] = self._when_alive(self._configured)
        self._check_in(self.life)

    def _new_machine(self) -> Any:
        return StreamMachine(self._checker)

    def crash(self, restart_s: float) -> None:
        """Lose all but what the disk has, and start again after a while."""
        if not self.up:
            return
        self.up = False
        self.doomed_after = -1
        self._disk.crash(self._world.rng)
        self._coordinator.watches.pop(self.number, None)
        self._world.after(restart_s, self.start)
        for peer in self._peers.values() if self.told_s else ():
            if peer is not self and peer.up:  # its connection closes, and it finds nobody where this node listened
                told = peer._when_alive(peer._gone)
                self._world.after(self.told_s * self._world.rng.random(), told, self.name, peer.clock())

    def _when_alive(self, call: Callable[..., None]) -> Callable[..., None]:
        """The call, unless this life has ended by then; later, if the node is stopped."""
        life = self.life

        def arrive(*arguments: Any) -> None:
            if self.life != life or not self.up:
                return
            if self._world.now < self.paused_until:
                self._world.at(self.paused_until, arrive, *arguments)
            else:
                call(*arguments)

        return arrive

    # What comes

    def receive(self, to: ReplicaId, sender: ReplicaId, message: Message) -> None:
        if not self.up or to[1] != self.incarnation:
            return
        if self._world.now < self.paused_until:
            self._world.at(self.paused_until, self.receive, to, sender, message)
            return
        self._perform(self.replica.receive(sender, message, self.clock()))

    def request(self, call: Call) -> None:
        if not self.up:
            return
        if self._world.now < self.paused_until:
            self._world.at(self.paused_until, self.request, call)
            return
        self._request += 1
        self._requests[self._request] = call
        self._perform(self.replica.request(self._request, call.encoded, self.clock()))

    def _configured(self, configuration: Configuration | None) -> None:
        if configuration is None:
            self._forgotten()
        elif self.replica.configuration.epoch:  # until it has read for itself, others' changes say too little
            self._perform(self.replica.configured(configuration, self.clock()))

    def _check_in(self, life: int) -> None:
        if self.life == life and self.up:
            self._coordinator.check_in(self.number, self.me, self._when_alive(self._checked_in))
            self._world.after(CHECK_IN_S, self._check_in, life)

    def _forgotten(self) -> None:
        self._perform(self.replica.forgotten(self.clock()))

    def _checked_in(self, configuration: Configuration | None, members: Mapping[str, bytes]) -> None:
        if configuration is None:
            self._forgotten()
            return
        self._perform(self.replica.configured(configuration, self.clock()))
        if self.replica.serves(self.clock()):
            candidates = [(name, int(incarnation)) for name, incarnation in members.items()]
            for recruit in choose("p", self.replica.configuration, candidates, self._wanted_followers):
                self._perform(self.replica.recruit(recruit, self.clock()))

    def _gone(self, name: str, before_s: float) -> None:
        self._perform(self.replica.gone(name, before_s, self.clock()))

    def recruit(self, replica: ReplicaId) -> None:
        if self.up:
            self._perform(self.replica.recruit(replica, self.clock()))

    def _tick(self, life: int) -> None:
        if self.life != life or not self.up:
            return
        now = self._world.now
        if now < self.paused_until:
            self._world.at(self.paused_until, self._tick, life)
            return
        self._wake_s = float("inf")
        if self.clock() >= self.replica.deadline - 1e-9:
            self._perform(self.replica.tick(self.clock()))
        else:
            self._attend()
            self._schedule()

    def _stored(self, ticket: int, life: int) -> None:
        self._perform(self.replica.stored(ticket, self.clock()))

    # What it does

    def _perform(self, effects: list[Effect]) -> None:
        doomed = self.doomed_after >= 0 and bool(effects) and not any(n.last for n in (self, *self.others))
        if doomed:
            effects = effects[: self.doomed_after]
        for effect in effects:
            if isinstance(effect, Send):
                to = self._peers.get(effect.to[0])
                if to is not None:
                    self._world.send(self.number, to.number, to.receive, effect.to, self.me, effect.message)
            elif isinstance(effect, SendAnswer):
                self._reply(effect.request, effect.result)
            elif isinstance(effect, Refuse):
                self._reply(effect.request, effect.error)
            elif isinstance(effect, Swap):
                told = self._when_alive(self._configured)
                self._coordinator.swap(self.number, effect.expected, effect.wanted, told)
            elif isinstance(effect, StoreOperation):
                self._disk.write(effect.ticket, effect.operation)
        if doomed:
            for node in (self, *self.others):
                node.crash(self.restart_s)
            return
        if self._disk.unsynced and not self._syncing:
            self._sync()
        self._attend()
        self._schedule()
        self._checker.leading(self._census.nodes)

    def _attend(self) -> None:
        """Do what the machine has due, after each step."""

    def _due(self) -> float:
        """When, by this node's clock, it has something to do unasked."""
        return self.replica.deadline

    def _reply(self, request: int, outcome: bytes | DataplaneError) -> None:
        self._answer(self._requests.pop(request), outcome)

    def _answer(self, call: Call, outcome: bytes | DataplaneError) -> None:
        if isinstance(outcome, bytes):
            self._checker.answering(call.request, outcome, self.name, self.replica.configuration.epoch, self._rate)
        self._world.send(self.number, CLIENTS, call.answered, outcome)

    def _sync(self) -> None:
        """One sync at a time, of what was written when it began."""
        self._syncing = True
        delay = 0.001 + 0.003 * self._world.rng.random() + (0.2 * self._world.rng.random() if self.slow_disk else 0.0)
        self._world.after(delay, self._synced, len(self._disk.unsynced), self.life)

    def _synced(self, count: int, life: int) -> None:
        if self.life != life or not self.up:
            return
        ticket = self._disk.sync(count)
        self._syncing = False
        self._when_alive(self._stored)(ticket, life)
        if self.up and self._disk.unsynced and not self._syncing:
            self._sync()

    def _schedule(self) -> None:
        deadline = self._due()
        if deadline == float("inf"):
            return
        wake_s = max((deadline - self._offset) / self._rate, self._world.now + 0.0005)
        if wake_s < self._wake_s - 1e-9:
            self._wake_s = wake_s
            self._world.at(wake_s, self._tick, self.life)
