"""Columns that one client has put on their way to a stream or table. They are under a scope until then.

Invariant: what a client staged and did not hand over is freed when it goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.batch.ref import BatchRef
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.stream.page import Index
from dataplane.wire import messages as m


class StagedColumns:
    """The scopes of one client."""

    def __init__(self, needed: NeededShards) -> None:
        self._needed = needed
        self._scopes: set[str] = set()

    def begin(self, scope: str) -> None:
        """The client puts shards under this scope."""
        if scope.startswith(m.STAGED):
            self._scopes.add(scope)

    def free(self, scope: str) -> None:
        """Free all shards under the scope."""
        self._needed.free_scope(scope)
        self._scopes.discard(scope)

    def kept(self, scope: str, ref: BatchRef, again: Sequence[Index] = ()) -> None:
        """A stream or table has taken the columns that `ref` refers to. Free the rest of the scope, and the rows
        that came `again`."""
        if scope in self._scopes:
            self._needed.unscope(ref)
            self.free(scope)
            for rows in again:
                self._needed.free(ref[rows])

    def leave(self) -> None:
        """The client has gone."""
        for scope in list(self._scopes):
            self.free(scope)
