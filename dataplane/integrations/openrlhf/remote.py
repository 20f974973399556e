"""`RemoteList`: a list whose items are in the plane. It is pickled in a few hundred bytes, and an item is read from the
memory of the host at its first access.

    there = RemoteList.of("sequences", sequences, sent)       # as long as the list, sliced as lists are, pickled small
    there[3]                                                  # the item as it was

It replaces a list of tensors, of Experiences, or of anything else in OpenRLHF. An item is a row of a column of objects
(`batch.object_codec`), of Experiences a row of a column for each field; the columns are read at the first access to an
item, in one request. A processor's inputs of a vision-language model are rows of their own, for which an item holds a
placeholder: they stay in the plane, and their handles (`integrations.rows`) read them at the first access.

OpenRLHF passes the same tensors to one phase after the other. `SentRows` knows the tensors and inputs that were put, so
that each is put once: as the same objects with the same contents, since torch counts the writes to a tensor.

Invariants: an item has its original types, shapes and dtypes, and its tensors are private to the reader; a slice is a
list of the same rows and copies no bytes; a reference has the contents of its tensors at the call of `of`; an item
without tensors, or of a value that no column represents exactly (a tensor on a device, or with requires_grad), stays in
the list. A write that bypasses torch, as through the NumPy array of a tensor, is not noticed.

An `Experience`, or several, is put by hand too: `put`, `get` and `free`. Equal inputs are stored once, as those of the
responses of one prompt. The stored rows stay until they, or their scope, are freed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, overload

from dataplane.batch import object_codec, object_rows
from dataplane.batch.batch import Column
from dataplane.batch.concat import concat
from dataplane.batch.object_rows import ObjectRow
from dataplane.batch.ref import BatchRef
from dataplane.batch.tensors import is_tensor
from dataplane.client.sync import Plane
from dataplane.errors import Misuse, SchemaMismatch
from dataplane.integrations import process
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.rows import LazyRow, put_rows

#: Where a dict is inputs that a processor made for a model, one a sample: `Experience.mm_train_inputs`, and the
#: argument `mm_train_inputs_list` of OpenRLHF's `forward`s.
_INPUTS = "mm_train_inputs"

#: Items of an iteration that are decoded in one go, which takes half as long as one by one.
_READ_TOGETHER = 16

_EMPTY = ObjectRow(object_codec.encode_rows("", [None])[0])


@dataclass(frozen=True, slots=True)
class Inputs:
    """The placeholder of a sample's inputs: their position among the inputs of its item."""

    number: int


@dataclass(slots=True)
class _Parts:
    """The parts of an item: its rows by column; its multimodal inputs (dicts of tensors, or handles), which are stored
    apart; and the tensors and handles in it, with the last of which its rows are freed."""

    rows: dict[str, ObjectRow] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def add(self, column: str, value: Any) -> None:
        """Add the row of a column. Raises SchemaMismatch."""
        (self.rows[column],) = object_codec.encode(column, [self._without_inputs(column, value)])

    def _without_inputs(self, path: str, value: Any) -> Any:
        """The value, with placeholders for inputs."""
        if isinstance(value, LazyRow):
            self.owners.append(value)
            return self._input(value)
        if is_tensor(value):
            if not _is_plain(value):
                found = "a tensor on a device, one that requires grad, or one of a layout of its own"
                hint = "pass experience.to_device('cpu'), and what is detached"
                raise SchemaMismatch(f"column {path!r} cannot hold {found}: {hint}", column=path, found=found)
            self.owners.append(value)
        elif type(value) is list:
            return [self._without_inputs(path, item) for item in value]
        elif type(value) is dict:
            tensors = [item for item in value.values() if is_tensor(item)]
            if tensors and _INPUTS in path and all(map(_is_plain, tensors)):
                self.owners += tensors
                return self._input(value)
            return {key: self._without_inputs(f"{path}.{key}", item) for key, item in value.items()}
        elif is_experience(value):
            self.owners.append(value)
        return value

    def _input(self, value: Any) -> Inputs:
        self.inputs.append(value)
        return Inputs(len(self.inputs) - 1)


