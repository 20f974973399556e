"""Rows in progress, which are begun, extended piece by piece and finished, and the producers of these rows.

A row in progress has a number, a key and a group like any row, and counts as one: its group is incomplete without it,
and a closed stream does not end before it is finished or dropped. But it is not delivered: its columns have no bits,
and are in a layer without names (`page`), in a column batch of pieces (`column_batch`). When the row is finished, its
columns get their bits and the row gets its policy version. Until then it has none (`row_metadata.UNFINISHED`), so that
`max_lag` does not wait for it.

The producer of a row holds a token, a random number. A process that takes the row over draws a new token; the old one
is refused from then on. Tokens, pieces and versions are replicated. Only the leader knows the leases. A lease runs from
the producer's last request or, at a new leader, from the first time that the leader checks it; it ends at once if the
producer's process ends.

Invariants: each piece is added once, in the order of the numbers, and only with the token of the row. The bytes of
pieces count for the stream. The tokens of finished and abandoned rows are remembered for a while, so that a repeated
request does nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.concat import joined, require_alike
from dataplane.batch.ref import BatchRef
from dataplane.errors import LeaseExpired, Misuse, SchemaMismatch
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.page import Index
from dataplane.stream.pieces import Begun, Listed, RowBeginning, RowPiece
from dataplane.stream.row_metadata import RowMetadata
from dataplane.stream.rows import StreamRows

MAX_ENDED = 1 << 14
"""Tokens of finished and abandoned rows that are remembered, the latest ones."""

MAX_PIECES = 1 << 16
"""Pieces of a row, without the one that finishes it."""


@dataclass(slots=True)
class UnfinishedRowsTable:
    """The rows in progress among `rows`, whose metadata is in `row_metadata`."""

    rows: StreamRows
    metadata: RowMetadata
    begun: dict[int, Begun] = field(default_factory=dict)
    ended: dict[int, None] = field(default_factory=dict)
    _until: dict[int, float] = field(default_factory=dict)
    _clients: dict[int, Hashable] = field(default_factory=dict)
    _left: dict[int, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.begun)

    # pieces

    def begin(self, row: int, begin: RowBeginning, version: int, now: float) -> None:
        self.begun[row] = Begun(row, begin.token, begin.client, begin.lease_s, begin.tokens, version)
        self._until[row] = now + begin.lease_s
        self.hide(row)

    def hide(self, row: int) -> None:
        """Hide the row from all tasks: move its columns to the layer without names."""
        page, inside = self.rows.place(row)
        for layer in [layer for names, layer in page.layers.items() if names and layer.batch[inside] >= 0]:
            number, layer.batch[inside] = int(layer.batch[inside]), -1
            hidden = page.layer(())
            hidden.batch[inside], hidden.index[inside] = number, 0
            first = self.rows.batches[number]
            piece = ColumnBatch(first.ref, 1, spares=first.spares)
            self.rows.batches[number] = ColumnBatch.whole(first.ref, (piece,))
        page.columns[inside] = 0

    def require(self, row: int, *tokens: int) -> Begun:
        """The row with this number. Raises LeaseExpired unless it is in progress and its producer has one of these
        tokens."""
        begun = self.begun.get(row)
        if begun is None or begun.token not in tokens:
            why = (
                "was taken up by another"
                if begun is not None
                else "is in progress no more: it was finished, or dropped"
            )
            raise LeaseExpired(f"the row {why}; pieces appended to it are refused")
        return begun

    def is_new(self, row: int, piece: RowPiece) -> bool:
        """Whether the piece is the next one; False if it was added before. Raises LeaseExpired if the row is not in
        progress or has another producer. Raises Misuse if the piece is neither the next nor the latest one, or exceeds
        `MAX_PIECES`."""
        if piece.last and piece.token in self.ended:
            return False
        begun = self.require(row, piece.token)
        if piece.number == begun.pieces - 1 and piece.digest == begun.digest:
            return False
        if piece.number != begun.pieces or (begun.pieces >= MAX_PIECES and not piece.last):
            raise Misuse(f"piece {piece.number} of a row that has {begun.pieces} others, of at most {MAX_PIECES}")
        return True

    def check(self, row: int, ref: BatchRef) -> None:
        """Raises SchemaMismatch if these columns have other types than in the stream, or in earlier pieces of the row,
        and Misuse if they are not of one row."""
        if len(ref) != 1:
            raise Misuse(f"a piece of {len(ref)} rows; it is of one")
        self.rows.schema.fits(ref)
        pieces = self.pieces(row)
        for name, found in ref.schema.items():
            before = next((each.ref.schema[name] for each in reversed(pieces) if name in each.ref.columns), None)
            if before is not None:
                require_alike(name, (before, found))

    def grow(
        self, row: int, piece: RowPiece, ref: BatchRef, lengths: Mapping[str, Index], spares: Sequence[bytes]
    ) -> None:
        """Add the next piece, after `is_new` and `check`. `lengths`: by column, the length of its array, [1]. `spares`:
        nodes that have copies. Raises LimitExceeded for too many columns of the stream."""
        self.rows.schema.add(ref)
        begun, number = self.begun[row], self._number(row)
        before = self.rows.batches[number]
        more = ColumnBatch(ref, 1, spares=tuple(spares))
        self.rows.batches[number] = ColumnBatch.whole(before.ref, (*before.pieces, more))
        places = self.rows.places(np.array([row]))
        for name, length in lengths.items():
            joined_to = self.metadata.lengths(places, name) if ref.schema[name].varying == 1 else 0
            self.metadata.measure(places, {name: joined_to + length})
        count = int(lengths[begun.tokens][0]) if begun.tokens in lengths else 0
        begun.pieces += 1
        begun.digest = piece.digest
        if count and begun.spans and begun.spans[-1][0] == piece.version:
            begun.spans[-1] = piece.version, begun.spans[-1][1] + count
        elif count:
            begun.spans.append((piece.version, count))

    def finish(self, row: int) -> None:
        """Finish the row: it may be delivered to tasks."""
        page, inside = self.rows.place(row)
        number = self._number(row)
        batch = self.rows.batches[number]
        ref = joined([piece.ref for piece in batch.pieces])
        self.rows.batches[number] = ColumnBatch.whole(ref, batch.pieces)
        page.layers[()].batch[inside] = -1
        layer = page.layer(tuple(sorted(ref.columns)))
        layer.batch[inside], layer.index[inside] = number, 0
        mask = self.rows.schema.mask(ref.columns)
        page.columns[inside] = 0 if mask is None else mask
        page.changes += 1
        self.end(row)

    def end(self, row: int) -> None:
        """Remove the row from those in progress: its producer has finished it or given it up."""
        self.ended[self.begun[row].token] = None
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]
        self.forget(np.array([row]))

    def forget(self, rows: Index) -> None:
        """Forget rows that are finished or gone."""
        for row in rows.tolist() if self.begun else ():
            if self.begun.pop(row, None) is not None:
                self._until.pop(row, None)
                self._clients.pop(row, None)
                self._left.pop(row, None)

    def refuse(self, rows: Index) -> None:
        """Raises Misuse if one of these rows is in progress."""
        if self.begun and (row := next((row for row in rows.tolist() if row in self.begun), None)) is not None:
            raise Misuse(
                f"row {row} is in progress: its producer appends to it, and others extend it once it is finished"
            )

    # the producer

    def take(self, row: int, token: int, client: str, lease_s: float, now: float) -> None:
        """Make the holder of this token the producer of the row."""
        begun = self.begun[row]
        begun.token, begun.client, begun.lease_s = token, client, lease_s
        self._left.pop(row, None)
        self._until[row] = now + lease_s

    def free(self, row: int, now: float) -> bool:
        """Whether the row has no producer."""
        begun = self.begun[row]
        if row in self._left or not (begun.client or row in self._clients):
            return True
        return now >= self._until.setdefault(row, now + begun.lease_s)

    def first_free(self, now: float) -> int | None:
        """The oldest row in progress without a producer."""
        return min((row for row in self.begun if self.free(row, now)), default=None)

    def reserve(self, row: int, client: Hashable, lease_s: float, now: float) -> None:
        """Reserve the row for this client until the command that makes it the producer is applied."""
        self._clients[row], self._until[row] = client, now + lease_s
        self._left.pop(row, None)

    def require_free(self, row: int, token: int, now: float) -> None:
        """Raises LeaseExpired if the row has a producer with another token, or is not in progress any more."""
        begun = self.begun.get(row)
        if begun is None:
            raise LeaseExpired("the row is in progress no more: it was finished, or dropped")
        if begun.token != token and not self.free(row, now):
            left_s = self._until[row] - now
            raise LeaseExpired(
                "this row is held by another process, or by another object in this one: it is free once it is released,"
                f" or the process ends, or in {left_s:.1f} s if nothing is appended"
            )

    def heard(self, row: int, token: int, now: float) -> None:
        """Renew the lease of the producer, which has made a request. Raises LeaseExpired if the row is finished or has
        another producer."""
        self._until[row] = now + self.require(row, token).lease_s
        self._left.pop(row, None)

    def release(self, row: int, token: int) -> None:
        """End the lease of the producer, so that others can take the row over. Raises LeaseExpired if the row is
        finished or has another producer."""
        self.require(row, token)
        self._left[row] = None

    def leave(self, client: Hashable) -> None:
        """Free the rows of a client that has gone."""
        for row, begun in self.begun.items():
            if client in (begun.client, self._clients.get(row)):
                self._left[row] = None

    @property
    def clients(self) -> set[str]:
        return {begun.client for row, begun in self.begun.items() if begun.client and row not in self._left}

    def forget_leases(self) -> None:
        self._until.clear()
        self._clients.clear()
        self._left.clear()

    # queries

    def listed(self, row: int, now: float, key: str, group: Any, tags: Mapping[str, list[Any]]) -> Listed:
        """The row as `Listed`, without columns."""
        begun = self.begun[row]
        return Listed(
            row,
            key,
            group,
            begun.version,
            {name: value for name, (value,) in tags.items() if value is not None},
            begun.tokens,
            begun.pieces,
            list(begun.spans),
            max(0.0, now - self._arrived(row)),
            self.free(row, now),
        )

    def _arrived(self, row: int) -> float:
        return float(self.metadata.arrived(self.rows.places(np.array([row])))[0])

    def oldest(self) -> float | None:
        """The beginning of the oldest row in progress; None if there is none."""
        return self._arrived(min(self.begun)) if self.begun else None

    def columns(self, row: int) -> BatchRef:
        """A reference to the columns of all pieces, joined."""
        return joined([piece.ref for piece in self.pieces(row)])

    def _number(self, row: int) -> int:
        page, inside = self.rows.place(row)
        return int(page.layers[()].batch[inside])

    def pieces(self, row: int) -> Sequence[ColumnBatch]:
        """The columns of each piece."""
        return self.rows.batches[self._number(row)].pieces

    # in a snapshot

    def copy(self, rows: StreamRows, metadata: RowMetadata) -> UnfinishedRowsTable:
        """A copy, for copies of the rows and their metadata."""
        begun = {row: msgspec.structs.replace(each, spans=list(each.spans)) for row, each in self.begun.items()}
        return UnfinishedRowsTable(rows, metadata, begun)

    def state(self, rows: Index) -> list[Begun]:
        """The rows among these that are in progress."""
        return [self.begun[row] for row in rows.tolist() if row in self.begun] if self.begun else []


def check_joined(unfinished: UnfinishedRowsTable, row: int, ref: BatchRef) -> None:
    """Raise SchemaMismatch for dense columns of a new piece that would replace those of an earlier piece, and for a
    dense column of counted tokens."""
    pieces, counted = unfinished.pieces(row), unfinished.begun[row].tokens
    for name, found in ref.schema.items():
        again = found.shape and any(name in each.ref.columns for each in pieces)
        if found.kind == "dense" and (again or name == counted):
            raise SchemaMismatch(
                f"pieces of column {name!r} can't be joined: it is {found!r}, and dense arrays replace each other;"
                " pass a list with the array of this row, [array]",
                column=name,
                expected="ragged",
                found=repr(found),
            )
