"""A node whose replica runs the stream's own state machine: who waits is told, and what is due is asked for."""

from __future__ import annotations

from typing import Any

from dataplane.errors import DataplaneError
from dataplane.stream.machine import Served
from dataplane.stream.requests import Consume, Tick, Waiting, encode_request, encode_result
from dataplane.stream.settings import Settings
from tests.simulation import node
from tests.simulation.stream.clients import Call
from tests.simulation.stream.columns import Columns
from tests.simulation.stream.machine import WatchedMachine

_TICK = -1
_TICK_REQUEST = encode_request(Tick())
_WAITING = encode_result(Waiting())


class Node(node.Node):
    """Of one partition: a node is one of these in each."""

    machine: WatchedMachine

    def __init__(self, *arguments: Any, partition: int, stream: Settings) -> None:
        super().__init__(*arguments)
        self._partition = partition
        self._stream = stream
        self.stored: Columns | None = None
        """Told of each crash, if this is the node's first partition."""

    # Life and death

    def start(self) -> None:
        if not self.up:
            self._waiting: dict[tuple[str, int], Call] = {}
            self._ticking = False
            self._tick_s = 0.0
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
        """Tell those who waited, and have the machine do what is due."""
        machine = self.machine
        machine.released.clear()
        if machine.served:
            served, machine.served = machine.served, []
            for each in served:
                self._serve(each)
        replica, now = self.replica, self.clock()
        if self._ticking or not replica.leads or self._tick_s > now or machine.deadline(now) > now:
            return
        if replica.serves(now):
            self._ticking = True
            self._tick_s = now + 0.01  # if it is refused
            self._perform(replica.request(_TICK, _TICK_REQUEST, now))
            self._ticking = False
            if machine.deadline(now) <= now:
                self._world.after(0.011, self._look_again, self.life)

    def _look_again(self, life: int) -> None:
        if self.life == life and self.up:
            self._perform([])

    def _serve(self, served: Served) -> None:
        call = self._waiting.pop((served.client, served.number), None)
        if call is not None:
            outcome = served.outcome
            self._answer(call, outcome if isinstance(outcome, DataplaneError) else encode_result(outcome))

    def _reply(self, request: int, outcome: bytes | DataplaneError) -> None:
        if request == _TICK:
            if isinstance(outcome, bytes):
                self._tick_s = 0.0
        elif outcome == _WAITING:
            call = self._requests.pop(request)
            assert isinstance(call.request, Consume)
            self._waiting[call.request.client, call.request.number] = call
        else:
            super()._reply(request, outcome)

    def _due(self) -> float:
        deadline = super()._due()
        if self.replica.leads:
            due = self.machine.deadline(self.clock())
            if due > self.clock():
                deadline = min(deadline, due)
        return deadline