class RemoteList(Sequence[Any]):
    """`len(there)` items. Picklable; any thread may access it, one at a time."""

    def __init__(
        self,
        ref: BatchRef | None,
        kind: type | None,
        groups: Sequence[tuple[str, ...]],
        inputs: Mapping[str, BatchRef],
        own: Mapping[int, Any],
    ) -> None:
        """Not for callers: `of` creates them. ref: a row an item; kind: the class of the items if the columns are
        fields of Experiences; groups: for each input of each item the column of `inputs`; own: the items that are not
        stored."""
        self._ref = ref
        self._kind = kind
        self._groups = tuple(groups)
        self._inputs = inputs
        self._own = own
        self._read: dict[str, Column] = {}

    @classmethod
    def of(cls, name: str, items: Sequence[Any], sent: SentRows, *, strict: bool = False) -> RemoteList:
        """A list of these items, called `name`; items that were not sent before are put.

        Raises as `Plane.put`; with `strict`, SchemaMismatch for a value that no column represents, which otherwise
        stays in the list.
        """
        if items and all(is_tensor(item) and sent.find([item]) for item in items):
            return cls(concat([_called(name, sent.find([item])) for item in items]), None, [()] * len(items), {}, {})
        kinds = {type(item) for item in items}
        kind = kinds.pop() if len(kinds) == 1 and is_experience(items[0]) else None
        parts: list[_Parts | None] = [_parts(name, item, kind, strict=strict) for item in items]
        stored = [each for each in parts if each is not None]
        ref = sent.put(stored, [each or _Parts() for each in parts]) if stored else None
        try:
            inputs, groups = sent.inputs([each.inputs for each in stored])
        except BaseException:
            if ref is not None:
                sent.give_up(ref)
            raise
        if ref is not None and kind is None:
            sent.learn(items, ref)
        found = iter(groups)
        own = {at: items[at] for at, each in enumerate(parts) if each is None}
        return cls(ref, kind, [() if each is None else next(found) for each in parts], inputs, own)

    @property
    def refs(self) -> list[BatchRef]:
        """The references to its columns."""
        return [*([] if self._ref is None else [self._ref]), *self._inputs.values()]

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteList: ...
    def __getitem__(self, index: int | slice) -> Any:
        """An item, read, or the list of a slice."""
        chosen = range(len(self))[index]
        return self._slice(chosen) if isinstance(chosen, range) else self.items(range(chosen, chosen + 1))[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _READ_TOGETHER):
            yield from self.items(range(len(self))[start : start + _READ_TOGETHER])

    def items(self, chosen: range, names: Collection[str] | None = None, *, lazy: bool = True) -> list[Any]:
        """Items that follow one another. Of Experiences only these fields; the others have the values of a new one.
        Inputs as handles if `lazy`. Raises as `Plane.get`."""
        if self._ref is None or all(index in self._own for index in chosen):
            return [self._own[index] for index in chosen]
        wanted = [name for name in self._ref.columns if names is None or name in names]
        unread = [name for name in wanted if name not in self._read]
        if unread:
            self._read.update(plane_of_process().get(self._ref.select(*unread)).items())
        rows = {name: self._read[name][chosen.start : chosen.stop].to_list() for name in wanted}
        found: list[Any] = []
        for at, index in enumerate(chosen):
            if index in self._own:
                found.append(self._own[index])
                continue
            values = {name: self._filled(rows[name][at], index, lazy) for name in wanted}
            found.append(next(iter(values.values())) if self._kind is None else self._kind(**values))
        return found

    def __repr__(self) -> str:
        return f"RemoteList({len(self)} items, {self.refs!r})"

    def __reduce__(self) -> tuple[Callable[..., RemoteList], tuple[Any, ...]]:
        return RemoteList, (self._ref, self._kind, self._groups, dict(self._inputs), dict(self._own))

    def _filled(self, value: Any, index: int, lazy: bool) -> Any:
        """The value of an item with its inputs."""
        if type(value) is Inputs:
            own = self._groups[index]
            group = own[value.number]
            ref = self._inputs[group][self._starts[index].get(group, 0) + own[: value.number].count(group)]
            row = LazyRow(ref, ref.columns[0])
            return row if lazy else row.read()
        if type(value) is list:
            return [self._filled(item, index, lazy) for item in value]
        if type(value) is dict:
            return {key: self._filled(item, index, lazy) for key, item in value.items()}
        return value

    @cached_property
    def _starts(self) -> list[dict[str, int]]:
        """For each item, and the end, its first row of each column of inputs."""
        starts: list[dict[str, int]] = [{}]
        for own in self._groups:
            starts.append({group: starts[-1].get(group, 0) + own.count(group) for group in {*starts[-1], *own}})
        return starts

    def _slice(self, chosen: range) -> RemoteList:
        if chosen.step != 1:
            raise Misuse("items of a list that is elsewhere are taken one by one or by a slice of step 1")
        first, last = chosen.start, max(chosen.start, chosen.stop)
        begin, end = self._starts[first], self._starts[last]
        inputs = {name: ref[begin.get(name, 0) : end.get(name, 0)] for name, ref in self._inputs.items()}
        own = {at - first: item for at, item in self._own.items() if at in chosen}
        ref = None if self._ref is None else self._ref[first:last]
        kept = {name: rows for name, rows in inputs.items() if len(rows)}
        return RemoteList(ref, self._kind, self._groups[first:last], kept, own)


