"""The tensors of a version at a reader: a mapping whose tensors are made from pinned chunks at their first access.

Invariants: a tensor that one slice covers is a view of the shared memory. A tensor that several slices cover is
assembled in memory of this process. Arrays are read-only. Tensors are writable, because torch has no read-only
tensors; a write copies the page, and no other process sees it. Arrays and tensors keep their chunks pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.byte_ranges import merged
from dataplane.batch.dtypes import storage
from dataplane.batch.layout import ALIGNMENT
from dataplane.batch.tensors import from_bits
from dataplane.client.column_assembly import PinnedShard
from dataplane.errors import Corrupt, Misuse, SchemaMismatch
from dataplane.weights.layout import PublishedPart, TensorSlice
from dataplane.weights.slices import Box, Selected, asked, cover, extent, ranges

_MOST_RANGES = 1 << 15  # the most byte ranges of a chunk; with more, all of the chunk is read

Place = tuple[int, int]
"""A chunk: its rank, and its number among the chunks of the rank."""


class TensorPiece(NamedTuple):
    """A slice from which a tensor is read: its entry, the part of the tensor, and its chunk. `nbytes`: the bytes of the
    slice if the part is all of it, else -1."""

    entry: TensorSlice
    box: Box
    chunk: Place
    nbytes: int

    @classmethod
    def of(cls, entry: TensorSlice, box: Box, rank: int) -> TensorPiece:
        """The piece for this part of an entry of this rank."""
        return cls(entry, box, (rank, entry.chunk), entry.nbytes if box == entry.box else -1)


class WantedTensor(NamedTuple):
    """A requested tensor, or part of it, and its pieces."""

    dtype: str
    box: Box
    pieces: list[TensorPiece]


class ReadPlan(NamedTuple):
    """A request for versions with one layout: the wanted tensors by name, and their pieces by chunk."""

    wanted: dict[str, WantedTensor]
    chunks: dict[Place, list[TensorPiece]]


class Tensors(Mapping[str, Any]):
    """The tensors of one version by name, as `torch.Tensor`, in place. See `AsyncWeights.get`.

    `version`: the number of the version. The bytes stay pinned while the mapping or one of its tensors is referenced.
    """

    def __init__(self, version: int, wanted: dict[str, WantedTensor], chunks: Mapping[Place, PinnedShard]) -> None:
        self.version = version
        self._wanted = wanted
        self._chunks = chunks
        self._made: dict[str, Any] = {}
        self._private: dict[Place, tuple[Any, int]] = {}

    def __repr__(self) -> str:
        return f"<version {self.version}: {len(self)} tensors, {self.nbytes} bytes>"

    def __len__(self) -> int:
        return len(self._wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __contains__(self, name: object) -> bool:
        return name in self._wanted

    def __getitem__(self, name: str) -> Any:
        """The tensor, or its requested part, as a `torch.Tensor` on the host. Imports torch."""
        if name not in self._made:
            self._made[name] = self._tensor(self._wanted[name])
        return self._made[name]

    def numpy(self, name: str) -> Any:
        """The tensor, or its requested part, as a read-only array. A dtype that NumPy lacks (bfloat16, float8) is
        exposed as unsigned integers with the same bits."""
        wanted = self._wanted[name]
        if len(wanted.pieces) == 1:
            return self._view(wanted.pieces[0], wanted.dtype, private=False)
        array = self._joined(wanted)
        array.flags.writeable = False
        return array

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, or of its requested part."""
        return {name: extent(wanted.box) for name, wanted in self._wanted.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor, as named by torch: "bfloat16"."""
        return {name: wanted.dtype for name, wanted in self._wanted.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors. Those that share memory are counted separately."""
        shapes = self.shapes
        return sum(
            int(np.prod(shapes[name], dtype=np.int64)) * storage(each.dtype).itemsize
            for name, each in self._wanted.items()
        )

    def _tensor(self, wanted: WantedTensor) -> Any:
        import torch

        dtype = getattr(torch, wanted.dtype)
        if len(wanted.pieces) == 1:
            entry, _, chunk, nbytes = piece = wanted.pieces[0]
            if nbytes > 0:  # a whole slice, as most pieces are; NumPy selects other parts
                memory, end = self._private.get(chunk) or self._privately(chunk)
                if entry.start + nbytes > end:
                    raise Corrupt(f"a chunk of {end} bytes has no {nbytes} bytes from {entry.start} on")
                # Each tensor has a separate storage, so that saving or copying it does not save its whole chunk.
                flat = torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=entry.start)
                return flat.view(entry.extent)
            array = self._view(piece, wanted.dtype, private=True)
        else:
            array = self._joined(wanted)
        return from_bits("", wanted.dtype, array)

    def _privately(self, chunk: Place) -> tuple[Any, int]:
        """The bytes of a chunk, writable as a private copy, and their number."""
        held = self._chunks[chunk]
        offset, size = held.laid.layout.columns[0][1].buffers[1]
        found = self._private[chunk] = held.memory.private(offset, size), size
        return found

    def _view(self, piece: TensorPiece, dtype: str, *, private: bool) -> Any:
        """A view, without a copy, of one piece of a tensor."""
        entry, held = piece.entry, self._chunks[piece.chunk]
        offset, size = held.laid.layout.columns[0][1].buffers[1]
        if entry.start + entry.nbytes > size:
            raise Corrupt(f"a chunk of {size} bytes has no {entry.nbytes} bytes from {entry.start} on")
        read = held.memory.private if private else held.memory.read
        whole = read(offset + entry.start, entry.nbytes).view(storage(dtype)).reshape(entry.extent)
        if piece.nbytes >= 0:
            return whole
        inside = tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(piece.box, entry.box, strict=True))
        return whole[inside]

    def _joined(self, wanted: WantedTensor) -> Any:
        """The elements of all pieces, in memory of this process."""
        array = np.empty(extent(wanted.box), storage(wanted.dtype))
        for piece in wanted.pieces:
            inside = tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(piece.box, wanted.box, strict=True))
            array[inside] = self._view(piece, wanted.dtype, private=False)
        return array


