"""The layout of one publisher's part of a version: the position of each slice of a tensor in the part's chunks, and the
encoding of a part.

Invariants: an encoding comes from another process, so `decode` refuses entries that lie outside their chunks, and
slices that lie outside their tensors.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np

from dataplane.batch.dtypes import storage
from dataplane.batch.field import Field
from dataplane.errors import Corrupt
from dataplane.weights.slices import Box, box_of

MAX_DIMENSIONS = 64

COLUMN, FIELD = "bytes", Field("ragged", "uint8", (None,))
"""The column of a chunk, and of a delta: one row of bytes."""


class TensorSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slice of a tensor: the shape of the whole tensor, the offset and size of the slice, and its bytes,
    row-major, from `start` in a chunk. A slice without elements is in no chunk (-1)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    extent: tuple[int, ...]
    chunk: int
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes of the slice."""
        return math.prod(self.extent) * storage(self.dtype).itemsize

    @property
    def box(self) -> Box:
        """The box of the slice in the tensor."""
        return box_of(self.offsets, self.extent)


class Base(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a chunk of an older version of the same part, to which the delta of a chunk is applied."""

    version: int
    node: bytes
    shard: int


class PublishedPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of one of `ranks` publishers of a version. `chunks`: the bytes of each. `entries`: the slices in the
    chunks. `bases`: by chunk with a delta. A chunk that equals that of the older version is stored once for both."""

    version: int
    rank: int
    ranks: int
    chunks: list[int]
    entries: list[TensorSlice]
    bases: dict[int, Base] = {}

    def encode(self) -> bytes:
        """The part as bytes."""
        return msgspec.msgpack.encode(self)

    @property
    def nbytes(self) -> int:
        """The bytes of all chunks."""
        return sum(self.chunks)

    @property
    def layout(self) -> bytes:
        """A digest of the chunks' sizes and slices. Versions of one layout differ only in the bytes."""
        said = msgspec.msgpack.encode((self.rank, self.ranks, self.chunks, self.entries))
        return hashlib.blake2b(said, digest_size=16).digest()


class PartLocation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a part whose chunks are all on one node: the digest of its layout, the node, and the shard of
    each chunk (int64). A reader on this node that knows the layout needs nothing else."""

    layout: bytes
    node: bytes
    shards: bytes

    def encode(self) -> bytes:
        """The location as bytes."""
        return msgspec.msgpack.encode(self)

    def numbers(self) -> list[int]:
        """The shard of each chunk."""
        found: list[int] = np.frombuffer(self.shards, "<i8").tolist()
        return found


def placement(encoded: object) -> PartLocation | None:
    """The location that `PartLocation.encode` encoded; None for anything else."""
    if not isinstance(encoded, bytes):
        return None
    try:
        found = msgspec.msgpack.decode(encoded, type=PartLocation)
    except msgspec.DecodeError:
        return None
    return None if len(found.shards) % 8 else found


def decode(encoded: bytes) -> PublishedPart:
    """The part that `PublishedPart.encode` encoded. Raises Corrupt for other bytes."""
    try:
        part = msgspec.msgpack.decode(encoded, type=PublishedPart)
        for entry in part.entries:
            _check(part, entry)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt(f"no part of a version of weights: {error}") from None
    return part


def _check(part: PublishedPart, entry: TensorSlice) -> None:
    """Raise ValueError unless the entry fits."""
    sizes = (entry.shape, entry.offsets, entry.extent)
    if len({len(each) for each in sizes}) != 1 or len(entry.shape) > MAX_DIMENSIONS:
        raise ValueError(f"{entry.name!r} has shapes of different dimensions")
    if any(not 0 <= o <= o + e <= n for n, o, e in zip(*sizes, strict=True)):
        raise ValueError(f"a slice of {entry.name!r} does not lie in it")
    nbytes = entry.nbytes
    if entry.chunk < 0 and nbytes:
        raise ValueError(f"a slice of {entry.name!r} is in no chunk")
    if entry.chunk >= 0:
        there = entry.chunk < len(part.chunks) and 0 <= entry.start <= entry.start + nbytes <= part.chunks[entry.chunk]
        if not there or entry.start % storage(entry.dtype).itemsize:
            raise ValueError(f"a slice of {entry.name!r} does not lie in its chunk")
