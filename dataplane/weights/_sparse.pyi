from typing import Any

def some(old: Any, new: Any, width: int, room: Any = ..., /) -> bytes | None:
    """Encode the elements of a block that differ: their number, that of the gaps, the gaps, the values. b"" if none
    differs; None if the block is not larger. `room`: work memory of twice a block and two bytes."""

def patch(body: Any, block: Any, width: int, /) -> bool:
    """Write the elements of a body into the block. Returns False for an invalid body."""
