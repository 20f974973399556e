"""`Windows`: neighbouring rows of a reference, read together when they are accessed one by one.

Invariants: a window of rows is only held while a tensor of it is alive: code that iterates over rows, collects their
tensors, uses them and drops them, asks the node once a window, and holds nothing in between. If a window cannot be
read, because a neighbour was freed or the whole does not fit, its rows are read one by one.
"""

from __future__ import annotations

import weakref
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.batch.tensors import is_tensor
from dataplane.errors import Backpressure, Lost
from dataplane.integrations.process import plane

ROWS = 16


class Windows:
    """Rows of one reference. Any thread may read."""

    def __init__(self, ref: BatchRef) -> None:
        self._ref = ref
        self._open: dict[int, Batch] = {}
        self._living: dict[int, dict[int, weakref.ref[Any]]] = {}  # by window: of the tensors that it gave

    def batch(self, row: int) -> tuple[Batch, int]:
        """A batch with the row, and the position of the row in it. Raises as `Plane.get`."""
        number = row // ROWS
        batch = self._open.get(number)
        if batch is None:
            try:
                batch = plane().get(self._ref[number * ROWS : (number + 1) * ROWS])
            except (Lost, Backpressure):
                return plane().get(self._ref[row]), 0
        return batch, row % ROWS

    def keep(self, row: int, batch: Batch, given: dict[str, Any]) -> None:
        """Keep that batch while any of these tensors, which are views of it, is alive."""
        number = row // ROWS
        if len(batch) != len(self._ref[number * ROWS : (number + 1) * ROWS]):
            return  # it is one row of it
        living = self._living.setdefault(number, {})

        def gone(reference: weakref.ref[Any]) -> None:
            living.pop(id(reference), None)
            if not living:
                self._open.pop(number, None)

        for value in given.values():
            if is_tensor(value):
                reference = weakref.ref(value, gone)
                living[id(reference)] = reference
        if living:
            self._open[number] = batch
