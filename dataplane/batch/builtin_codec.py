"""Encodes values of Python types that MessagePack lacks: each as the name of its kind, and parts.

`parts_of` returns the name and the parts of a value whose type is exactly one of the table; `made` creates the value
again from them. Parts are plain values, or values of these kinds, which the encoder encodes in turn. Invariants: `made`
calls only the constructors in the table; its result equals the original value and has the same type.

A value with content that its kind cannot store (an attribute that a user set, a default factory of the user's own) is
refused with `Unfit`, rather than stored incompletely.

A value of a class that users define (an enum, a data class, a named tuple, a subclass of a plain type) is encoded as
the module and qualified name of the class, and the contents of the instance (`instance_parts_of`, `instance_made`). The
class is looked up only in `sys.modules`, so decoding a row imports nothing. It must be of the kind that the row names,
and have no `__del__`. An instance is created by the `__new__` of the plain type, and its attributes are set directly,
so neither `__init__` nor `__post_init__`, `__setattr__` or a property runs. (Hashing a key and combining flags may run
methods of the class.) If a class cannot be found under its own name, such as one defined in a function, the put of its
instance is refused.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

#: The contents of a value, from which it can be created again.
Parts = Sequence[Any]


class Unfit(Exception):
    """A value that cannot be stored: what was found, and a hint."""

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found = found
        self.hint = hint


_FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)},
    **{kind.__name__: kind for kind in (deque, OrderedDict, Counter, defaultdict)},
}


def parts_of(value: Any) -> tuple[str, Parts] | None:
    """The name of the value's kind and its parts; None for other types. Raises Unfit for contents that the kind cannot
    store."""
    found = _TAKE.get(type(value))
    if found is None:
        return None
    name, parts = found
    if getattr(value, "__dict__", None):
        raise Unfit(f"a {name} with attributes of its own", "keep those in a dict beside it")
    return name, parts(value)


def made(name: str, parts: Parts) -> Any:
    """The value of these parts. Raises ValueError, TypeError, ArithmeticError or LookupError for invalid parts."""
    return _MAKE[name](*parts)


def _flat(value: Any) -> Parts:
    return list(chain.from_iterable(dict.items(value)))


def pairs(items: Parts) -> dict[Any, Any]:
    """The dict of alternating keys and values."""
    if len(items) % 2:
        raise ValueError("a key without a value")
    return dict(zip(items[::2], items[1::2], strict=True))


def _take_int(value: int) -> Parts:
    return [value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _take_default(value: defaultdict[Any, Any]) -> Parts:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise Unfit("a defaultdict with a factory of its own", "use dict(value), or a factory such as list or int")
    return [name, *_flat(value)]


def _make_default(name: str | None, *items: Any) -> defaultdict[Any, Any]:
    return defaultdict(None if name is None else _FACTORIES[name], pairs(items))


def _zone(zone: dt.tzinfo | None) -> dt.tzinfo | None:
    """The zone itself. Raises Unfit for a type of zone that cannot be stored."""
    if zone is None or type(zone) in (dt.timezone, ZoneInfo):
        return zone
    raise Unfit(f"a time zone of {type(zone).__module__}", "use zoneinfo.ZoneInfo or datetime.timezone")


def _take_zone(zone: ZoneInfo) -> Parts:
    if zone.key is None:
        raise Unfit("a ZoneInfo without a key", "use zoneinfo.ZoneInfo(key)")
    return [zone.key]


def _take_datetime(at: dt.datetime) -> Parts:
    return [at.year, at.month, at.day, at.hour, at.minute, at.second, at.microsecond, at.fold, _zone(at.tzinfo)]


def _make_datetime(
    year: int, month: int, day: int, hour: int, minute: int, second: int, us: int, fold: int, zone: dt.tzinfo | None
) -> dt.datetime:
    return dt.datetime(year, month, day, hour, minute, second, us, zone, fold=fold)


def _take_time(at: dt.time) -> Parts:
    return [at.hour, at.minute, at.second, at.microsecond, at.fold, _zone(at.tzinfo)]


def _make_time(hour: int, minute: int, second: int, us: int, fold: int, zone: dt.tzinfo | None) -> dt.time:
    return dt.time(hour, minute, second, us, zone, fold=fold)


_ROWS: list[tuple[str, type, Callable[[Any], Parts], Callable[..., Any]]] = [
    (
        "int",
        int,
        _take_int,
        lambda data: int.from_bytes(data, "little", signed=True),
    ),  # beyond 64 bits
    ("complex", complex, lambda value: [value.real, value.imag], complex),
    ("bytearray", bytearray, lambda value: [bytes(value)], bytearray),
    ("range", range, lambda value: [value.start, value.stop, value.step], range),
    (
        "slice",
        slice,
        lambda value: [value.start, value.stop, value.step],
        lambda start, stop, step: slice(start, stop, step),
    ),
    ("set", set, list, lambda *items: set(items)),
    ("frozenset", frozenset, list, lambda *items: frozenset(items)),
    ("deque", deque, lambda value: [value.maxlen, *value], lambda most, *items: deque(items, most)),
    ("OrderedDict", OrderedDict, _flat, lambda *items: OrderedDict(pairs(items))),
    ("Counter", Counter, _flat, lambda *items: Counter(pairs(items))),
    ("defaultdict", defaultdict, _take_default, _make_default),
    ("Decimal", Decimal, lambda value: [str(value)], Decimal),
    ("Fraction", Fraction, lambda value: [value.numerator, value.denominator], Fraction),
    ("UUID", UUID, lambda value: [value.bytes], lambda data: UUID(bytes=data)),
    ("date", dt.date, lambda day: [day.year, day.month, day.day], dt.date),
    ("time", dt.time, _take_time, _make_time),
    ("datetime", dt.datetime, _take_datetime, _make_datetime),
    ("timedelta", dt.timedelta, lambda value: [value.days, value.seconds, value.microseconds], dt.timedelta),
    ("timezone", dt.timezone, lambda zone: zone.__getinitargs__(), dt.timezone),  # with the name if it has one
    ("ZoneInfo", ZoneInfo, _take_zone, ZoneInfo),
    ("numpy.str_", np.str_, lambda value: [str(value)], np.str_),
    ("numpy.bytes_", np.bytes_, lambda value: [bytes(value)], np.bytes_),
    *(
        (kind.__name__, kind, lambda value: [str(value)], kind)
        for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath)
    ),
]
_TAKE = {kind: (name, take) for name, kind, take, _ in _ROWS}
_MAKE = {name: make for name, _, _, make in _ROWS}


_BASES: dict[str, type] = {kind.__name__: kind for kind in (str, int, float, bytes, list, dict, tuple, object)}
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it


class Absent(Exception):
    """The class of a value is not imported in this process, or has another version. The message has a hint."""


def instance_parts_of(value: Any) -> tuple[str, Parts] | None:
    """The kind of a value of a user's class, and its parts; None for other kinds. Raises Unfit for a value that cannot
    be stored."""
    kind: Any = type(value)
    if isinstance(value, Enum):
        return _parts_of_member(value, kind)
    base = _base(kind)
    if base is None:
        return None
    name = [*_named(kind), base.__name__]
    attributes, slots = _attributes(value, kind)
    if base is object:
        unset = [each.name for each in dataclasses.fields(kind) if each.name not in attributes | slots]
        missing = [each for each in unset if not hasattr(kind, each)]
        if missing:
            raise Unfit(f"a {kind.__qualname__} without its field {missing[0]}", "set it, or use a dict")
        return "instance", [*name, None, attributes, slots]
    if base is dict:
        content: Any = [part for pair in dict.items(value) for part in pair]
    elif base in (list, tuple):
        content = list(base.__iter__(value))
    else:
        content = vars(base)["__getnewargs__"](value)[0]  # the plain value, even if the class overrides methods
    return "instance", [*name, content, attributes, slots]


def instance_made(name: str, parts: Parts) -> Any:
    """The value of these parts. Raises Absent if this process lacks the class, and ValueError, TypeError, LookupError
    or AttributeError for invalid parts."""
    module, qualname, *rest = parts
    kind = _found(module, qualname)
    if name != "instance":
        return _member(kind, *rest)
    base, content, attributes, slots = rest
    plain = _BASES[base]
    if _base(kind) is not plain:
        raise ValueError(f"{qualname} is no class of {base}s that is held")
    return _instance(kind, plain, content, attributes, slots)


def _parts_of_member(value: Enum, kind: Any) -> tuple[str, Parts]:
    name = value._name_
    if kind._member_map_.get(name) is value:
        return "member", [*_named(kind), name]
    if isinstance(value, Flag):
        return "flags", [*_named(kind), value._value_]
    raise Unfit(f"a {kind.__qualname__} that is no member of its enum", "use a member, or its value")


def _member(kind: type, part: Any) -> Enum:
    if not issubclass(kind, Enum):
        raise ValueError(f"{kind.__qualname__} is no enum")
    if type(part) is int:
        if not issubclass(kind, Flag):
            raise ValueError(f"{kind.__qualname__} is no enum of flags")
        return kind(part)
    member = kind._member_map_.get(part)
    if member is None:
        raise Absent(
            f"{kind.__qualname__}.{part}, which {kind.__module__} does not have here: use the same version of it"
        )
    return member


def _instance(kind: type, base: type, content: Any, attributes: Any, slots: Any) -> Any:
    own: Any
    held = {dict: list, tuple: list, object: type(None)}.get(base, base)
    if type(content) is not held or type(attributes) is not dict or type(slots) is not dict:
        raise ValueError(f"{kind.__qualname__} is not made of this")
    if base is object:
        own = object.__new__(kind)
        here = {each.name for each in dataclasses.fields(kind) if not hasattr(kind, each.name)}
        if not here <= attributes.keys() | slots.keys():
            raise Absent(f"a {kind.__qualname__} of other fields than {kind.__module__} has here: use the same version")
    elif base is dict:
        own = dict.__new__(kind)
        for key, item in zip(content[::2], content[1::2], strict=True):
            dict.__setitem__(own, key, item)
    elif base is list:
        own = list.__new__(kind)
        list.extend(own, content)
    elif base is tuple:
        own = tuple.__new__(kind, content)
        if len(own) != len(kind._fields):  # type: ignore[attr-defined]
            raise Absent(f"a {kind.__qualname__} of other fields than {kind.__module__} has here: use the same version")
    else:
        own = base.__new__(kind, content)
    if attributes:
        _dict(own).update(attributes)
    known = _slots(kind)
    for name, item in slots.items():
        known[name].__set__(own, item)
    return own


def _attributes(value: Any, kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes in the instance's dict, and those in its slots."""
    attributes = _dict(value) if _has_dict(kind) else {}
    slots = {}
    for name, slot in _slots(kind).items():
        try:
            slots[name] = slot.__get__(value, kind)
        except AttributeError:  # never set
            continue
    return dict(attributes), slots


