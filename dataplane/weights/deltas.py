"""Encodes the difference between two chunks of bytes, and applies it to the older chunk, bit for bit.

A chunk is compared in blocks of `BLOCK` bytes, as elements of one width. For a changed block, the delta has all bytes,
or for each element that differs a byte with the number of equal elements before, and the value. The byte 255 means 255
equal elements and no value. Gradient descent leaves most bfloat16 elements as they are, and changes some everywhere.
Each of these costs its bytes and one more.

    header | kinds uint8 [blocks] | lengths uint32 [blocks] | sums uint64 [blocks] | bodies

Invariants: `apply` writes the chunk that `encode` was given, or raises Corrupt. It compares the checksum (xxh3-64) of
each block, changed or not, and the checksum over these. An invalid delta writes only into its target.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.errors import Corrupt
from dataplane.weights import _sparse

Bytes = npt.NDArray[np.uint8]

BLOCK = 256 << 10
"""The bytes that are compared together, which fit a core's own cache."""

_HEADER = struct.Struct("<4sHHQQ")  # magic, width, nothing, bytes of the chunk, sum of the sums
_MAGIC = b"dpw1"
_SAME, _ALL, _SOME = 0, 1, 2
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LOOK, _LOOKS = 4096, 16  # bytes of a sampled place, and the number of places


def encode(old: Bytes, new: Bytes, width: int, most: int) -> bytes | None:
    """The delta from `old` to `new`, which have equal sizes, a multiple of `width` bytes (1, 2, 4 or 8). None if the
    delta would be larger than `most` bytes."""
    blocks = -(-len(new) // BLOCK)
    kinds, lengths = np.zeros(blocks, np.uint8), np.zeros(blocks, "<u4")
    sums = np.zeros(blocks, "<u8")
    bodies: list[bytes] = []
    room = np.empty(2 * BLOCK + 2, np.uint8)
    left = most - _HEADER.size - 13 * blocks
    for at in range(blocks):
        part = slice(at * BLOCK, (at + 1) * BLOCK)
        before, after = old[part], new[part]
        sums[at] = _sum(after)
        body = _sparse.some(before, after, width, room)
        if body is None:
            kinds[at], body = _ALL, after.tobytes()
        elif body:
            kinds[at] = _SOME
        lengths[at] = len(body)
        left -= len(body)
        if left < 0:
            return None
        bodies.append(body)
    whole = _sum(sums.tobytes())
    header = _HEADER.pack(_MAGIC, width, 0, len(new), whole)
    return b"".join([header, kinds.tobytes(), lengths.tobytes(), sums.tobytes(), *bodies])


def worth(old: Bytes, new: Bytes, width: int) -> bool:
    """Whether a delta is probably worth encoding: in at least half of the sampled places, at most half of the elements
    have changed."""
    step = max(_LOOK, len(new) // _LOOKS // _LOOK * _LOOK)
    looks = [slice(at, at + _LOOK) for at in range(0, len(new) - _LOOK + 1, step)]
    much = [np.count_nonzero(old[at].view(_WIDTHS[width]) != new[at].view(_WIDTHS[width])) * width for at in looks]
    return sum(bool(differ > _LOOK // 2) for differ in much) <= len(looks) // 2


def apply(old: Bytes, deltas: list[Bytes], into: Bytes) -> None:
    """Apply the deltas to `old` one after another, and write the result into `into`. Raises Corrupt, after which the
    content of `into` is undefined."""
    read = [_Delta(delta, len(old)) for delta in deltas]
    if len(old) != len(into) or not read:
        raise Corrupt(f"{len(read)} deltas of {len(old)} bytes for {len(into)}")
    for at in range(-(-len(old) // BLOCK)):
        part = slice(at * BLOCK, (at + 1) * BLOCK)
        block = into[part]
        first = max((i for i, delta in enumerate(read) if delta.kinds[at] == _ALL), default=0)
        if read[first].kinds[at] != _ALL:
            block[:] = old[part]
        for delta in read[first:]:
            delta.patch(at, block)
        if _sum(block) != int(read[-1].sums[at]):
            raise Corrupt(f"block {at} of a version of weights differs from the one published")


def _sum(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


class _Delta:
    """A delta from another process. Raises Corrupt if it is invalid."""

    def __init__(self, data: Bytes, size: int) -> None:
        if len(data) < _HEADER.size:
            raise Corrupt(f"{len(data)} bytes are no delta")
        magic, self.width, _, nbytes, whole = _HEADER.unpack(data[: _HEADER.size].tobytes())
        blocks = -(-nbytes // BLOCK)
        start = _HEADER.size
        if magic != _MAGIC or self.width not in _WIDTHS or nbytes != size or len(data) < start + 13 * blocks:
            raise Corrupt("no delta of this chunk")
        self.kinds = data[start : start + blocks].copy()
        lengths = np.frombuffer(data[start + blocks : start + 5 * blocks].tobytes(), "<u4")
        self.sums = np.frombuffer(data[start + 5 * blocks : start + 13 * blocks].tobytes(), "<u8")
        if _sum(self.sums.tobytes()) != whole:
            raise Corrupt("the sums of a delta are not those that were made")
        self.ends = start + 13 * blocks + np.cumsum(lengths, dtype=np.int64)
        self.starts = self.ends - lengths
        if blocks and self.ends[-1] != len(data):
            raise Corrupt("a delta that was cut")
        self.data = data

    def patch(self, at: int, block: Bytes) -> None:
        """Apply the changes of block `at` to its bytes. Raises Corrupt for an invalid body."""
        kind, body = self.kinds[at], self.data[self.starts[at] : self.ends[at]]
        if kind == _ALL:
            if len(body) != len(block):
                raise Corrupt("a block of a delta that was cut")
            block[:] = body
        elif kind == _SOME:
            if not _sparse.patch(body, block, self.width):
                raise Corrupt("a delta of elements that are not there")
        elif kind != _SAME:
            raise Corrupt(f"a block of kind {kind}")
