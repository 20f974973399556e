"""Slices of tensors: boxes of indexes, the boxes that cover a request, and their byte ranges.

A box is one (start, stop) a dimension, in the indexes of the whole tensor. Invariants: `cover` names each element of
the requested box once, even if published slices overlap; `ranges` are the byte ranges of a box in a row-major slice,
ascending and disjoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension; () for a 0-d tensor."""

Selected: TypeAlias = Sequence[slice | tuple[int, int] | None]
"""The request of a reader for each dimension: a slice of step 1, (start, stop), or None for all, which is the
default."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a named tensor, as one rank of several publishes it.

    tensor: the values, [*extent]. shape: of the whole tensor. offsets: the start of the part, by dimension.
    """

    tensor: Any
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        extent = tuple(self.tensor.shape)
        shape, offsets = tuple(self.shape), tuple(self.offsets)
        fits = len(extent) == len(shape) == len(offsets)
        if not fits or any(not 0 <= o <= o + e <= n for o, e, n in zip(offsets, extent, shape, strict=True)):
            raise Misuse(f"a slice {list(extent)} at {list(offsets)} does not lie in a tensor {list(shape)}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "offsets", offsets)


def box_of(offsets: Sequence[int], extent: Sequence[int]) -> Box:
    """The box with these offsets and this extent."""
    return tuple((start, start + size) for start, size in zip(offsets, extent, strict=True))


def asked(name: str, shape: Sequence[int], selected: Selected | None) -> Box:
    """The requested box of a tensor of this shape. Raises Misuse for an invalid `selected`."""
    if selected is not None and not isinstance(selected, Iterable):
        raise Misuse(f"the slices of {name!r} are a list with one for each dimension, not {selected!r}")
    given = [] if selected is None else list(selected)
    if len(given) > len(shape):
        raise Misuse(f"{name!r} has {len(shape)} dimensions, and {len(given)} slices of it are asked for")
    found = []
    for size, each in zip(shape, [*given, *[None] * (len(shape) - len(given))], strict=True):
        if each is None:
            found.append((0, size))
            continue
        try:
            start, stop, step = (each if isinstance(each, slice) else slice(*each)).indices(size)
        except TypeError:
            raise Misuse(f"a slice of {name!r} is a slice, (start, stop) or None, not {each!r}") from None
        if step != 1:
            raise Misuse(f"a slice of {name!r} has step 1, not {step}")
        found.append((start, max(start, stop)))
    return tuple(found)


def extent(box: Box) -> tuple[int, ...]:
    """The size of a box by dimension."""
    return tuple(stop - start for start, stop in box)


def count(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(extent(box))


def common(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _less(box: Box, taken: Box) -> list[Box]:
    """The box without its part `taken`, as disjoint boxes."""
    left, rest = [], list(box)
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, taken, strict=True)):
        if start < first:
            left.append((*rest[:axis], (start, first), *rest[axis + 1 :]))
        if last < stop:
            left.append((*rest[:axis], (last, stop), *rest[axis + 1 :]))
        rest[axis] = (first, last)
    return [tuple(each) for each in left]


def cover(wanted: Box, pieces: Iterable[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """The boxes of `wanted` to read, each with the number of its piece, and the boxes that no piece has."""
    missing = [wanted] if count(wanted) else []
    found = []
    for number, piece in enumerate(pieces):
        if not missing:
            break
        rest: list[Box] = []
        for box in missing:
            taken = common(box, piece)
            if taken is None:
                rest.append(box)
                continue
            found.append((number, taken))
            rest += _less(box, taken)
        missing = rest
    return found, missing


def ranges(piece: Box, part: Box, width: int) -> npt.NDArray[np.int64]:
    """The byte ranges of the box `part` in a row-major piece with elements of `width` bytes, int64 [ranges, 2]: start
    and stop."""
    sizes, wanted = extent(piece), extent(part)
    if not count(part):
        return np.empty((0, 2), np.int64)
    axis = len(sizes)
    while axis and wanted[axis - 1] == sizes[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)  # the last dimension that is not requested whole: the bytes of a run in it are contiguous
    run = math.prod(wanted[axis:]) * width
    starts = np.zeros(1, np.int64)
    for dimension, ((start, stop), (base, _)) in enumerate(zip(part, piece, strict=True)):
        stride = math.prod(sizes[dimension + 1 :]) * width
        indexes = np.arange(start - base, stop - base) if dimension < axis else np.array([start - base])
        starts = (starts[:, None] + indexes * stride).reshape(-1)
    return np.stack([starts, starts + run], axis=1)
