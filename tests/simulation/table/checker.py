"""The invariants of a run, checked at each step that could break one. Numbers are those of `docs/testing.md`."""

from __future__ import annotations

from typing import Any

from dataplane.stream.requests import CommandRefused, Succeeded
from dataplane.table import requests as r
from tests.simulation.checker import LogChecker, Violation
from tests.simulation.table.columns import Columns
from tests.simulation.table.machine import decoded, decoded_result
from tests.simulation.table.model import COLUMNS, Model
from tests.simulation.world import World


class Checker(LogChecker):
    """What was told to clients, the one log that all replicas have to have, and what it makes (`model`)."""

    def __init__(self, world: World, stored: Columns) -> None:
        super().__init__(world)
        self._stored = stored
        stored.cells = lambda: self.model.cells()
        self.model = Model()
        self.labels: dict[tuple[str, int], None] = {}
        """Writes that were answered."""
        self._done: dict[tuple[str, int], bytes] = {}  # sequences -> result

    # Called by machines and nodes

    def applied(self, count: int, command: bytes, result: bytes) -> None:
        if not self.is_new(count, command, result):
            return
        made = decoded(command)
        if made.sequence:
            before = self._done.setdefault((made.client, made.sequence), result)
            if before is not result:
                if before != result:
                    raise Violation(f"5: {made} has the results {before!r} and {result!r}")
                return
        self._first(made, decoded_result(result))

    def _first(self, command: r.Command, result: r.AnyResult) -> None:
        """5: it does what it says, once."""
        if isinstance(result, CommandRefused):
            return
        expected, found = self.model.done(command), None
        if isinstance(result, r.RowNumbers) or (isinstance(result, r.ClaimedRows) and result.granted):
            found = result.rows.tolist()
        if expected != found:
            raise Violation(f"5: {command} is answered by {found}, and by the log it is {expected}")

    def answering(self, request: Any, outcome: bytes, node: str, epoch: int, rate: float) -> None:
        """A leader is about to answer a client: by what the log has made, with nothing left out."""
        self.one_answers(node, epoch)
        if isinstance(request, r.Question):  # a command that was committed may be answered late
            self.newest_answers(node, epoch)
        result = decoded_result(outcome) if outcome else None
        rows = self.model.rows
        if isinstance(request, r.LookRows):
            assert isinstance(result, r.Looked)
            told = list(zip(result.rows.tolist(), result.keys, result.tags, _have(result), strict=True))
            there = [(n, row.key, row.tags, [c in row.cells for c in COLUMNS]) for n, row in rows.items()]
            if told != there:
                raise Violation(f"1: {node} shows {told}, and by the log there is {there}")
        elif isinstance(request, r.FindReady):
            ready = self.model.ready(request.columns, request.task)
            if request.claim_id and (request.task, request.claim_id) in self.model.claims:
                ready = self.model.claims[request.task, request.claim_id]
            if (None if result is None else result.rows.tolist()) != (ready or None):  # type: ignore[union-attr]
                raise Violation(f"1: {node} says {result} are ready, and by the log {ready} are")
        elif request.sequence:
            if self._done.get((request.client, request.sequence)) != outcome:
                raise Violation(f"5: {request} is answered by {result}, and by the log otherwise")
            self.labels[request.client, request.sequence] = None
        else:
            assert isinstance(result, Succeeded)

    # At the end

    def settled(self) -> bool:
        """1: what nodes keep is what rows need."""
        return not self.missing()

    def missing(self) -> Any:
        needed = {(life, shard) for _, (life, shard, _) in self.model.cells() if life not in self._stored.dead}
        return self._stored.kept() ^ needed


def _have(looked: r.Looked) -> list[list[bool]]:
    width = len(COLUMNS)
    return [[bool(byte >> (7 - bit) & 1) for bit in range(width)] for byte in looked.have]
