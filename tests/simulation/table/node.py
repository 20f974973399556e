"""A node whose replica runs a table's own state machine."""

from __future__ import annotations

from typing import Any

from tests.simulation.stream import node
from tests.simulation.table.machine import WatchedMachine


class Node(node.Node):
    """See `tests.simulation.stream.node`: it tells nodes what is in their outboxes."""

    machine: WatchedMachine  # type: ignore[assignment]

    def _new_machine(self) -> Any:
        return WatchedMachine(self._checker)  # type: ignore[arg-type]