def planned(
    version: int, parts: Iterable[PublishedPart], names: Sequence[str] | None, slices: Mapping[str, Selected] | None
) -> ReadPlan:
    """The plan of a request for a version with these parts. Raises as `AsyncWeights.get`."""
    by_name: dict[str, list[tuple[int, TensorSlice]]] = {}
    for part in parts:
        for entry in part.entries:
            by_name.setdefault(entry.name, []).append((part.rank, entry))
    chosen = list(by_name) if names is None else list(dict.fromkeys(names))
    unknown = [name for name in [*chosen, *(slices or ())] if name not in by_name]
    if unknown:
        some = ", ".join(list(by_name)[:8]) + ", ..." * (len(by_name) > 8)
        raise Misuse(f"version {version} has no tensor {unknown[0]!r}; it has {len(by_name)}: {some}")
    wanted = {name: _wanted(name, by_name[name], (slices or {}).get(name)) for name in chosen}
    chunks: dict[Place, list[TensorPiece]] = {}
    for each in wanted.values():
        for piece in each.pieces:
            if piece.chunk[1] >= 0:
                chunks.setdefault(piece.chunk, []).append(piece)
    return ReadPlan(wanted, chunks)


def _wanted(name: str, entries: Sequence[tuple[int, TensorSlice]], selected: Selected | None) -> WantedTensor:
    """The pieces of the requested part of a tensor. Raises Misuse, SchemaMismatch."""
    rank, first = entries[0]
    whole = len(entries) == 1 and first.extent == first.shape and first.chunk >= 0
    if whole and selected is None:  # as most are requested
        box = first.box
        return WantedTensor(first.dtype, box, [TensorPiece.of(first, box, rank)])
    for _, entry in entries:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            one, other = (f"{each.dtype} {list(each.shape)}" for each in (first, entry))
            raise SchemaMismatch(f"{name!r} was published as {one} and as {other}", expected=one, found=other)
    box = asked(name, first.shape, selected)
    found, missing = cover(box, [entry.box for _, entry in entries])
    if missing:
        lacking = ", ".join(f"{start}:{stop}" for start, stop in missing[0])
        raise Misuse(f"{name!r} {list(first.shape)}: no rank published [{lacking}]")
    pieces = [TensorPiece.of(entries[at][1], part, entries[at][0]) for at, part in found]
    return WantedTensor(first.dtype, box, pieces)


def ranges_of(nbytes: int, pieces: Sequence[TensorPiece]) -> bytes:
    """The byte ranges of these pieces in a chunk of `nbytes`, in the form of `PinShards.chunks`; b"" for the whole
    chunk."""
    found = merged(np.concatenate([_ranges(piece) for piece in pieces]), ALIGNMENT)
    if len(found) > _MOST_RANGES or (len(found) == 1 and found[0][0] == 0 and found[0][1] > nbytes - ALIGNMENT):
        return b""
    return np.array(found, "<i8").tobytes()


def _ranges(piece: TensorPiece) -> npt.NDArray[np.int64]:
    entry = piece.entry
    if piece.nbytes >= 0:
        return np.array([[entry.start, entry.start + entry.nbytes]])
    return ranges(entry.box, piece.box, storage(entry.dtype).itemsize) + entry.start
