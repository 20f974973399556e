"""A stream of a node outside a cluster: the state machine of a partition (`machine`), without a log and followers.

Requests are decided and applied in one step, and nothing is encoded. A request that cannot be served yet may wait, as
at the leader of a partition.
"""

from __future__ import annotations

import math
from typing import Any

from dataplane.clock import Clock
from dataplane.errors import Backpressure, Closed, NotReady
from dataplane.node.partitions.waiters import Waiters, WaitingRequest
from dataplane.stream import requests as r
from dataplane.stream.admission import LAG
from dataplane.stream.leader import refusal
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.machine import StreamMachine
from dataplane.stream.replicated import ColumnStore
from dataplane.stream.settings import StreamSettings

_TICK = r.Tick()


class UnreplicatedStream:
    """See the module. The owner of the stream calls `settle` at `due_s`."""

    def __init__(self, name: str, settings: StreamSettings, mark: str, columns: ColumnStore, clock: Clock) -> None:
        """`mark`: the prefix of generated keys."""
        self.clock = clock
        self.machine = StreamMachine(name, settings, mark)
        self.machine.alone(clock(), columns)
        self.waiters = Waiters(self._serves)
        self.machine.waits = self.waiters.requests
        self.due_s = math.inf
        """The time at which `settle` is due; infinite if nothing is due."""
        self._no_room = False

    @property
    def leased(self) -> LeasedRows:
        return self.machine.leased

    def run(self, asked: r.StreamRequest) -> Any:
        """Return the result of a request, which does not wait. Raises the error with which the stream refuses the
        request; NotReady or Backpressure if it cannot be served now."""
        leased, now = self.machine.leased, self.clock()
        while True:
            changes = leased.changes
            try:
                if self.waiters and isinstance(asked, r.Admit) and self._passes_others():
                    raise refusal(leased, self.machine.entry_of(asked))
                return self.machine.run(asked, now)
            except NotReady:  # settle rows that the sampler has expired, and try again
                self._settle(now)
                if leased.changes == changes:
                    raise
            finally:
                self._settle(now)

    def add(self, waiting: WaitingRequest) -> None:
        """Execute a request that may wait. `waiting.done` is called once, with the result, the error, or `NOTHING` at
        the deadline. Raises Backpressure if too many requests wait."""
        now = self.clock()
        self.waiters.add(waiting, now)
        self._settle(now)

    def settle(self) -> None:
        """Expire leases and rows that are due, and serve waiting requests."""
        self._settle(self.clock())

    def _settle(self, now: float) -> None:
        machine = self.machine
        while True:
            while (due := machine.deadline(now)) <= now:
                machine.run(_TICK, now)
            if not self.waiters:
                break
            changes = self.leased.changes
            self._no_room = False
            for waiting in self.waiters.served():
                self._again(waiting, now)
            if self.leased.changes == changes and (due := machine.deadline(now)) > now:
                break
        self.due_s = due

    def _serves(self, waiting: WaitingRequest) -> bool:
        if not isinstance(waiting.request, r.Admit):
            return self.machine.serves_decoded(waiting.request, waiting.in_vain)
        if self.leased.closed:
            return True
        full = self.leased.admission.full(self.machine.entry_of(waiting.request))
        self._no_room = self._no_room or full not in ("", LAG)  # no append passes one that waits for room
        return not full and not self._no_room

    def _passes_others(self) -> bool:
        """Whether an append now would overtake a request that waits for room."""
        waiting = [each.request for each in self.waiters.heads() if isinstance(each.request, r.Admit)]
        return any(self.leased.admission.full(self.machine.entry_of(each)) != LAG for each in waiting)

    def _again(self, waiting: WaitingRequest, now: float) -> None:
        try:
            outcome = self.machine.run(waiting.request, now)
        except (NotReady, Backpressure):
            waiting.in_vain = self.machine.version
            self.waiters.add(waiting, now, first=True)
            return
        except Exception as error:  # the boundary: an error of the waiting request must not fail the one that served it
            outcome = error
        waiting.done(outcome)

    @property
    def watches_age(self) -> bool:
        """Whether a waiting request has a sampler that judges rows by age."""
        samplers = (getattr(each.request, "sampler", None) for each in self.waiters.heads())  # one a queue
        return any(getattr(sampler, "judges_age", False) for sampler in samplers)

    def end(self) -> None:
        """Drop the stream. Waiting requests get Closed."""
        for waiting in self.waiters.drain():
            waiting.done(Closed(f"the stream {self.machine.name!r} was dropped"))
        self.machine.run(r.Clear(), self.clock())
        self.machine.snapshots.leave(self.machine)
        self.leased.end()
        self.machine.columns, self.machine.waits = None, tuple
        self.waiters = Waiters(_nobody)


def _nobody(_: WaitingRequest) -> bool:
    return False
