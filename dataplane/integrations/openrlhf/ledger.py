"""The tensors of this process that are in the plane, so that each is put once, in the phase that uses it first.

OpenRLHF passes the same tensors to one phase after the other: sequences and masks to the reward, actor, critic and
reference models, and then, with their results, to `append`. A tensor is recognised as the same object with the same
contents: torch counts the writes to a tensor. The stored values are freed with the last of their tensors.

Invariants: a reference has the contents of its tensor at the call of `place`; a tensor that was written to, resized
or bound to other memory since is put again. A write that bypasses torch, as through the NumPy array of a tensor, is
not noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.integrations import freeing
from dataplane.integrations.openrlhf.outline import Extracted, is_plain_tensor
from dataplane.integrations.rows import LazyRow, put_rows

Tensor = Any


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor, its state at the put, and its reference."""

    tensor: weakref.ref[Any]
    look: tuple[Any, ...]
    ref: BatchRef


class Ledger:
    """The tensors of this process in one plane. Used by one thread at a time.

    remembers: whether tensors are recognised, and their values freed with them. Otherwise each call puts all of
        them, and the caller frees them.
    """

    def __init__(
        self, plane: Plane, *, remembers: bool = True, scope: str | None = None, timeout: float = 60.0
    ) -> None:
        self.plane = plane
        self._remembers = remembers
        self._options: dict[str, Any] = {"scope": scope, "timeout": timeout}
        self._known: dict[int, _StoredTensor] = {}

    def place(self, found: Sequence[Extracted]) -> dict[str, BatchRef]:
        """The columns of the extracted parts: for each a reference to all its rows in order.

        Raises as `Plane.put`.
        """
        self._forget()
        columns: dict[str, list[Extracted]] = {}
        for each in found:
            columns.setdefault(each.column, []).append(each)
        tensors, placed = {}, {}
        for name, own in columns.items():
            values = [each.value for each in own]
            if is_plain_tensor(values[0]):
                tensors[name] = values
            elif isinstance(values[0], bytes):
                placed[name] = self._bytes(name, values, [each.owner for each in own])
            else:
                placed[name] = self._inputs(values)
        return placed | self._tensors(tensors)

    def _tensors(self, columns: Mapping[str, Sequence[Tensor]]) -> dict[str, BatchRef]:
        here: dict[int, BatchRef | None] = {}  # by identity: all live as long as the caller's lists
        new: dict[int, dict[str, list[Tensor]]] = {}  # by rows: the columns of one put are equally long
        for name, tensors in columns.items():
            unknown = []
            for tensor in tensors:
                if id(tensor) not in here:
                    here[id(tensor)] = self._lookup(tensor)
                    if here[id(tensor)] is None:
                        unknown.append(tensor)
            if unknown:
                new.setdefault(sum(map(_rows, unknown)), {})[name] = unknown
        for group in new.values():
            here |= self._put(group)
        return {name: concat([_called(name, here[id(tensor)]) for tensor in own]) for name, own in columns.items()}

    def _put(self, columns: Mapping[str, Sequence[Tensor]]) -> dict[int, BatchRef]:
        """Put tensors. Returns the reference of each, by its identity."""
        stored = {name: _column(tensors) for name, tensors in columns.items()}
        ref = self.plane.put(stored, **self._options)
        every = list(chain.from_iterable(columns.values()))
        if self._remembers:
            freeing.Watch(ref, every)
        placed: dict[int, BatchRef] = {}
        for name, tensors in columns.items():
            parts = ref.select(name).split([_rows(tensor) for tensor in tensors])
            placed |= {id(tensor): part for tensor, part in zip(tensors, parts, strict=True)}
        if self._remembers:
            for tensor in every:
                self._known[id(tensor)] = _StoredTensor(weakref.ref(tensor), _look(tensor), placed[id(tensor)])
        return placed

    def _inputs(self, several: Sequence[Any]) -> BatchRef:
        """References to handles and dicts of inputs; equal ones are put once."""
        dicts = [(i, each) for i, each in enumerate(several) if not isinstance(each, LazyRow)]
        refs = [self._lookup_all(each) if isinstance(each, dict) else each.ref for each in several]
        new = [each for i, each in dicts if refs[i] is None]
        handles = iter(self._put_inputs(new))
        return concat([next(handles) if ref is None else ref for ref in refs])

    def _put_inputs(self, dicts: Sequence[dict[str, Any]]) -> list[BatchRef]:
        if not dicts:
            return []
        rows = put_rows(dicts, repeated=True, plane=self.plane, **self._options)
        refs = [row.ref for row in rows if row is not None]
        if self._remembers:
            tensors = [[value for value in each.values() if is_plain_tensor(value)] for each in dicts]
            freeing.Watch(concat(refs), chain.from_iterable(tensors))
            for own, each, ref in zip(tensors, dicts, refs, strict=True):
                if len(own) == len(each):
                    for tensor in own:
                        self._known[id(tensor)] = _StoredTensor(weakref.ref(tensor), (*_look(tensor), tuple(each)), ref)
        return refs

    def _bytes(self, name: str, rows: Sequence[bytes], owners: Sequence[Any]) -> BatchRef:
        ref = self.plane.put({name: list(rows)}, **self._options)
        if self._remembers:
            freeing.Watch(ref, owners)
        return ref

    def _lookup(self, tensor: Tensor, more: tuple[Any, ...] = ()) -> BatchRef | None:
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.look != (*_look(tensor), *more):
            return None
        return known.ref

    def _lookup_all(self, inputs: dict[str, Any]) -> BatchRef | None:
        """The reference of inputs of which every tensor is known."""
        refs = [self._lookup(value, (tuple(inputs),)) for value in inputs.values()]
        return refs[0] if refs and all(ref is refs[0] for ref in refs) else None

    def _forget(self) -> None:
        """Remove tensors that are gone."""
        self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """The state of a tensor: different after it was written to or bound to other memory, and always if torch does
    not count its writes."""
    version = object() if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 1


def _column(tensors: Sequence[Tensor]) -> Any:
    """The rows of all tensors as one column: numbers for [rows], else each row flat."""
    import torch

    if tensors[0].ndim <= 1:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    return [row for tensor in tensors for row in tensor.reshape(tensor.shape[0], -1).unbind()]


def _called(name: str, ref: BatchRef | None) -> BatchRef:
    assert ref is not None, "what was not known has been put"
    (own,) = ref.columns
    return ref if own == name else ref.rename({own: name})
