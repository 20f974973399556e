"""Outlines: values without their tensors, which are replaced by placeholders.

`Outliner` takes values apart. Tensors, dicts of a processor's inputs, and handles to such dicts become placeholders for
rows of columns; the fields of an Experience without a tensor become a row of a column of bytes, encoded as objects.
`rebuilt` puts a value together again, with the next rows of each column. An outline therefore names no rows, outlines
of similar values are equal, and a list of a thousand of them has the size of one.

Invariants: a value is rebuilt with the same types, keys, shapes and dtypes. A value that no column represents
exactly (a tensor on a device, with requires_grad, sparse, or empty; other classes) stays in the outline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from dataplane.batch.dtypes import storage
from dataplane.batch.object_codec import encode_rows
from dataplane.errors import SchemaMismatch
from dataplane.integrations.rows import LazyRow

#: Where a dict is inputs that a processor made for a model, one a sample: `Experience.mm_train_inputs`, and the
#: argument `mm_train_inputs_list` of OpenRLHF's `forward`s.
_INPUTS = "mm_train_inputs"

#: Of an Experience: the row of a column of bytes with the fields that hold no tensors.
REST = "rest"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder of a tensor: the next `rows` rows of a column. Without a shape it is [rows], or [rows, length of
    the rows]."""

    column: str
    rows: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """A placeholder of a sample's inputs, a dict or a handle: the next row of a column."""

    column: str


@dataclass(frozen=True, slots=True)
class Plain:
    """A value itself. Equal to another only if both are comparable, of one type, and equal."""

    kind: type
    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """A list, a dict or an Experience, with the outlines of its parts."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


#: What stands for a value.
Outline = Placeholder | Inputs | Plain | Node

#: Plain values that are equal where they are the same.
_COMPARED = (type(None), bool, int, str)


@dataclass(frozen=True, slots=True)
class Extracted:
    """A part that was taken out of a value, with its column. `owner`: the object whose lifetime it shares, if not
    its own."""

    column: str
    value: Any
    owner: Any = None


class Outliner:
    """Takes the values of one list apart. `found`: the extracted parts, in the order of their placeholders.

    strict: refuse parts that no column represents, instead of leaving them in the outline.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.found: list[Extracted] = []
        self._strict = strict
        self._names: dict[tuple[Any, ...], str] = {}
        self._same: dict[Outline, Outline] = {}

    def outline(self, path: str, value: Any) -> Outline:
        """The outline of the value; its tensors are appended to `found`.

        Raises SchemaMismatch with the path of a part that no column represents, if `strict`.
        """
        if is_plain_tensor(value):
            return self._tensor(path, value)
        if isinstance(value, LazyRow) or (_INPUTS in path and type(value) is dict and _has_tensor(value)):
            return self._inputs(path, value)
        if type(value) is list:
            return self._shared(Node(list, (), tuple([self.outline(path, item) for item in value])))
        if type(value) is dict and all(type(key) is str for key in value):
            parts = tuple([self.outline(f"{path}.{key}", item) for key, item in value.items()])
            return self._shared(Node(dict, tuple(value), parts))
        if is_experience(value):
            return self._experience(value)
        return self._plain(path, value)

    def _plain(self, path: str, value: Any) -> Outline:
        if type(value) in _COMPARED:
            return self._shared(Plain(type(value), value))
        if self._strict and not (_is_tensor(value) and value.device.type == "cpu" and not value.numel()):
            encode_rows(path, [value])
            if _is_tensor(value):
                found = "a tensor on a device, or one that requires grad"
                hint = "pass experience.to_device('cpu'), and what is detached"
                raise SchemaMismatch(f"column {path!r} cannot hold {found}: {hint}", column=path, found=found)
        return Plain(object, _Once(value))

    def _tensor(self, path: str, tensor: Any) -> Outline:
        rows = tensor.shape[0] if tensor.ndim else 1
        name = self._name(path, tensor.dtype, tensor.ndim > 1)
        self.found.append(Extracted(name, tensor))
        return self._shared(Placeholder(name, rows, None if 1 <= tensor.ndim <= 2 else tuple(tensor.shape)))

    def _inputs(self, path: str, value: Any) -> Outline:
        if isinstance(value, LazyRow) and value.column is None:  # of several columns: it is small as it is
            return Plain(object, _Once(value))
        name = self._name(path, _look(value))
        self.found.append(Extracted(name, value))
        return self._shared(Inputs(name))

    def _experience(self, value: Any) -> Outline:
        """The outline of its fields; those without a tensor are one row of the column `rest`."""
        kept, rest = {}, {}
        for field in fields(value):
            own = getattr(value, field.name)
            if _is_bare(own):
                rest[field.name] = own
            else:
                kept[field.name] = self.outline(field.name, own)
        try:
            (row,) = encode_rows(REST, [rest])
        except SchemaMismatch:  # pictures, dates and the like: the content of each field is described by itself
            unfit = {name: own for name, own in rest.items() if not _encodes(own)}
            kept |= {name: self._plain(name, own) for name, own in unfit.items()}
            (row,) = encode_rows(REST, [{name: own for name, own in rest.items() if name not in unfit}])
        name = self._name(REST, REST)
        self.found.append(Extracted(name, row, value))
        return self._shared(Node(type(value), (*kept, REST), (*kept.values(), Placeholder(name, 1))))

    def _name(self, path: str, *look: Any) -> str:
        """The column of parts with this path and appearance."""
        known = self._names.get((path, *look))
        if known is None:
            taken = sum(name == path or name.startswith(f"{path}#") for name in self._names.values())
            known = self._names[(path, *look)] = f"{path}#{taken}" if taken else path
        return known

    def _shared(self, outline: Outline) -> Outline:
        """An equal outline from before, if there is one: objects that are pickled together are pickled once."""
        return self._same.setdefault(outline, outline)


