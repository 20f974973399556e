"""Rows of tables: checks of keys, numbers and tags, the division of rows into messages, and the content of answers.

Invariant: arrays of an answer are views of the message, read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.errors import LimitExceeded, Misuse
from dataplane.table import requests as r
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TableSlice:
    """Rows of a table: their numbers, keys and tags. `have`: bool[rows, columns], whether each row has each requested
    column. `changes`: the state of the table, for `since` of a later `look`."""

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
    """The packed `have` flags of a reply, widened to this number of columns. The flags of columns that another writer
    has added meanwhile are false."""
    numbers, wide = len(reply.rows), (columns + 7) // 8
    had = np.frombuffer(reply.have, np.uint8).reshape(numbers, (len(reply.columns) + 7) // 8)
    return np.pad(had, ((0, 0), (0, wide - had.shape[1]))).tobytes() if had.shape[1] < wide else reply.have


def rows_of(replies: list[r.Looked], columns: int) -> TableSlice:
    """Combine these answers. `columns`: the number of requested columns."""
    numbers = joined([reply.rows for reply in replies])
    have = np.zeros((len(numbers), 0), np.bool_)
    if columns:
        flags = np.frombuffer(b"".join(reply.have for reply in replies), np.uint8)
        packed = flags.reshape(len(numbers), (columns + 7) // 8)  # also if there are no rows
        have = np.unpackbits(packed, axis=1, count=columns).astype(np.bool_)
    return TableSlice(
        numbers,
        [key for reply in replies for key in reply.keys],
        [tags for reply in replies for tags in reply.tags],
        have,
        replies[0].changes,
    )


Named: TypeAlias = Sequence[str] | Index | Sequence[int]
"""Rows by their keys, or by their numbers."""

_NAMES_BYTES = m.MAX_FRAME // 2  # the most bytes of keys and tags in one message


def _plain(value: Any) -> Any:
    """The value of a NumPy scalar, or of a tensor without dimensions."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decode = msgspec.msgpack.Decoder(list[dict[str, Any]]).decode


def rows_named(rows: Any) -> tuple[list[str], Index]:
    """The keys or numbers of rows; the other list is empty. Raises Misuse, LimitExceeded."""
    nothing = np.empty(0, np.int64)
    if isinstance(rows, str | bytes):
        raise Misuse(f"rows are named by a list of keys or numbers, not by {rows!r:.100}")
    if isinstance(rows, np.ndarray) or hasattr(rows, "tolist"):
        array = np.asarray(rows)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iuU"):
            raise Misuse(f"rows are named by a list of keys or numbers, not by {array.dtype} {array.shape}")
        if array.dtype.kind != "U":
            return [], np.ascontiguousarray(array, np.int64)
    listed = arguments.listed("rows", rows)
    if listed and not isinstance(listed[0], str):
        return [], np.array([arguments.whole("a row's number", each) for each in listed], np.int64)
    return keys_of_rows(listed), nothing


def by_number(rows: Any) -> Index:
    """The row numbers as an array. Raises Misuse if rows are named by keys."""
    keys, numbers = rows_named(rows)
    if keys:
        raise Misuse(f"rows are named by their numbers here, not by keys; table.numbers({keys[:3]!r}) gives them")
    return numbers


def keys_of_rows(keys: Any) -> list[str]:
    found = arguments.names("keys", keys)
    long = next((key for key in found if len(key) > sm.MAX_SCOPE), None)
    if long is not None:
        raise LimitExceeded(
            f"a key of {len(long)} characters; at most {sm.MAX_SCOPE}",
            what="characters of a key",
            asked=len(long),
            limit=sm.MAX_SCOPE,
        )
    return found


def tags_of(tags: Any, count: int) -> list[dict[str, Any]]:
    """A dict for each row, which a message can hold; empty for None. Raises Misuse."""
    if tags is None:
        return []
    listed = arguments.listed("tags", tags)
    if len(listed) != count or not all(isinstance(each, Mapping) for each in listed):
        raise Misuse(f"tags are a list with a dict for each row, {count} here, such as [{{'hard': True}}]")
    try:
        encoded = _encoder.encode(listed)
        found: list[dict[str, Any]] = _decode(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise Misuse(f"a tag is a value that MessagePack holds, by a name as text: {error}") from None
    return found


def ranges(count: int, keys: list[str], tags: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Divide rows into messages. Returns the (start, stop) of each."""
    pending, found = [(0, count)], []
    while pending:
        start, stop = pending.pop()
        large = stop - start > rm.MAX_ROWS or (
            stop - start > 1
            and sum(map(len, keys[start:stop])) * 4 + len(_encoder.encode(tags[start:stop])) > _NAMES_BYTES * 2
            and len(_encoder.encode(keys[start:stop])) + len(_encoder.encode(tags[start:stop])) > _NAMES_BYTES
        )
        if large:
            middle = (start + stop) // 2
            pending += [(middle, stop), (start, middle)]
        else:
            found.append((start, stop))
    return found
