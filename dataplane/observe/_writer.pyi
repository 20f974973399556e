import mmap
from collections.abc import Callable

class Writer:
    """Writes events into the memory from `offset` on. `events`: their number, a power of two. `named()`: the position
    of the calling thread. Raises ValueError if they do not fit the memory."""

    count: int
    """The number of the event that was recorded last."""
    last: int
    """The begin of the event that was recorded last, or is being recorded. Flows refer to it."""

    def __init__(self, memory: mmap.mmap, offset: int, events: int, named: Callable[[], int], /) -> None: ...
    def record(self, code: int, began: int, value: int = 0, /) -> None:
        """Record an event that ends now. `began`: nanoseconds of the monotonic clock. Raises ValueError after
        `stop`."""

    def flow(self, code: int, identity: int, count: int = 1, /) -> None:
        """Record `count` consecutive identities, from `identity` on, that the `last` event sends or receives. Raises
        ValueError after `stop`."""

    def stop(self) -> None:
        """Release the memory. Idempotent."""