class _Once:
    """A wrapper of a value that equals no other, so that outlines with it can be hashed and compared."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[Any], _Once], tuple[Any]]:
        return _Once, (self.value,)


def rebuilt(outline: Outline, take: Callable[[Placeholder | Inputs], Any]) -> Any:
    """The value of the outline; `take` returns the part of a placeholder, and is called in their order."""
    if isinstance(outline, Placeholder | Inputs):
        return take(outline)
    if isinstance(outline, Plain):
        return outline.value.value if outline.kind is object else outline.value
    parts = [rebuilt(part, take) for part in outline.parts]
    if outline.kind is list:
        return parts
    if outline.kind is dict:
        return dict(zip(outline.keys, parts, strict=True))
    return outline.kind(**dict(zip(outline.keys[:-1], parts[:-1], strict=True)), **parts[-1])


def places(outline: Outline) -> Iterator[Placeholder | Inputs]:
    """The placeholders of an outline, in order."""
    if isinstance(outline, Placeholder | Inputs):
        yield outline
    elif isinstance(outline, Node):
        for part in outline.parts:
            yield from places(part)


def is_experience(value: Any) -> bool:
    """Whether it is an `Experience`. False if OpenRLHF was never imported."""
    kind = getattr(sys.modules.get("openrlhf.trainer.ppo_utils.experience"), "Experience", None)
    return kind is not None and isinstance(value, kind)


def is_plain_tensor(value: Any) -> bool:
    """Whether it is a torch tensor that a column returns unchanged: in host memory, strided, with values."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return False
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_nested or not value.numel():
        return False
    if value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    try:
        storage(str(value.dtype)[6:])
    except ValueError:
        return False
    return True


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _encodes(value: Any) -> bool:
    try:
        encode_rows(REST, [value])
    except SchemaMismatch:
        return False
    return True


def _look(inputs: Any) -> tuple[Any, ...]:
    """The keys, dtypes and dimensions of inputs or of a handle to them: equal for rows of one column."""
    if isinstance(inputs, LazyRow):
        ((_, field),) = inputs.ref.schema.items()
        return tuple([(key, own.kind, own.dtype, len(own.shape)) for key, own in field.children])
    return tuple([(key, value.dtype, value.ndim) for key, value in inputs.items() if is_plain_tensor(value)])


def _has_tensor(value: dict[Any, Any]) -> bool:
    return any(is_plain_tensor(item) for item in value.values())


def _is_bare(value: Any) -> bool:
    """Whether it contains no tensor and no handle."""
    if isinstance(value, LazyRow) or _is_tensor(value):
        return False
    if type(value) is list:
        return all(map(_is_bare, value))
    return type(value) is not dict or all(map(_is_bare, value.values()))
