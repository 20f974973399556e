"""The invariants of a run, checked at each step that could break one. Numbers are those of `docs/testing.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dataplane.replication.configuration import Configuration
from tests.simulation.machine import (
    TASKS,
    Append,
    Appended,
    Done,
    Lease,
    Leased,
    Request,
    Settle,
    decode_request,
    decode_result,
)
from tests.simulation.world import World


class Violation(Exception):
    """An invariant does not hold."""


class LogChecker:
    """The one log that all replicas have to have, and who answers by it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.log: list[tuple[bytes, bytes]] = []  # (command, result) as first applied by any replica
        self.configurations: list[Configuration] = []
        self._answered_by: dict[int, str] = {}  # epoch -> node
        self._newest = 0  # the newest epoch that answered a question

    def is_new(self, count: int, command: bytes, result: bytes) -> bool:
        """4: committed logs are prefixes of each other, and mean the same everywhere."""
        if count < len(self.log):
            if self.log[count] != (command, result):
                raise Violation(
                    f"4: command {count} is {self.log[count]} on one replica, {(command, result)} on another"
                )
            return False
        if count > len(self.log):
            raise Violation(f"4: command {count} was applied, and nobody has applied {len(self.log)}")
        self.log.append((command, result))
        return True

    def leading(self, nodes: Sequence[Any]) -> None:
        """4, and why it holds: at no moment would two replicas answer. Called after each step of a node."""
        leaders = [node for node in nodes if node.up and node.replica.leads]
        if len(leaders) > 1 and len(serving := [n for n in leaders if n.replica.serves(n.clock())]) > 1:
            epochs = {node.name: node.replica.configuration.epoch for node in serving}
            raise Violation(f"4: {epochs} would answer at once")

    def one_answers(self, node: str, epoch: int) -> None:
        """4: each epoch has one that answers."""
        if self._answered_by.setdefault(epoch, node) != node:
            raise Violation(f"4: {node} and {self._answered_by[epoch]} answer in epoch {epoch}")

    def newest_answers(self, node: str, epoch: int) -> None:
        """4: a question is answered by who led last."""
        if epoch < self._newest:
            raise Violation(f"4: {node} answers in epoch {epoch} after another leader did in {self._newest}")
        self._newest = epoch

    def agree(self, states: Iterable[tuple[str, int, bytes]]) -> None:
        """4: replicas have the same state after as many commands. `states`: of each its name, commands and state."""
        found: dict[int, bytes] = {}
        for name, applied, state in states:
            if found.setdefault(applied, state) != state:
                raise Violation(f"4: the state of {name} after {applied} commands is not the others'")


class Checker(LogChecker):
    """What was told to clients of the toy."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._granted: dict[tuple[str, int], tuple[tuple[int, int], float]] = {}  # -> (lease, true time it ends)
        self.acked: set[tuple[str, int]] = set()
        self._offsets: dict[tuple[str, int], tuple[int, ...]] = {}  # (client, sequence) -> as answered
        self.labels: dict[int, str] = {}  # of rows whose append was answered

    # Called by machines and nodes

    def applied(self, count: int, command: bytes, result: bytes) -> None:
        if not self.is_new(count, command, result):
            return
        asked = decode_request(command)
        if isinstance(asked, Settle) and not asked.done:
            for offset, lease in asked.rows:
                if self._granted.get((asked.task, offset), (None, 0.0))[0] == lease:
                    del self._granted[asked.task, offset]

    def answering(self, request: Request, outcome: bytes, node: str, epoch: int, rate: float) -> None:
        self.one_answers(node, epoch)
        result = decode_result(outcome)
        if isinstance(request, Lease):
            assert isinstance(result, Leased)
            self._leasing(request, result, node, epoch, rate)
        elif isinstance(request, Append):
            assert isinstance(result, Appended)
            self._appended(request, result)
        else:
            assert isinstance(result, Done)
            if request.done:
                self._acked(request)

    def _leasing(self, request: Lease, result: Leased, node: str, epoch: int, rate: float) -> None:
        self.newest_answers(node, epoch)
        now = self._world.now
        for offset, lease, label in result.rows:
            key = (request.task, offset)
            if key in self.acked:
                raise Violation(f"2: {node} delivers {key} in epoch {epoch}, and it was acked")
            before, until_s = self._granted.get(key, ((0, 0), 0.0))
            if before[0] > lease[0] or (before[0] == lease[0] and now < until_s - 1e-6):
                raise Violation(f"3: {node} leases {key} as {lease} while {before} lives until {until_s:.3f}")
            if self.labels.get(offset, label) != label:
                raise Violation(f"1: row {offset} is {label}, and was answered as {self.labels[offset]}")
            self._granted[key] = lease, now + request.lease_s / rate

    def _appended(self, request: Append, result: Appended) -> None:
        name = (request.client, request.sequence)
        if self._offsets.setdefault(name, result.offsets) != result.offsets:
            raise Violation(f"5: {name} was answered by {self._offsets[name]} and by {result.offsets}")
        for (_, label), offset, new in zip(request.rows, result.offsets, result.new, strict=True):
            if new and self.labels.setdefault(offset, label) != label:
                raise Violation(f"1: {label} and {self.labels[offset]} were both answered as row {offset}")

    def _acked(self, request: Settle) -> None:
        for offset, lease in request.rows:
            key = (request.task, offset)
            held = self._granted.get(key)
            if held is None or held[0] != lease:
                raise Violation(f"3: the ack of {key} by {lease} was taken, and {held and held[0]} came after it")
            self.acked.add(key)

    # At the end

    def drained(self) -> bool:
        """1: every row whose append was answered was acked by each task."""
        return len(self.acked) >= len(self.labels) * len(TASKS) and not self.missing()

    def missing(self) -> list[tuple[str, int]]:
        return [(task, offset) for task in TASKS for offset in self.labels if (task, offset) not in self.acked]

    def final(self, rows: list[str]) -> None:
        """5: keys and producer sequences give one row each. `rows`: the labels in a replica at the end."""
        if len(set(rows)) != len(rows):
            raise Violation(f"5: rows {sorted({row for row in rows if rows.count(row) > 1})} are there more than once")
        for offset, label in self.labels.items():
            if offset >= len(rows) or rows[offset] != label:
                raise Violation(f"1: row {offset}, answered as {label}, is not there at the end")
