"""The source from which the bytes of a shard can be read again if it is not this host's disk."""

from __future__ import annotations

from typing import Protocol


class Backing(Protocol):
    """For example a shard of another host."""

    async def read(self, memory: memoryview) -> None:
        """Fill the memory, which is as long as the extent of the shard, with validated bytes. After a DataplaneError
        the bytes are not used, and the shard is unavailable until the store is told otherwise."""
