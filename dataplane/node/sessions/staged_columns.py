"""Staged columns: a client has put them under a scope, and a stream or table is to take them.

Invariant: staged columns that no stream or table has taken are freed when the client ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.batch.ref import BatchRef
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.stream.page import Index
from dataplane.wire import row_messages as rm


class StagedColumns:
    """The scopes of one client."""

    def __init__(self, needed: NeededShards) -> None:
        self._needed = needed
        self._scopes: set[str] = set()

    def begin(self, scope: str) -> None:
        """Note a scope under which the client puts shards."""
        if scope.startswith(rm.STAGED):
            self._scopes.add(scope)

    def free(self, scope: str) -> None:
        """Free all shards under the scope."""
        self._needed.free_scope(scope)
        self._scopes.discard(scope)

    def kept(self, scope: str, ref: BatchRef, again: Sequence[Index] = ()) -> None:
        """End a scope after a stream or table has taken the columns of `ref`: free all other shards of the scope, and
        the rows `again` of `ref`, which the stream or table had already."""
        if scope in self._scopes:
            self._needed.unscope(ref)
            self.free(scope)
            for rows in again:
                self._needed.free(ref[rows])

    def leave(self) -> None:
        """Free all scopes, since the client has ended."""
        for scope in list(self._scopes):
            self.free(scope)
