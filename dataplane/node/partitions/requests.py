"""What the parts of the directory ask of state machines, whatever these are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dataplane.node.partitions.table import Table

YES = b"\x01"
ASK_S = 10.0
"""For which a partition is asked."""


class Requests(Protocol):
    """What the directory and the router ask of state machines. None of them needs a sequence: they may be repeated."""

    def opening(self, table: Table, number: int) -> bytes:
        """The first request to a new partition, or b"" for none."""

    def disowning(self, groups: Sequence[str | int], version: int) -> bytes:
        """Of which of these groups or keys the partition holds a part; from now on it refuses the first row of the
        others that comes by a table older than this version. Answered by a byte for each, 1 for those that it holds."""

    def outliving(self, version: int) -> bytes:
        """Whether no row is left that came by this version of the table, or an older one: YES or not."""

    def retiring(self) -> bytes:
        """Whether the partition is empty, and from then on refuses all appends: YES or not."""

    def closing(self) -> bytes:
        """Nothing is appended any more."""

    def counting(self) -> bytes:
        """What the partition has counted, or b"" where that is not asked."""

    def counted(self, totals: bytes, answer: bytes) -> bytes:
        """The totals (b"" at first) with what a partition has answered to `counting`."""


@runtime_checkable
class Counted(Protocol):
    """A state machine of rows that producers appended."""

    def census(self) -> tuple[int, Sequence[str]]:
        """How many rows it has, and the nodes of those who appended."""
