"""The answers to requests about a table. They are the same for a table of a node outside a cluster and for a partition.

A table of None does not exist: a request that names rows is refused, and a request for all rows finds none. The size of
each answer is bounded; the requester asks for the rows after the last one of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded, Misuse, ProtocolMismatch
from dataplane.stream.page import NONE, Index
from dataplane.stream.requests import Succeeded
from dataplane.table import requests as r
from dataplane.table.table import TableRows
from dataplane.table.write_effects import UnneededCells

MAX_TAG_BYTES = 64 << 10
"""The most bytes of the tags of one row."""

_PAGE = 1 << 15  # the most rows whose metadata is in one message
_NUMBERS = 1 << 18  # the most numbers of rows in one message
_PAGE_BYTES = 1 << 20  # the most bytes of keys and tags in one message; flags take at most as many

_encode = msgspec.msgpack.Encoder().encode


def there(name: str, table: TableRows | None) -> TableRows:
    """The table. Raises Misuse if it does not exist."""
    if table is None:
        raise Misuse(f"there is no table {name!r}: nothing was written to it yet, or it was dropped")
    return table


def named(keys: list[str], rows: Index) -> list[str] | Index:
    """Rows by key or, without keys, by number."""
    return keys or rows


# Reading


def answer(name: str, table: TableRows | None, asked: r.Question) -> r.AnyResult | None:
    """The answer; None if a request for ready rows finds too few. Raises Misuse."""
    match asked:
        case r.Number():
            return numbered(there(name, table).numbers(asked.keys) if asked.keys else NONE)
        case r.Read():
            found = there(name, table)
            numbers = found.numbers(named(asked.keys, asked.rows))
            return r.Referred(found.read(numbers, asked.columns).encode())
        case r.DescribeColumns():
            if table is None or not table.cells.schema:
                return r.Referred(b"")
            return r.Referred(table.cells.empty(table.cells.schema).encode())
        case r.LookRows():
            return _look(name, table, asked)
        case r.FindReady():
            return _ready(table, asked)
        case r.FindClaim():
            return given(None if table is None else table.claims.find(asked.task, asked.claim_id))
        case r.Claimed():
            return _claimed(name, table, asked)


def numbered(numbers: Index) -> r.RowNumbers:
    """An answer with the first of these numbers, as many as fit into one message."""
    told = numbers[:_NUMBERS]
    return r.RowNumbers(told, len(told) < len(numbers))


def given(rows: Index | None) -> r.ClaimedRows:
    """The answer to a claim. `rows`: the claimed rows; None if the claim was not granted."""
    return r.ClaimedRows(granted=False) if rows is None else r.ClaimedRows(granted=True, rows=rows)


def _look(name: str, table: TableRows | None, asked: r.LookRows) -> r.Looked:
    if table is None or table.changes == asked.since:
        if not asked.all and not asked.missing_ok and (asked.keys or len(asked.rows)):
            there(name, table)
        return r.Looked(0 if table is None else table.changes)
    if asked.all:
        numbers, more = table.after(asked.after, _most(asked.columns), _PAGE_BYTES)
    else:
        wanted = named(asked.keys, asked.rows)
        numbers, more = table.known(wanted) if asked.missing_ok else table.numbers(wanted), False
    seen = table.look(numbers, asked.columns, tags=asked.tags)
    return r.Looked(table.changes, seen.numbers, seen.keys, seen.tags, _bits(seen.have), more)


def seen_all(table: TableRows, numbers: Index) -> r.Looked:
    """The answer with the metadata of these rows of one write, as many as fit, and the columns of the table."""
    names = list(table.cells.schema)
    seen = table.look(table.first(numbers, _PAGE_BYTES)[: _most(names)], names)
    more = len(seen.numbers) < len(numbers)
    return r.Looked(table.changes, seen.numbers, seen.keys, seen.tags, _bits(seen.have), more, columns=names)


def _most(columns: Sequence[str]) -> int:
    """The most rows whose metadata is in one message, with flags for these columns."""
    return max(1, min(_PAGE, _PAGE_BYTES // max(1, len(columns) // 8)))


def _bits(have: Any) -> bytes:
    return np.packbits(have, axis=1).tobytes() if have.shape[1] else b""


def _ready(table: TableRows | None, asked: r.FindReady) -> r.RowNumbers | None:
    if table is None:
        return numbered(NONE) if asked.least <= 0 else None
    first = asked.after < 0  # a claim has no pages: its rows are in any order, and fit into one message
    given_before = table.claims.find(asked.task, asked.claim_id) if asked.claim_id and first else None
    if given_before is not None:
        return r.RowNumbers(given_before)
    numbers = table.ready(asked.columns, asked.task or None)
    numbers = numbers[np.searchsorted(numbers, asked.after, side="right") :]
    return numbered(numbers) if len(numbers) >= asked.least else None


def _claimed(name: str, table: TableRows | None, asked: r.Claimed) -> r.Flagged:
    if table is None:
        if not asked.all and len(asked.rows):
            there(name, table)
        return r.Flagged()
    numbers, more = asked.rows, False
    if asked.all:
        numbers, more = table.after(asked.after, _NUMBERS)
    flags = table.claimed(asked.task, numbers)
    return r.Flagged(flags.tobytes(), int(numbers[-1]) if len(numbers) else -1, more)


# Writing


def check_write(asked: r.Upsert, ref: BatchRef | None) -> None:
    """Validate a write without the table. Raises Misuse, ProtocolMismatch."""
    count = len(asked.keys) or len(asked.rows)
    if not all(asked.keys):
        raise Misuse("a key is a text of one character or more")
    if len(asked.tags) not in (0, count):
        raise ProtocolMismatch(f"{len(asked.tags)} tags for {count} rows")
    if ref is not None and len(ref) != count:
        raise ProtocolMismatch(f"{len(ref)} rows of columns for {count} rows")


def write(table: TableRows, asked: r.Upsert, ref: BatchRef | None) -> tuple[Index, list[UnneededCells]]:
    """Write rows. Returns their numbers, and the cells that are no longer needed. Raises as `TableRows.upsert`;
    LimitExceeded if the tags of a row become too large."""
    rows = named(asked.keys, asked.rows)
    sizes = _tag_bytes(table, rows, asked.tags)
    return table.upsert(rows, ref, asked.tags, sizes)


def _tag_bytes(table: TableRows, rows: list[str] | Index, tags: Sequence[Mapping[str, Any]]) -> Index:
    """Upper bounds of the size of the merged tags of each row. Tags that replace others count twice, until that exceeds
    the limit. Raises LimitExceeded."""
    if not tags:
        return NONE
    sizes = table.tag_bytes(rows) + np.fromiter((len(_encode(each)) for each in tags), np.int64, len(tags))
    for row in np.flatnonzero(sizes > MAX_TAG_BYTES).tolist():
        sizes[row] = len(_encode({**table.tags(rows[row : row + 1])[0], **tags[row]}))
    most, what = int(sizes.max()), "bytes of the tags of a row"
    if most > MAX_TAG_BYTES:
        raise LimitExceeded(f"{most} is more than {MAX_TAG_BYTES}: {what}", what=what, asked=most, limit=MAX_TAG_BYTES)
    return sizes


def wrote(table: TableRows, asked: r.Upsert, numbers: Index) -> r.RowNumbers | r.Looked:
    return seen_all(table, numbers) if asked.look else numbered(numbers)


def act(table: TableRows, asked: r.ClearRows | r.Claim | r.Release) -> tuple[r.AnyResult, list[UnneededCells]]:
    """Change an existing table. Returns the answer, and the cells that are no longer needed. Raises Misuse,
    LimitExceeded."""
    match asked:
        case r.ClearRows():
            return Succeeded(), table.clear(named(asked.keys, asked.rows))
        case r.Claim():
            return given(table.claim(asked.task, asked.rows, asked.give, asked.claim_id)), []
        case r.Release():
            table.release(asked.task or None, None if asked.all else asked.rows)
            return Succeeded(), []
