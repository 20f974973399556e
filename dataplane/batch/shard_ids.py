"""The numbers by which the owners of a shard name it.

A stored row may have more than one owner, as a file may have several hard links. The first owner names it by the number
of its shard. Each other owner has a link: the number of the shard in the low bits, and a number of its own in the high
bits. So a link can be used wherever the number of a shard can: in references, messages and cells that others store. A
reader extracts the number of the shard from it.

Rejected: a count of owners, which `free` decrements. Freeing a shard twice has no effect, and callers rely on that:
when a message is repeated after its answer was lost, when a reference names a row twice, when two writers replace the
same row. With a count, each of these would free a shard that another owner still needs.
"""

from __future__ import annotations

_SHARD_BITS = 40
MOST_SHARDS = 1 << _SHARD_BITS
"""The number of every shard is below this."""

_SHARD = MOST_SHARDS - 1

MAX_LINK = (1 << 63 - _SHARD_BITS) - 1
"""The last link that a shard can have: numbers of shards stay below 2**63."""


def shard_of(number: int) -> int:
    """The number of the shard that this is, or is a link to."""
    return number & _SHARD


def link_of(number: int) -> int:
    """The number of the link among the shard's; 0 for the first owner."""
    return number >> _SHARD_BITS


def linked(shard: int, link: int) -> int:
    """The number of this link to a shard."""
    return shard | link << _SHARD_BITS