def _dict(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return found


@lru_cache(maxsize=1024)
def _has_dict(kind: type) -> bool:
    return any(type(vars(each).get("__dict__")) is GetSetDescriptorType for each in kind.__mro__)


@lru_cache(maxsize=1024)
def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of the classes that users defined, by the names of attributes."""
    return {
        name: slot
        for each in reversed(kind.__mro__)
        if each.__flags__ & _HEAP
        for name, slot in vars(each).items()
        if type(slot) is MemberDescriptorType
    }


@lru_cache(maxsize=1024)
def _base(kind: type) -> type | None:
    """The plain type whose `__new__` creates instances; None for a class whose instances cannot be stored."""
    if not kind.__flags__ & _HEAP or hasattr(kind, "__del__"):
        return None
    built_in = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP)
    if built_in is object:
        return object if dataclasses.is_dataclass(kind) and _is_bare(kind) else None
    if built_in is tuple:
        fields = getattr(kind, "_fields", None)
        return tuple if type(fields) is tuple and all(type(field) is str for field in fields) else None
    return built_in if built_in.__name__ in _BASES and _BASES[built_in.__name__] is built_in else None


def _is_bare(kind: type) -> bool:
    """Whether an instance consists only of its attributes, without content that a `__new__` other than that of `object`
    would create."""
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=1024)
def _named(kind: type) -> tuple[str, str]:
    """The module and the qualified name of the class. Raises Unfit if it is not found by these."""
    module, qualname = kind.__module__, kind.__qualname__
    try:
        same = _found(module, qualname) is kind
    except (Absent, ValueError):
        same = False
    if not same:
        raise Unfit(
            f"{module}.{qualname}", "define its class at the top of a module that readers import, or use a dict"
        )
    return module, qualname


def _found(module: str, qualname: str) -> type:
    """The class of this name. Raises Absent if its module is not imported or lacks the name, ValueError if the name is
    not a class."""
    here = sys.modules.get(module)
    if here is None:
        raise Absent(f"a {qualname} of {module}, which is not imported here: import {module} before you read it")
    found: Any = here
    for part in qualname.split("."):
        names = vars(found) if found is here or isinstance(found, type) else {}
        if part not in names:
            raise Absent(f"a {qualname}, which {module} does not have here: use the same version of {module}")
        found = names[part]
    if not isinstance(found, type):
        raise ValueError(f"{module}.{qualname} is no class")
    return found
