"""Rows that come to the homes here because their own have died, as those tell of them that hold their columns.

What always holds: a row that is announced twice comes once, and so do its columns.
"""

from __future__ import annotations

import logging

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt
from dataplane.node import packed
from dataplane.node.homes import Homes
from dataplane.node.wholes import Whole, Wholes
from dataplane.stream.moving import Columns, adopt, renumbered, some_columns
from dataplane.stream.snapshot import block_rows, put_columns
from dataplane.wire import peer_messages as pm

log = logging.getLogger(__name__)

Encoded = list[tuple[bytes, int, bytes, dict[str, bytes]]]


class Adopting:
    """The rows that have come to one node."""

    def __init__(self, homes: Homes, wholes: Wholes) -> None:
        self._homes = homes
        self._wholes = wholes
        self._came: dict[tuple[str, int, bytes], dict[int, int]] = {}  # by name, generation, token: numbers then, now

    def rows(self, request: pm.Announce) -> pm.Announced:
        """Rows come. Raises Closed, Corrupt, LimitExceeded, SchemaMismatch, ProtocolMismatch."""
        whole = self._wholes.opened_as(request.name, request.settings, request.generation)
        stream = whole.stream
        known = self._came.setdefault((whole.name, whole.generation, request.token), {})
        numbers = block_rows(request.block)
        new = np.array([number not in known for number in numbers.tolist()], np.bool_)
        were, came = adopt(stream.home, renumbered(request.block, numbers[new], numbers[new]), stream.clock())
        known.update(zip(were.tolist(), came.tolist(), strict=True))
        self._put(whole, some_columns(_decoded(request.columns), were, came))
        stream.home.adopted(stream.clock())
        there = [number for number in numbers.tolist() if number in known]
        return _announced(request.id, there, known)

    def columns(self, request: pm.AnnounceColumns) -> pm.Announced:
        """Columns come, of which those are taken whose rows are here. Raises ProtocolMismatch."""
        whole = self._wholes.named(request.name)
        if whole is None:
            return pm.Announced(request.id, b"", b"")
        columns = _decoded(request.columns)
        known = self._came.get((whole.name, whole.generation, request.token), {})
        there = sorted({row for rows, _, _, _ in columns for row in rows.tolist() if row in known})
        if there:
            came = np.array([known[row] for row in there], np.int64)
            self._put(whole, some_columns(columns, np.array(there, np.int64), came))
            whole.stream.home.adopted(whole.stream.clock())
        return _announced(request.id, there, known)

    def _put(self, whole: Whole, columns: Columns) -> None:
        home = whole.stream.home
        for rows, task, ref, lengths in columns:
            there = home.books.rows.there(rows)
            if not there.any():
                continue
            if not there.all():
                at = np.flatnonzero(there)
                rows, ref = rows[at], ref[at]
                lengths = {name: values[at] for name, values in lengths.items()}
            self._homes.keep(ref)
            try:
                put_columns(home, rows, task, ref, lengths)
            except Corrupt as error:
                self._homes.forget(ref)
                log.warning("columns of stream %r that were announced are not taken: %s", whole.name, error)

    def forget(self, whole: Whole) -> None:
        """The stream was dropped."""
        for key in [key for key in self._came if key[:2] == (whole.name, whole.generation)]:
            del self._came[key]


def _decoded(columns: Encoded) -> Columns:
    found: Columns = []
    for rows, task, encoded, lengths in columns:
        ref = BatchRef.decode(encoded)
        found.append((packed.numbers("rows", rows, len(ref)), task, ref, packed.lengths(lengths, ref)))
    return found


def _announced(identifier: int, were: list[int], known: dict[int, int]) -> pm.Announced:
    came = [known[number] for number in were]
    return pm.Announced(identifier, np.array(were, np.int64).tobytes(), np.array(came, np.int64).tobytes())
