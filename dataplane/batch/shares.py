"""A rank's share of packed tokens: rows one behind another, cut into equal runs that do not keep to rows."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.cuts import MOST_RANKS, Index
from dataplane.errors import Misuse


def packed_share(lengths: npt.ArrayLike, rank: int, ranks: int, *, multiple: int = 1) -> tuple[Index, Index]:
    """What of each row is in the run of packed tokens that one of `ranks` ranks has: a start and a stop a row, int64
    [rows], for `BatchRef.slice_rows`.

    Rows of these lengths, each padded to a `multiple`, are packed one behind another, and the pack is padded until each
    rank has as many tokens: the cut of Megatron-LM's sequence parallelism and of Ulysses. What would be padding is left
    out. `lengths` are of whole rows, or of what `share_rows` leaves of them. Raises Misuse.
    """
    try:
        own, count, unit = operator.index(rank), operator.index(ranks), operator.index(multiple)
        rows = np.asarray(lengths)
        rows = rows.astype(np.int64, casting="safe" if rows.size else "unsafe")
    except (TypeError, ValueError):
        raise Misuse("lengths are integers, one a row; rank, ranks and multiple are integers") from None
    if rows.ndim != 1 or rows.min(initial=0) < 0 or not (0 <= own < count <= MOST_RANKS and unit >= 1):
        raise Misuse(f"a share is of a rank of so many and of rows of lengths, not of {_told(rank, ranks, multiple)}")
    padded = -(-rows // unit) * unit
    begins = np.cumsum(padded) - padded
    part = -(-int(padded.sum()) // count)
    start = np.clip(own * part - begins, 0, rows)
    return start, np.clip((own + 1) * part - begins, start, rows)


def _told(*values: Any) -> str:
    return ", ".join(f"{value!r:.50}" for value in values)
