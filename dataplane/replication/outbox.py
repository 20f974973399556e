"""Outboxes: the releases of columns that a partition's rows no longer need, for the nodes that store these columns.

An entry releases one reference. Each node that stores a part of the reference's columns, or a copy of them, has an
outbox. The entries of an outbox are numbered from 1 without gaps. So a node recognises an entry that it receives again,
perhaps from another leader. Outboxes are part of the partition's state.

The references that rows need are counted for each node. These counts are not part of the state: they follow from the
rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from dataplane.errors import OwnerDied

_BYTES = 1 << 20  # the most bytes of entries in one message, unless the first entry has more


class OutboxState(msgspec.Struct, array_like=True):
    """The outbox of a node: the number of its last entry, and the entries that the node has not confirmed."""

    node: bytes
    last: int
    entries: list[bytes]


class Outboxes:
    """The outboxes of a partition. Nodes in `lost` get no entries. Iteration gives the nodes with unconfirmed
    entries."""

    def __init__(self, lost: LostNodes, state: Sequence[OutboxState] = ()) -> None:
        self._lost = lost
        self.holders: dict[bytes, int] = {}
        """By node: the number of references with columns on the node that rows need."""
        self._last = {each.node: each.last for each in state}
        self._entries = {each.node: deque(each.entries) for each in state if each.entries}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._entries))

    def hold(self, nodes: Iterable[bytes]) -> None:
        """Count a reference that rows need, for the nodes that store its columns."""
        for node in dict.fromkeys(nodes):
            self.holders[node] = self.holders.get(node, 0) + 1

    def release(self, entry: bytes, nodes: Iterable[bytes]) -> None:
        """Count a reference as no longer needed, and add the entry that releases it for the nodes that are not lost."""
        for node in dict.fromkeys(nodes):
            held = self.holders.pop(node, 0) - 1
            if held > 0:
                self.holders[node] = held
        self.tell(entry, nodes)

    def tell(self, entry: bytes, nodes: Iterable[bytes]) -> None:
        """Add an entry for the nodes that are not lost, without a change of the counts."""
        for node in dict.fromkeys(nodes):
            if node not in self._lost:
                self._last[node] = self._last.get(node, 0) + 1
                self._entries.setdefault(node, deque()).append(entry)

    def recount(self, needed: Iterable[Iterable[bytes]]) -> None:
        """Count the references of each node again. `needed`: the nodes of each reference that rows need. Outboxes of
        lost nodes are removed."""
        self.holders.clear()
        for nodes in needed:
            self.hold(nodes)
        for node in [node for node in self._entries if node in self._lost]:
            del self._entries[node]

    def first(self, node: bytes, most: int) -> tuple[tuple[bytes, ...], int]:
        """At most `most` of the first entries of a node's outbox that fit into a message, and the number of the last of
        these."""
        entries, left = self._entries.get(node, deque()), _BYTES
        some: list[bytes] = []
        for entry in islice(entries, most):
            left -= len(entry)
            if some and left < 0:
                break
            some.append(entry)
        return tuple(some), self._last.get(node, 0) - len(entries) + len(some)

    def last(self, node: bytes) -> int:
        """The number of a node's last entry."""
        return self._last.get(node, 0)

    def confirm(self, node: bytes, last: int) -> None:
        """Remove the entries up to this number, which the node has confirmed."""
        entries = self._entries.get(node, deque())
        for _ in range(min(len(entries), last - (self._last.get(node, 0) - len(entries)))):
            entries.popleft()
        if not entries:
            self._entries.pop(node, None)

    def state(self) -> list[OutboxState]:
        return [OutboxState(node, self._last[node], list(self._entries.get(node, ()))) for node in sorted(self._last)]


ALL = (1 << 63) - 1
"""A number above that of every shard."""

MAX_LOST_NODES = 4096
"""The most nodes that are remembered."""


class LostNodes:
    """The nodes that a partition considers lost, and which of their shards are lost. This is part of the partition's
    state.

    When a node returns, its older shards stay lost, and shards from a given number on count as present. The last
    `MAX_LOST_NODES` nodes that were lost are remembered, and the others count as present.

    `node in lost_nodes` is true from the loss of the node until it returns or is forgotten.
    """

    def __init__(self, state: Iterable[tuple[bytes, int]] = ()) -> None:
        self._before = dict(state)
        self.lost = {node for node, before in self._before.items() if before == ALL}

    def __bool__(self) -> bool:
        return bool(self._before)

    def __contains__(self, node: object) -> bool:
        return node in self.lost

    def there(self, node: bytes, shard: int) -> bool:
        """Whether this shard of the node is not lost."""
        return shard >= self._before.get(node, 0) and node not in self.lost

    def require(self, shards: Iterable[tuple[bytes, int]]) -> None:
        """Raises OwnerDied if one of these shards, given as (node, number), was lost."""
        for node, shard in shards:
            if not self.there(node, shard):
                raise OwnerDied(
                    f"node {node.hex()} was lost: get what has a replica, and put it again", node=node.hex()
                )

    def before(self, node: bytes) -> int:
        """The number below which all shards of the node are lost."""
        return self._before.get(node, 0)

    def lose(self, node: bytes, before: int = ALL) -> None:
        """Mark a node and all of its shards as lost; with `before`, only its shards with lower numbers."""
        self._before.pop(node, None)
        self._before[node] = before
        (self.lost.add if before == ALL else self.lost.discard)(node)
        if len(self._before) > MAX_LOST_NODES:
            oldest = next(iter(self._before))
            del self._before[oldest]
            self.lost.discard(oldest)

    def come_back(self, node: bytes, first: int) -> None:
        """Note that a node has returned, with its shards from number `first` on."""
        if node in self.lost:
            self.lost.remove(node)
            del self._before[node]
            if first > 0:
                self._before[node] = first

    def state(self) -> list[tuple[bytes, int]]:
        """The state for a snapshot."""
        return list(self._before.items())
