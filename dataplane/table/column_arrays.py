"""Arrays of equal length, with one value for each line, which grow and shrink together.

Invariants: a line whose value was not set has the default value of the array. Lines keep their order when others are
removed. The amortised cost of adding or removing a line does not depend on the number of lines.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 64


class ColumnArrays:
    """`count` lines. Each named array has a value for each line."""

    def __init__(self) -> None:
        self.count = 0
        self._room = _LEAST
        self._arrays: dict[Hashable, tuple[npt.NDArray[Any], Any]] = {}

    def make(self, name: Hashable, dtype: type, fill: Any) -> None:
        """Create an array with the value `fill` in every line."""
        self._arrays[name] = np.full(self._room, fill, dtype), fill

    def drop(self, name: Hashable) -> None:
        """Remove an array."""
        self._arrays.pop(name, None)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._arrays

    def __getitem__(self, name: Hashable) -> npt.NDArray[Any]:
        """The values of all lines: a mutable view, which is invalid after lines are added or removed."""
        return self._arrays[name][0][: self.count]

    def add(self, lines: int) -> None:
        """Append `lines` lines."""
        need = self.count + lines
        if need > self._room:
            room = max(need, 2 * self._room)
            for name, (array, fill) in self._arrays.items():
                larger = np.full(room, fill, array.dtype)
                larger[: self.count] = array[: self.count]
                self._arrays[name] = larger, fill
            self._room = room
        self.count = need

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        """Keep the flagged lines, and remove all others."""
        left = int(np.count_nonzero(which))
        room = max(_LEAST, left + left // 2)
        for name, (array, fill) in self._arrays.items():
            fewer = np.full(room, fill, array.dtype)
            fewer[:left] = array[: self.count][which]
            self._arrays[name] = fewer, fill
        self.count, self._room = left, room
