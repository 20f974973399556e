"""What a write of a table brought, and which of its cells are not needed any more.

A cell is a row of a column. The bytes of a write lie in shards, which may be of several nodes; a node frees its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef

Index = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Written:
    """What one write brought. `left` cells of it are in the table. `exact`: no two of its cells are stored as one, so
    that each can be freed by itself. `encoded`: the reference, where it came so."""

    ref: BatchRef
    left: int
    nbytes: int
    exact: bool
    encoded: bytes = b""

    @property
    def share(self) -> int:
        """The bytes of what is left of it, about."""
        return self.nbytes * self.left // (len(self.ref) * len(self.ref.columns))

    @classmethod
    def of(cls, ref: BatchRef, encoded: bytes = b"") -> Written:
        """All of what this reference means."""
        return cls(ref, len(ref) * len(ref.columns), ref.stored_nbytes, _exact(ref), encoded)

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """Those that store something of it."""
        return tuple(dict.fromkeys(node for node, _ in self.ref.shards()))

    def encode(self) -> bytes:
        """The reference."""
        return self.encoded or self.ref.encode()


class Over(NamedTuple):
    """Cells that are not needed any more: these columns of these rows of what a write brought. `done`: all of it."""

    written: Written
    columns: tuple[str, ...]
    rows: Index
    done: bool

    @property
    def ref(self) -> BatchRef:
        """What they are stored as."""
        return self.written.ref.select(*self.columns)[self.rows]


def _exact(ref: BatchRef) -> bool:
    """Whether each cell of the reference is stored by itself."""
    stored = sum(len(columns) * len(rows) for parts in ref.footprint().values() for columns, rows in parts)
    return stored == len(ref) * len(ref.columns)