@dataclass(frozen=True, slots=True)
class _SentTensors:
    """Tensors, their state when they were put, and their row."""

    tensors: list[weakref.ref[Any]]
    state: list[tuple[Any, ...]]
    ref: BatchRef


class SentRows:
    """The tensors and inputs that this process has put. Used by one thread at a time.

    remembers: whether tensors are recognised, and their rows are freed with them. Otherwise each call puts everything,
        and the caller frees it.
    """

    def __init__(
        self, plane: Plane, *, remembers: bool = True, scope: str | None = None, timeout: float = 60.0
    ) -> None:
        self.plane = plane
        self._remembers = remembers
        self._options: dict[str, Any] = {"scope": scope, "timeout": timeout}
        self._known: dict[tuple[int, ...], _SentTensors] = {}

    def put(self, stored: Sequence[_Parts], every: Sequence[_Parts]) -> BatchRef:
        """Put one row for each item of `every`; an item without values gets an empty row. `stored`: the items with
        values; the columns are those of the first. Raises as `Plane.put`."""
        names = list(stored[0].rows)
        columns = {name: object_rows.values_of([each.rows.get(name, _EMPTY) for each in every]) for name in names}
        ref = self.plane.put(columns, **self._options)
        if self._remembers:
            process.Watch(ref, [owner for each in stored for owner in each.owners])
        return ref

    def give_up(self, ref: BatchRef) -> None:
        """Free rows whose inputs could not be put, unless they are freed with their tensors."""
        if not self._remembers:
            self.plane.free(ref)

    def inputs(self, items: Sequence[Sequence[Any]]) -> tuple[dict[str, BatchRef], list[tuple[str, ...]]]:
        """Put the inputs of items, which are handles or dicts; those that are known are not put again. Returns a
        reference for each group of inputs with one schema, by its name, and for each item the groups of its inputs.
        Raises as `Plane.put`."""
        several = [each for own in items for each in own]
        refs = [each.ref if isinstance(each, LazyRow) else self.find(list(each.values())) for each in several]
        new = [each for each, ref in zip(several, refs, strict=True) if ref is None]
        made = iter(self._put_inputs(new) if new else ())
        groups: dict[str, str] = {}
        found: dict[str, list[BatchRef]] = {}
        of: list[str] = []
        for ref in [next(made) if ref is None else ref for ref in refs]:
            of.append(groups.setdefault(repr(ref.schema), str(len(groups))))
            found.setdefault(of[-1], []).append(ref)
        named = iter(of)
        return {name: concat(own) for name, own in found.items()}, [tuple([next(named) for _ in own]) for own in items]

    def _put_inputs(self, dicts: Sequence[dict[str, Any]]) -> list[BatchRef]:
        rows = put_rows(dicts, repeated=True, plane=self.plane, **self._options)
        refs = [row.ref for row in rows if row is not None]
        tensors = [list(each.values()) for each in dicts]
        if self._remembers:
            process.Watch(concat(refs), [value for own in tensors for value in own if is_tensor(value)])
        for own, ref in zip(tensors, refs, strict=True):
            self._learn(own, ref)
        return refs

    def find(self, tensors: Sequence[Any]) -> BatchRef | None:
        """The row of these tensors, if they were put, and not written to, resized or bound to other memory since."""
        known = self._known.get(tuple(map(id, tensors)))
        if known is None or any(ref() is not tensor for ref, tensor in zip(known.tensors, tensors, strict=True)):
            return None
        return known.ref if known.state == list(map(_state, tensors)) else None

    def learn(self, items: Sequence[Any], ref: BatchRef) -> None:
        """Remember each of these items that is a tensor as a row of the reference."""
        alive = [
            (key, known) for key, known in self._known.items() if all(each() is not None for each in known.tensors)
        ]
        self._known = dict(alive)
        for row, item in enumerate(items):
            self._learn([item], ref[row])

    def _learn(self, tensors: Sequence[Any], ref: BatchRef) -> None:
        if self._remembers and all(is_tensor(each) and _is_plain(each) for each in tensors):
            known = _SentTensors(list(map(weakref.ref, tensors)), list(map(_state, tensors)), ref)
            self._known[tuple(map(id, tensors))] = known


