"""Ranges of memory as messages: long ones as they are, in parts of `_PIECE` bytes; runs of short ones packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_PIECE = 8 << 20  # bytes of a message
_SMALL, _PACK = 64 << 10, 1 << 20  # ranges of fewer bytes are packed, into so many


def messages(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The contents of each message: a part of one range, or several short ranges."""
    packed: list[tuple[int, int]] = []
    size = 0
    for start, stop in ranges:
        if stop - start < _SMALL:
            packed.append((start, stop))
            size += stop - start
        if packed and (size >= _PACK or stop - start >= _SMALL):
            yield packed
            packed, size = [], 0
        if stop - start >= _SMALL:
            yield from ([(at, min(stop, at + _PIECE))] for at in range(start, stop, _PIECE))
    if packed:
        yield packed
