"""A table's own state machine, watched: who checks a run sees each command and result as it is applied."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.table import requests as r
from dataplane.table.machine import TableMachine
from tests.simulation.stream.machine import Counted

_INT = Field("dense", "int64", ())

decoded = lru_cache(512)(r.decode_command)
decoded_result = lru_cache(512)(r.decode_result)
"""What all replicas decode is decoded once."""


def stored(life: bytes, shard: int, rows: int, columns: list[str]) -> BatchRef:
    """Columns of so many rows that a life of a node stores."""
    return ref_to(life, rows, [(name, _INT, 8 * rows, shard, i) for i, name in enumerate(columns)])


class Audit(Protocol):
    def applied(self, count: int, command: bytes, result: bytes) -> None:
        """The machine has applied a command, after so many."""


class WatchedMachine(Counted, TableMachine):
    def __init__(self, audit: Audit) -> None:
        super().__init__("t")
        self._audit = audit

    def apply(self, command: bytes) -> bytes:
        result = super().apply(command)
        self._audit.applied(self.count, command, result)
        self.count += 1
        return result
