"""Places groups on nodes or partitions by rendezvous hashing (Thaler and Ravishankar 1998): each group is placed on the
one for which the hash of both names is highest.

Invariants: all nodes that use the same names compute the same placement, independent of the order of the names. When a
name is added or removed, only the groups that are then or were placed on it move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Index = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_AT_ONCE = 1 << 20  # the most weights in memory at a time


class Rendezvous:
    """Chooses winners among these names. There must be at least one."""

    def __init__(self, nodes: Iterable[bytes]) -> None:
        self.nodes = sorted(nodes)
        self._seeds = np.array([xxhash.xxh3_64_intdigest(node) for node in self.nodes], np.uint64)

    def winners(self, stream: str, groups: Sequence[str | int]) -> Index:
        """For each of these groups of the stream, the position in `nodes` of its winner."""
        if len(self.nodes) == 1:
            return np.zeros(len(groups), np.int64)
        seed = xxhash.xxh3_64_intdigest(stream.encode())
        keys = np.fromiter((xxhash.xxh3_64_intdigest(_encoded(g), seed) for g in groups), np.uint64, len(groups))
        step = max(1, _AT_ONCE // len(self.nodes))
        found = [_mixed(keys[i : i + step, None] ^ self._seeds).argmax(axis=1) for i in range(0, len(keys), step)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def winner(self, stream: str, group: str | int) -> bytes:
        """The winner of one group."""
        return self.nodes[int(self.winners(stream, [group])[0])]


def _encoded(group: str | int) -> bytes:
    return f"#{group}".encode() if isinstance(group, int) else b'"' + group.encode("utf-8", "surrogatepass")


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): each input bit changes half of the output bits. If the
    two hashes were combined without it, the weights of some pairs of nodes would be correlated."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
