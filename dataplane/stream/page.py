"""A page: `PAGE` consecutive rows of a stream in NumPy arrays: the places of their columns, the progress of each task
with them (`progress`), and their metadata (`row_metadata`).

Pages are independent of the sizes of appends: an agent loop appends a row at a time, and an object for each would cost
more than the row. For each set of columns that were added together (a layer) a page has the number of each row's column
batch (`column_batch`), and the row's position in it.

Invariant: the arrays of a page have `room` rows, at least as many as were appended. The first page of a stream grows
by doubling, so that a short stream takes little memory; later pages are allocated whole.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Objects = npt.NDArray[np.object_]
A = TypeVar("A", bound=np.generic)

PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
NONE: Index = np.empty(0, np.int64)
_LEAST = 16  # rows for which the first page has room at first


def grown(array: npt.NDArray[A], room: int, fill: Any = 0) -> npt.NDArray[A]:
    """The array with its last axis enlarged to `room`; new entries have the value `fill`."""
    larger = np.full((*array.shape[:-1], room), fill, array.dtype)
    larger[..., : array.shape[-1]] = array
    return larger


def counted(values: Index) -> dict[int, int]:
    """How often each value occurs."""
    if len(values) and (values == values[0]).all():  # the usual case for versions and column batches
        return {int(values[0]): len(values)}
    return dict(zip(*(found.tolist() for found in np.unique(values, return_counts=True)), strict=True))


class PageColumns:
    """The columns of one set, for each row of a page: `batch`, the number of its column batch (-1: none), and `index`,
    its position there."""

    __slots__ = ("batch", "index")

    def __init__(self, batch: Index, index: Index) -> None:
        self.batch = batch
        self.index = index

    @classmethod
    def new(cls, room: int) -> PageColumns:
        return cls(np.full(room, -1, np.int64), np.zeros(room, np.int64))

    def grow(self, room: int) -> None:
        self.batch, self.index = grown(self.batch, room, -1), grown(self.index, room)

    def copy(self) -> PageColumns:
        return PageColumns(self.batch.copy(), self.index.copy())


_ARRAYS = ("arrived", "columns", "dropped", "gone", "group", "state", "tries", "version")


class Page:
    """The rows with numbers from `first` on: `count` were appended, `left` still exist. `tasks`: number of tasks."""

    __slots__ = (*_ARRAYS, "changes", "count", "dead", "first", "idle", "layers", "left", "lengths", "room", "tags")

    def __init__(self, first: int, tasks: int) -> None:
        self.first = first
        self.count = 0
        self.left = 0
        self.changes = 0
        """A number that increases whenever a row may have become ready."""
        self.room = PAGE if first else _LEAST
        """The number of rows for which the arrays have room."""
        self.columns = np.zeros(self.room, np.uint64)
        """The columns of each row, one bit a column."""
        self.gone = np.zeros(self.room, np.bool_)
        self.layers: dict[tuple[str, ...], PageColumns] = {}
        """The layers by the sorted names of their columns."""
        # progress
        self.state = np.zeros((tasks, self.room), np.uint8)
        self.tries = np.zeros((tasks, self.room), np.uint8)
        self.dropped = np.zeros(self.room, np.bool_)
        self.idle: dict[tuple[int, int], int] = {}
        """By task and columns: the value of `changes` when no row was ready."""
        self.dead = False
        """Whether a row of the page may be a dead letter."""
        # metadata
        self.group = np.zeros(self.room, np.int64)
        self.version = np.zeros(self.room, np.int64)
        self.arrived = np.zeros(self.room)
        self.tags: dict[str, Objects] = {}
        self.lengths: dict[str, Index] = {}

    @property
    def present(self) -> Flags:
        return ~self.gone[: self.count]

    def need(self, rows: int) -> None:
        if rows > self.room:
            self.room = min(PAGE, 1 << (rows - 1).bit_length())
            for name in _ARRAYS:
                setattr(self, name, grown(getattr(self, name), self.room))
            self.tags = {name: grown(values, self.room, None) for name, values in self.tags.items()}
            self.lengths = {name: grown(values, self.room) for name, values in self.lengths.items()}
            for layer in self.layers.values():
                layer.grow(self.room)

    def layer(self, names: tuple[str, ...]) -> PageColumns:
        """The layer of these columns; created if it does not exist."""
        layer = self.layers.get(names)
        if layer is None:
            layer = self.layers[names] = PageColumns.new(self.room)
        return layer

    def copy(self) -> Page:
        page = Page.__new__(Page)
        page.first, page.room, page.dead, page.idle = self.first, self.room, self.dead, {}
        page.count, page.left, page.changes = self.count, self.left, self.changes
        for name in _ARRAYS:
            setattr(page, name, getattr(self, name).copy())
        page.tags = {name: values.copy() for name, values in self.tags.items()}
        page.lengths = {name: values.copy() for name, values in self.lengths.items()}
        page.layers = {names: layer.copy() for names, layer in self.layers.items()}
        return page
