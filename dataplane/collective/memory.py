"""What a rank receives lies in memory of its own, which it may write to."""

from __future__ import annotations

from dataplane.batch.layout import Bytes
from dataplane.batch.local import aligned_bytes
from dataplane.errors import LimitExceeded


class Received:
    """A block of this process's memory (`batch.Memory`). Private views are the block itself: nobody else has it."""

    def __init__(self, nbytes: int) -> None:
        """Raises LimitExceeded where the process can not have so much."""
        try:
            self.block = aligned_bytes(nbytes)
        except MemoryError:
            what = "memory of this process"
            raise LimitExceeded(
                f"a batch of {nbytes} bytes does not fit into the {what}", what=what, asked=nbytes
            ) from None

    def read(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.read`."""
        view = self.block[offset : offset + nbytes]
        view.setflags(write=False)
        return view

    def private(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.private`."""
        return self.block[offset : offset + nbytes]
