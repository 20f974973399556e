"""Where a shard's bytes can be read again that are not on this host's disk."""

from __future__ import annotations

from typing import Protocol


class Backing(Protocol):
    """Another host's shard, for one."""

    async def read(self, memory: memoryview) -> None:
        """Fill the memory, as long as the shard's extent, with its bytes, checked. Raises a DataplaneError, after
        which the shard can not be had until somebody says otherwise; its bytes are not looked at then."""
