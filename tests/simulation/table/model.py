"""A table's rows as its committed commands make them, one after the other, in the plainest way: what the state machine,
with its arrays, has to agree with."""

from __future__ import annotations

from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.stream import requests as s
from dataplane.table import requests as r

COLUMNS = ("x", "y")

Cell = tuple[bytes, int, int]
"""The node's life, the shard, and the row in it."""


class Row:
    __slots__ = ("cells", "key", "tags")

    def __init__(self, key: str) -> None:
        self.key = key
        self.cells: dict[str, Cell] = {}
        self.tags: dict[str, Any] = {}


class Model:
    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.next = 0
        self.taken: dict[str, set[int]] = {}
        self.claims: dict[tuple[str, str], list[int]] = {}
        self.gone: set[bytes] = set()

    def keys(self) -> dict[str, int]:
        return {row.key: number for number, row in self.rows.items()}

    def cells(self) -> set[tuple[str, Cell]]:
        return {(name, cell) for row in self.rows.values() for name, cell in row.cells.items()}

    def ready(self, columns: list[str], task: str) -> list[int]:
        taken = self.taken.get(task, set())
        return [n for n, row in self.rows.items() if n not in taken and all(name in row.cells for name in columns)]

    def done(self, command: r.Command) -> Any:
        """Do a command that was not done before; what it is answered: numbers of rows, or None."""
        match command:
            case r.Upsert():
                return self._write(command)
            case r.ClearRows():
                self._clear([number for key, number in self.keys().items() if key in command.keys])
            case r.Claim():
                return self._take(command)
            case r.Release():
                for number in command.rows.tolist():
                    self.taken.get(command.task, set()).discard(number)
                    self._forget_claims(lambda given, number=number: number in given, command.task)  # type: ignore[misc]
            case r.DropTable():
                self._clear(list(self.rows))
                self.taken, self.claims = {}, {}
            case s.Lose():
                self.gone.add(command.node)
        return None

    def _write(self, command: r.Upsert) -> list[int]:
        there, numbers = self.keys(), []
        ref = BatchRef.decode(command.ref) if command.ref else None
        for row, key in enumerate(command.keys):
            number = there.get(key)
            if number is None:
                number, self.next = self.next, self.next + 1
                self.rows[number] = Row(key)
            numbers.append(number)
            if ref is not None:
                [(life, shard)] = ref.shards()
                self.rows[number].cells.update((name, (life, shard, row)) for name in ref.columns)
            if command.tags:
                self.rows[number].tags.update(command.tags[row])
        return numbers

    def _clear(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.rows[number]
            for taken in self.taken.values():
                taken.discard(number)
        if numbers:
            self._forget_claims(lambda given: not any(each in self.rows for each in given))

    def _forget_claims(self, over: Any, task: str | None = None) -> None:
        kept = {key: given for key, given in self.claims.items() if task not in (None, key[0]) or not over(given)}
        self.claims = kept

    def _take(self, command: r.Claim) -> list[int] | None:
        claim = (command.task, command.claim_id)
        if command.claim_id and claim in self.claims:
            return self.claims[claim]
        wanted, taken = command.rows.tolist(), self.taken.setdefault(command.task, set())
        if not self.rows and not wanted:
            return None
        if any(number not in self.rows or number in taken for number in wanted):
            return None
        taken.update(wanted)
        if command.claim_id:
            self.claims[claim] = wanted
        return wanted
