"""A batch in this process's own memory, made from anything that can be put, for code that runs without a node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from dataplane.batch.batch import Batch, Column, Piece
from dataplane.batch.columns import Plan, plan
from dataplane.batch.layout import ALIGNMENT, Bytes
from dataplane.batch.rows import Rows


class LocalMemory:
    """A `Memory` over an array of bytes. Views that can be written are copies."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._data.setflags(write=False)

    def read(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.read`."""
        return self._data[offset : offset + nbytes]

    def private(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.private`."""
        return self._data[offset : offset + nbytes].copy()

    own = private


def materialise(planned: Plan) -> Batch:
    """The batch that the plan describes, written to new memory by this thread."""
    memory = aligned_bytes(planned.nbytes)
    for job in planned.jobs(memory):
        job()
    held, rows = LocalMemory(memory), Rows.range(0, planned.rows)
    return Batch({name: Column(name, c.field, [Piece(c, held, rows)]) for name, c in planned.layout().columns})


def local_batch(columns: Any, *, dedupe: Collection[str] = ()) -> Batch:
    """A copy of `columns`, which are what `plan` takes, as a batch. Raises SchemaMismatch as `plan` does."""
    return materialise(plan(columns, dedupe=dedupe))


def aligned_bytes(nbytes: int) -> Bytes:
    """New memory that begins at a multiple of the layout's alignment."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.__array_interface__["data"][0] % ALIGNMENT
    return block[start : start + nbytes]
