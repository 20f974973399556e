from collections.abc import Callable
from types import FrameType
from typing import Any

class Calls:
    """Counts the calls of this process, and sums their time, by the line that made them (the place). Thread-safe.

    A place has a number below `waiting.PLACES`. `asked()`: the number of the place if the caller's context has one,
    else -1. `find()` walks the stack for the place. `gap` is called for a call that began more than `gap_ns` after the
    end of the last call. Times are nanoseconds of the monotonic clock. The memory is fixed.
    """

    active: bool
    """Whether `place` looks for places. Calls are always counted."""
    left: int
    """The time at which the last call ended."""

    def __init__(
        self,
        asked: Callable[[], int],
        find: Callable[[], tuple[int, int, int, int]],
        gap: Callable[[int, int], Any],
        gap_ns: int,
        /,
    ) -> None: ...
    def place(self) -> int:
        """The number of the calling place; 0 if there is none."""

    def called(self, number: int, began: int, /) -> None:
        """Count a call of this place that began at `began` and ends now. Bits of the number beyond `PLACES` are
        ignored."""

    def totals(self, number: int, /) -> tuple[int, int]:
        """The number of calls of a place, and their nanoseconds."""

    def reset(self) -> None:
        """Forget all counts, and become inactive. No call may be in progress."""

def current_frames() -> dict[int, FrameType]:
    """The frame of each thread, by its number, read while garbage collection is off. Before Python 3.12.3, a collection
    meanwhile could deadlock this thread with a thread that starts another (python/cpython#106883)."""
