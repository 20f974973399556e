"""What one client has put that is to be a stream's or table's, and is under a scope until then.

What always holds: what a client staged and did not hand over goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.batch.ref import BatchRef
from dataplane.node.shards.needed import NeededShards
from dataplane.stream.page import Index
from dataplane.wire import messages as m


class Staged:
    """The scopes of one client."""

    def __init__(self, needed: NeededShards) -> None:
        self._needed = needed
        self._scopes: set[str] = set()

    def begin(self, scope: str) -> None:
        """The client puts something under this scope."""
        if scope.startswith(m.STAGED):
            self._scopes.add(scope)

    def free(self, scope: str) -> None:
        """Free what is under the scope, whoever put it."""
        self._needed.free_scope(scope)
        self._scopes.discard(scope)

    def kept(self, scope: str, ref: BatchRef, again: Sequence[Index] = ()) -> None:
        """What `ref` means of the scope is a stream's or table's; what it does not mean goes, and rows of it that came
        `again`."""
        if scope in self._scopes:
            self._needed.unscope(ref)
            self.free(scope)
            for rows in again:
                self._needed.free(ref[rows])

    def leave(self) -> None:
        """The client has gone."""
        for scope in list(self._scopes):
            self.free(scope)
