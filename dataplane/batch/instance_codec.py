"""Values of classes that users define: enums, data classes, named tuples, and subclasses of the plain types.

Such a value is the module and qualified name of its class, and what the instance holds. A class is looked up in
`sys.modules` alone: nothing is imported for what a row says. What is found must be a class of the kind that the row
says, and none with `__del__`. Instances are made by the plain type's own `__new__` and get their attributes put into
place, so neither `__init__` nor `__post_init__`, `__setattr__` or a property runs. (Hashing a key and combining
flags may run what the class defines.)

A class that can not be found under its own name (one of a function) is refused when it is put.
"""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum, Flag
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from dataplane.batch.builtin_codec import Parts, Unfit

_BASES: dict[str, type] = {kind.__name__: kind for kind in (str, int, float, bytes, list, dict, tuple, object)}
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it


class Absent(Exception):
    """A class that this process does not have: what a row holds, and what to do about it."""


def parts_of(value: Any) -> tuple[str, Parts] | None:
    """The kind of the value and its parts; None where it is of none of these kinds. Raises Unfit."""
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
        content = vars(base)["__getnewargs__"](value)[0]  # the plain value, whatever the class made of its methods
    return "instance", [*name, content, attributes, slots]


def made(name: str, parts: Parts) -> Any:
    """The value of these parts. Raises Absent where the class is not here, ValueError or TypeError for what is none."""
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
    """What the instance's dict holds, and what its slots do."""
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
    """The plain type that instances are made by; None for a class that is none of those which are held."""
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
    """Whether an instance is its attributes alone, with nothing below them that another `__new__` would make."""
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=1024)
def _named(kind: type) -> tuple[str, str]:
    """The module and the qualified name under which the class is found. Raises Unfit where it is not."""
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
    """The class of that name. Raises Absent where its module is not imported or has none, ValueError if it is none."""
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
