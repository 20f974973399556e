"""Validates requests of clients: limits, timeouts, packed integers, and lists with one value for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import LimitExceeded, ProtocolMismatch

Index = npt.NDArray[np.int64]
T = TypeVar("T")
S = TypeVar("S", bound=Sized)

NOTHING: Index = np.empty(0, np.int64)

MAX_TAGS = 64
_MAX_TIMEOUT_S = 365 * 86400.0
_MAX_LENGTH = 1 << 40  # the most items of a row: the sum of 65,536 lengths fits into 63 bits


def bound(what: str, limit: int, asked: int) -> None:
    """Raise LimitExceeded if `asked` is more than the limit."""
    if asked > limit:
        raise LimitExceeded(f"{asked} is more than {limit}: {what}", what=what, asked=asked, limit=limit)


def deadline_of(timeout_s: float) -> Deadline:
    """The deadline of a timeout that begins now. Raises ProtocolMismatch."""
    if not timeout_s >= 0:  # NaN too
        raise ProtocolMismatch(f"a timeout is seconds, not {timeout_s}")
    return Deadline.after(min(timeout_s, _MAX_TIMEOUT_S))


def int64(what: str, packed: bytes) -> Index:
    """Unpack 64-bit integers. Raises ProtocolMismatch."""
    if len(packed) % 8:
        raise ProtocolMismatch(f"{what} that are no 64-bit integers")
    return np.frombuffer(packed, "<i8").astype(np.int64, copy=False)


def numbers(what: str, packed: bytes, count: int) -> Index:
    """Unpack 64-bit integers, one for each row. Raises ProtocolMismatch."""
    return exactly(what, int64(what, packed), count)


def lengths(packed: Mapping[str, bytes], ref: BatchRef) -> dict[str, Index]:
    """The lengths of the rows of each ragged column. Raises ProtocolMismatch."""
    if not packed:
        return {}
    found = {name: numbers(f"lengths of {name!r}", values, len(ref)) for name, values in packed.items()}
    columns, one = ref.columns, len(ref) == 1
    for name, values in found.items():
        if one and name in columns and 0 <= values.item() < _MAX_LENGTH:
            continue
        if name not in columns or (len(values) and not 0 <= values.min() <= values.max() < _MAX_LENGTH):
            raise ProtocolMismatch(f"lengths of {name!r}, which no column has")
    return found


def tags(named: Mapping[str, list[T]], count: int) -> dict[str, list[T]]:
    """The values of each tag, one for each row. Raises ProtocolMismatch, LimitExceeded."""
    bound("tags of an append", MAX_TAGS, len(named))
    return {name: exactly(f"values of the tag {name!r}", values, count) for name, values in named.items()}


def one_a_row(what: str, values: S, count: int) -> S:
    """The values. Raises ProtocolMismatch unless there are none, or one for each row."""
    return exactly(what, values, count) if len(values) else values


def exactly(what: str, values: S, count: int) -> S:
    """The values. Raises ProtocolMismatch unless there are `count`."""
    if len(values) != count:
        raise ProtocolMismatch(f"{len(values)} {what} for {count} rows")
    return values
