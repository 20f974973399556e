"""Arrays of one value a line, which grow and shrink together.

What always holds: a line that nobody has set has the value that its array was made with. Lines keep their order when
others go; adding one, and taking some out, costs the same a line however many there are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 64


class Lines:
    """`count` lines, of which each named array has a value."""

    def __init__(self) -> None:
        self.count = 0
        self._room = _LEAST
        self._arrays: dict[Hashable, tuple[npt.NDArray[Any], Any]] = {}

    def make(self, name: Hashable, dtype: type, fill: Any) -> None:
        """An array of this name, of this value in every line."""
        self._arrays[name] = np.full(self._room, fill, dtype), fill

    def drop(self, name: Hashable) -> None:
        """There is no array of this name any more."""
        self._arrays.pop(name, None)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._arrays

    def __getitem__(self, name: Hashable) -> npt.NDArray[Any]:
        """The values of all lines, to be changed in place; a view, of no use once lines came or went."""
        return self._arrays[name][0][: self.count]

    def add(self, lines: int) -> None:
        """So many more lines, at the end."""
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
        """Only these lines stay."""
        left = int(np.count_nonzero(which))
        room = max(_LEAST, left + left // 2)
        for name, (array, fill) in self._arrays.items():
            fewer = np.full(room, fill, array.dtype)
            fewer[:left] = array[: self.count][which]
            self._arrays[name] = fewer, fill
        self.count, self._room = left, room
