"""Places streams, tables and replicas on nodes by rendezvous hashing (Thaler and Ravishankar 1998): on the node for
which the hash of both names is highest.

Invariants: all nodes that know the same names compute the same placement, independent of the order of the names. When
a node is added or removed, only what is then or was placed on it moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def winner(nodes: Iterable[bytes], kind: str, name: str | int) -> bytes:
    """The node on which this name of a kind is placed. There must be at least one node."""
    named = f"{kind}\0{name}\0".encode()
    return max(nodes, key=lambda node: (hashlib.blake2b(named + node, digest_size=8).digest(), node))
