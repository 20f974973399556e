"""The cells of a write to a table, and the cells that are no longer needed.

A cell is one row of one column. The bytes of a write are in shards, perhaps on several nodes; each node frees those
that it stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dataplane.batch import locations
from dataplane.batch.ref import BatchRef
from dataplane.stream.page import Index


@dataclass(slots=True, eq=False)
class WriteEffect:
    """The cells of one write. `left`: how many of them are still in the table. `exact`: no two cells share storage, so
    each can be freed separately. `encoded`: the encoded reference, if known."""

    ref: BatchRef
    left: int
    nbytes: int
    exact: bool
    encoded: bytes = b""

    @property
    def share(self) -> int:
        """The approximate bytes of the cells that are still in the table."""
        return self.nbytes * self.left // (len(self.ref) * len(self.ref.columns))

    @classmethod
    def of(cls, ref: BatchRef, encoded: bytes = b"") -> WriteEffect:
        """A write of this reference, with all cells in the table."""
        return cls(ref, len(ref) * len(ref.columns), ref.stored_nbytes, locations.are_apart(ref), encoded)

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """The nodes that store some of its cells."""
        return tuple(dict.fromkeys(node for node, _ in self.ref.shards()))

    def encode(self) -> bytes:
        """The reference as bytes."""
        return self.encoded or self.ref.encode()


class UnneededCells(NamedTuple):
    """Cells that are no longer needed: these columns of these rows of a write. `done`: no cell of the write is needed
    any more."""

    written: WriteEffect
    columns: tuple[str, ...]
    rows: Index
    done: bool

    @property
    def ref(self) -> BatchRef:
        """A reference to these cells."""
        return self.written.ref.select(*self.columns)[self.rows]
