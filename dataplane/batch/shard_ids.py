"""Numbers of shards that have several owners.

A stored row may have more than one owner, as a file has several hard links. The first owner names it by the number of
its shard. Each other has a link: the same number with a number of its own above it. So a link stands wherever a shard's
number may: in references, messages and cells that others keep. A reader extracts the shard's number from it.

Rejected: a count of owners, which `free` decrements. Freeing twice does no harm today, and repeated messages rely on
it: after a lost answer, for rows that a reference names twice, for two writers that replaced one row. With a count each
of them would free what another still owns.
"""

from __future__ import annotations

_SHARD_BITS = 40
MOST_SHARDS = 1 << _SHARD_BITS
"""Numbers of shards are below this."""

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