def is_experience(value: Any) -> bool:
    """Whether it is an `Experience`. False if OpenRLHF was never imported."""
    kind = getattr(sys.modules.get("openrlhf.trainer.ppo_utils.experience"), "Experience", None)
    return kind is not None and isinstance(value, kind)


def _parts(name: str, item: Any, kind: type | None, *, strict: bool) -> _Parts | None:
    """The parts of an item, of an Experience if there is a `kind`; None if it stays in the list."""
    parts = _Parts(owners=[] if kind is None else [item])
    try:
        if kind is None:
            parts.add(name, item)
        else:
            for each in fields(item):
                parts.add(each.name, getattr(item, each.name))
    except SchemaMismatch:
        if strict:
            raise
        return None
    return parts if parts.owners or strict else None


def _is_plain(tensor: Any) -> bool:
    """Whether a column returns it unchanged: in host memory, strided, without gradients and lazy operations."""
    import torch

    strided = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return bool(strided and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()))


def _state(tensor: Any) -> tuple[Any, ...]:
    """The state of a tensor: different after it was written to or bound to other memory, and always if torch does
    not count its writes."""
    version = object() if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _called(name: str, ref: BatchRef | None) -> BatchRef:
    assert ref is not None, "what was not known has been put"
    (own,) = ref.columns
    return ref if own == name else ref.rename({own: name})


#: OpenRLHF's class, which is not imported here: it takes seconds.
Experience = Any


class RemoteExperience:
    """The result of `put`: a stored Experience, or a list of them. Picklable."""

    def __init__(self, items: RemoteList, several: bool) -> None:
        self.items = items
        self.several = several

    @property
    def refs(self) -> list[BatchRef]:
        """References to the stored columns: first that with a row for each Experience and its fields as columns, then
        those of the inputs."""
        return self.items.refs

    def __len__(self) -> int:
        """The number of Experiences."""
        return len(self.items)

    def __repr__(self) -> str:
        return f"RemoteExperience({len(self)} of them, {sum(ref.nbytes for ref in self.refs)} bytes)"


def put(
    experience: Experience | Sequence[Experience], *, scope: str | None = None, timeout: float = 60.0
) -> RemoteExperience:
    """Store an Experience, or several.

    Raises SchemaMismatch with the field for a value that no column represents: tensors on a device or with
    requires_grad, functions. Raises Misuse for anything but Experiences, and as `Plane.put`.
    """
    several = isinstance(experience, Sequence)
    items = list(experience) if several else [experience]
    for item in items:
        if not is_experience(item):
            raise Misuse(f"put takes an openrlhf Experience or a list of them, not {type(item).__name__}")
    sent = SentRows(plane_of_process(), remembers=False, scope=scope, timeout=timeout)
    return RemoteExperience(RemoteList.of("experience", items, sent, strict=True), several)


def get(
    there: RemoteExperience, *, fields: Collection[str] | None = None, lazy: bool = False, device: Any = None
) -> Experience:
    """Read the stored Experience, or the list of them.

    fields: read these; the others have the values of a new Experience. None: all.
    device: the device of its tensors, instead of a later `experience.to_device(device)`.
    lazy: return `mm_train_inputs` as handles that read them at the first access.

    Raises as `Plane.get`.
    """
    items = there.items[:]  # items stay mapped only while they are used, not as long as `there`
    found = items.items(range(len(items)), fields, lazy=lazy)
    for each in found if device is not None else ():
        each.to_device(device)
    return found if there.several else found[0]


def free(there: RemoteExperience) -> None:
    """Free the stored rows; idempotent. Batches that were read stay valid. Raises as `Plane.free`."""
    for ref in there.refs:
        plane_of_process().free(ref)
