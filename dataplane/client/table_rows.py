"""The answers of a table about its rows.

Invariant: arrays are those of the message, read-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.table import requests as r

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table: keys, numbers, tags. `have`: for each row and requested column whether the row has it.
    `changes`: the `since` of a later `look`."""

    numbers: Index
    keys: list[str]
    tags: list[dict[str, Any]]
    have: Flags
    changes: int

    def __len__(self) -> int:
        return len(self.numbers)


def joined(several: list[Index]) -> Index:
    """All numbers, concatenated."""
    if not several:
        return np.empty(0, np.int64)
    return several[0] if len(several) == 1 else np.concatenate(several)


def widened(reply: r.Looked, columns: int) -> bytes:
    """Its `have` for this many columns; those that another writer has added meanwhile are missing."""
    numbers, wide = len(reply.rows), (columns + 7) // 8
    had = np.frombuffer(reply.have, np.uint8).reshape(numbers, (len(reply.columns) + 7) // 8)
    return np.pad(had, ((0, 0), (0, wide - had.shape[1]))).tobytes() if had.shape[1] < wide else reply.have


def rows_of(replies: list[r.Looked], columns: int) -> Rows:
    """The combination of these answers. `columns`: how many were requested."""
    numbers = joined([reply.rows for reply in replies])
    have = np.zeros((len(numbers), 0), np.bool_)
    if columns:
        flags = np.frombuffer(b"".join(reply.have for reply in replies), np.uint8)
        packed = flags.reshape(len(numbers), (columns + 7) // 8)  # also where there are no rows
        have = np.unpackbits(packed, axis=1, count=columns).astype(np.bool_)
    return Rows(
        numbers,
        [key for reply in replies for key in reply.keys],
        [tags for reply in replies for tags in reply.tags],
        have,
        replies[0].changes,
    )
