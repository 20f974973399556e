"""`PAGE` rows of a stream by their number, in NumPy arrays: which of them are there, and where their columns are.

Rows lie in pages whatever the sizes of the appends that brought them: an agent loop appends a row at a time, and a
block for each would cost more than the row. A page knows, for each set of columns that came together (a layer), of
which patch and which of its rows each row's columns are.

What always holds: the arrays of a page have room for `room` rows, never fewer than were appended. The first page of a
stream grows by doubling, so that a stream of few rows takes little; those after it are made whole.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
A = TypeVar("A", bound=np.generic)

PAGE = 4096
_LEAST = 16  # rows that a page has room for at first


def grown(array: npt.NDArray[A], room: int, fill: Any = 0) -> npt.NDArray[A]:
    """The array with room for so many rows, its last axis; those that are new have the value `fill`."""
    larger = np.full((*array.shape[:-1], room), fill, array.dtype)
    larger[..., : array.shape[-1]] = array
    return larger


class Layer:
    """Of each row of a page: which patch its columns of this layer are in, and in which row. -1: it has none."""

    __slots__ = ("index", "patch")

    def __init__(self, patch: Index, index: Index) -> None:
        self.patch = patch
        self.index = index

    @classmethod
    def new(cls, room: int) -> Layer:
        """One for so many rows that have none of its columns."""
        return cls(np.full(room, -1, np.int64), np.zeros(room, np.int64))

    def grow(self, room: int) -> None:
        """Have room for so many rows."""
        self.patch, self.index = grown(self.patch, room, -1), grown(self.index, room)

    def copy(self) -> Layer:
        """The same, of its own."""
        return Layer(self.patch.copy(), self.index.copy())


class Page:
    """The rows by number from `first`, of which `count` were appended and `left` are not gone."""

    __slots__ = ("changes", "columns", "count", "first", "gone", "layers", "left", "room")

    def __init__(self, first: int) -> None:
        self.first = first
        self.count = 0
        self.left = 0
        self.changes = 0
        """Goes up whenever a row may have become ready."""
        self.room = PAGE if first else _LEAST
        """Rows that the arrays have room for."""
        self.columns = np.zeros(self.room, np.uint64)
        """Of each row, a bit a column that it has."""
        self.gone = np.zeros(self.room, np.bool_)
        self.layers: dict[tuple[str, ...], Layer] = {}
        """By the names of their columns, sorted."""

    @property
    def present(self) -> Flags:
        """Which of the rows that were appended are there."""
        return ~self.gone[: self.count]

    def need(self, rows: int) -> None:
        """Have room for the first so many rows."""
        if rows > self.room:
            self.room = min(PAGE, 1 << (rows - 1).bit_length())
            self.columns, self.gone = grown(self.columns, self.room), grown(self.gone, self.room)
            for layer in self.layers.values():
                layer.grow(self.room)

    def layer(self, names: tuple[str, ...]) -> Layer:
        """The layer of these columns, made if it is not there."""
        layer = self.layers.get(names)
        if layer is None:
            layer = self.layers[names] = Layer.new(self.room)
        return layer

    def copy(self) -> Page:
        """The same, of its own."""
        page = Page.__new__(Page)
        page.first, page.room = self.first, self.room
        page.count, page.left, page.changes = self.count, self.left, self.changes
        page.columns, page.gone = self.columns.copy(), self.gone.copy()
        page.layers = {names: layer.copy() for names, layer in self.layers.items()}
        return page
