"""The stream's own state machine, watched: who checks a run sees each command and result as it is applied.

Columns are no bytes here: a reference names a node's life and a shard, and which of them are there the checker knows.
A row's tag says what its producer called it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.replication.machine import Decision
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.settings import StreamSettings

TASKS = ("train", "score")
GROUP = 2
MAX_DELIVERIES = 3
LABEL = "label"

_INT = Field("dense", "int64", ())
_COUNT = 8


def settings(max_rows: int = 0) -> StreamSettings:
    """What the stream of a run is made with."""
    return StreamSettings(TASKS, max_rows=max_rows, max_deliveries=MAX_DELIVERIES)


def columns(node: bytes, shard: int, rows: int, name: str) -> BatchRef:
    """A column of so many rows that the node stores."""
    return ref_to(node, rows, [(name, _INT, 8 * rows, shard, 0)])


def versions(rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.zeros(rows, np.int64)


decoded = lru_cache(512)(c.decode)
decoded_request = lru_cache(512)(r.decode_request)
decoded_result = lru_cache(512)(r.decode_result)
"""What all replicas decode is decoded once."""


class Audit(Protocol):
    def applied(self, count: int, command: bytes, result: bytes, rows: int) -> None:
        """The machine has applied a command, after so many, and has so many rows now."""


class Counted:
    """A state machine whose snapshot has `count`, the number of commands that it has applied."""

    count = 0

    def snapshot(self) -> bytes:
        return self.count.to_bytes(_COUNT) + super().snapshot()  # type: ignore[misc]

    def restore(self, state: bytes) -> None:
        super().restore(state[_COUNT:])  # type: ignore[misc]
        self.count = int.from_bytes(state[:_COUNT])


class WatchedMachine(Counted, StreamMachine):
    def __init__(self, audit: Audit, partition: int, of: StreamSettings) -> None:
        super().__init__(f"s{partition}", of, "m")
        self._audit = audit

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        return self.decide_decoded(decoded_request(request), term, now)

    def apply(self, command: bytes) -> bytes:
        result = self.apply_decoded(self._decoded.pop(command, None) or decoded(command))
        self._audit.applied(self.count, command, result, self.leased.partition.rows.count)
        self.count += 1
        return result
