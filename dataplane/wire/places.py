"""The places of pinned shards, as one block of numbers: six for each shard, 64 bits, little-endian.

The answer about a reference to thousands of shards is one message. If it had a list of values for each shard, encoding
and decoding those would take most of the time. So each distinct layout is sent once, and the numbers in which shards
differ are sent as one table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolMismatch

Table = npt.NDArray[np.int64]


class ShardPlace(NamedTuple):
    """A shard and its place. `segment`: -1 means that it is at `offset` of the bytes that the answer contains.
    `layout`: the index of its layout among those of the answer. `live`: the position of its live blocks among those of
    the answer, from 1; 0 if all of its rows are live."""

    shard: int
    segment: int
    offset: int
    size: int
    layout: int
    live: int


WIDTH = len(ShardPlace._fields)
_ONE = struct.Struct(f"<{WIDTH}q")


def pack(numbers: Sequence[int]) -> bytes:
    """The block. `numbers`: those of all places, one place after another."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def unpack(packed: bytes) -> Table:
    """The places of a block, one for each row. Raises ProtocolMismatch for an invalid block."""
    if len(packed) % (8 * WIDTH):
        raise ProtocolMismatch(f"{len(packed)} bytes do not say where shards are")
    return np.frombuffer(packed, "<i8").reshape(-1, WIDTH)


def only(packed: bytes) -> ShardPlace:
    """The only place of a block. Raises ProtocolMismatch for an invalid block, or one with several places."""
    if len(packed) != _ONE.size:
        raise ProtocolMismatch(f"{len(packed)} bytes do not say where one shard is")
    return ShardPlace._make(_ONE.unpack(packed))


def numbers(packed: bytes) -> list[int]:
    """The shards of a block. Raises as `unpack`."""
    found: list[int] = unpack(packed)[:, 0].tolist()
    return found
