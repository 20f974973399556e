"""A node whose replica runs the stream's own state machine: what that has due is asked for, and its nodes are told
what no row needs any more."""

from __future__ import annotations

from typing import Any

from dataplane.errors import DataplaneError
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings
from tests.simulation import node
from tests.simulation.stream.columns import Columns
from tests.simulation.stream.machine import WatchedMachine
from tests.simulation.world import World

_TICK = -1
_TELL = -2
_TICK_S = 0.01  # before a tick that was refused is asked for again
_TELL_S = 0.05  # between looks at what is to be told
_MOST = 3


class Node(node.Node):
    """Of one stream's partition: a node is one of these in each."""

    machine: WatchedMachine

    def __init__(self, *arguments: Any, partition: int, stream: StreamSettings) -> None:
        super().__init__(*arguments)
        self._partition = partition
        self._stream = stream
        self.stored: Columns | None = None
        """Told of each crash, if this is the node's first partition."""
        self.columns: Columns

    # Life and death

    def start(self) -> None:
        if not self.up:
            self._ticking = False
            self._tick_s = 0.0
            self._told: dict[str, int] = {}  # by life of a node, up to where it knows its entries
            self._world.after(_TELL_S, self._look, self.life + 1)
        super().start()

    def _new_machine(self) -> WatchedMachine:
        return WatchedMachine(self._checker, self._partition, self._stream)

    def crash(self, restart_s: float) -> None:
        ran = self.up
        super().crash(restart_s)
        if ran and self.stored is not None:
            self.stored.crashed(self)

    # What it does

    def _attend(self) -> None:
        """Have the machine do what is due."""
        machine = self.machine
        replica, now = self.replica, self.clock()
        if self._ticking or not replica.leads or self._tick_s > now or machine.deadline(now) > now:
            return
        if replica.serves(now):
            self._ticking = True
            self._tick_s = now + _TICK_S
            self._perform(replica.request(_TICK, machine.tick(), now))
            self._ticking = False
            if machine.deadline(now) <= now:
                self._world.after(_TICK_S + 0.001, self._look_again, self.life)

    def _look_again(self, life: int) -> None:
        if self.life == life and self.up:
            self._perform([])

    def _reply(self, request: int, outcome: bytes | DataplaneError) -> None:
        if request == _TICK:
            if isinstance(outcome, bytes):
                self._tick_s = 0.0
        elif request != _TELL:
            super()._reply(request, outcome)

    def _due(self) -> float:
        deadline = super()._due()
        if self.replica.leads:
            due = self.machine.deadline(self.clock())
            if due > self.clock():
                deadline = min(deadline, due)
        return deadline

    # What others need no more

    def _look(self, life: int) -> None:
        """Tell nodes what is in their outboxes, if this one leads; and take out what they know."""
        if self.life != life or not self.up:
            return
        self._world.after(_TELL_S, self._look, life)
        now = self.clock()
        if self._world.now < self.paused_until or not self.replica.serves(now):
            return
        for name in self.machine.waiting():
            entries, last = self.machine.outbox(name, _MOST)
            if self._told.get(name, 0) >= last:
                received = r.encode_request(r.OutboxReceived(node=bytes.fromhex(name), last=self._told[name]))
                self._perform(self.replica.request(_TELL, received, now))
                return
            to = self.columns.number(name)
            told = self._when_alive(self._know)
            self._world.send(self.number, to, self._tell, self._world, name, last, entries, told)

    def _tell(self, world: World, name: str, last: int, entries: tuple[bytes, ...], told: Any) -> None:
        self.columns.settled(self._partition, name, last, entries)
        world.send(self.columns.number(name), self.number, told, name, last)

    def _know(self, name: str, last: int) -> None:
        self._told[name] = max(last, self._told.get(name, 0))
