"""Values of Python's own types beyond MessagePack's: each is a name and the parts that it is made of.

`parts_of` gives the two for a value of exactly one of these types, `made` the value back. Parts are plain values or
values of these kinds again; whoever encodes them walks them. Invariants: `made` calls nothing but the
constructors in the table, and what comes back equals what was given and has its type.

A value that carries what its kind does not hold (an attribute that somebody set, a default factory of their own) is
refused with `Unfit`, not held in part.
"""

from __future__ import annotations

import datetime as dt
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

#: What each kind is encoded as, and decoded from.
Parts = Sequence[Any]


class Unfit(Exception):
    """What was found that can not be held, and what to do about it."""

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found = found
        self.hint = hint


_FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)},
    **{kind.__name__: kind for kind in (deque, OrderedDict, Counter, defaultdict)},
}


def parts_of(value: Any) -> tuple[str, Parts] | None:
    """The name of the value's kind and its parts; None where it is of none of these types. Raises Unfit."""
    found = _TAKE.get(type(value))
    if found is None:
        return None
    name, parts = found
    if getattr(value, "__dict__", None):
        raise Unfit(f"a {name} with attributes of its own", "keep those in a dict beside it")
    return name, parts(value)


def made(name: str, parts: Parts) -> Any:
    """The value of these parts. Raises ValueError, TypeError, ArithmeticError or LookupError for what is none."""
    return _MAKE[name](*parts)


def _flat(value: Any) -> Parts:
    return list(chain.from_iterable(dict.items(value)))


def pairs(items: Parts) -> dict[Any, Any]:
    """The dict of keys and values that follow one another."""
    if len(items) % 2:
        raise ValueError("a key without a value")
    return dict(zip(items[::2], items[1::2], strict=True))


def _take_int(value: int) -> Parts:
    return [value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _make_int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _take_default(value: defaultdict[Any, Any]) -> Parts:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise Unfit("a defaultdict with a factory of its own", "use dict(value), or a factory such as list or int")
    return [name, *_flat(value)]


def _make_default(name: str | None, *items: Any) -> defaultdict[Any, Any]:
    return defaultdict(None if name is None else _FACTORIES[name], pairs(items))


def _zone(zone: dt.tzinfo | None) -> dt.tzinfo | None:
    """The zone, if it is of a kind that is held."""
    if zone is None or type(zone) in (dt.timezone, ZoneInfo):
        return zone
    raise Unfit(f"a time zone of {type(zone).__module__}", "use zoneinfo.ZoneInfo or datetime.timezone")


def _take_zone(zone: ZoneInfo) -> Parts:
    if zone.key is None:
        raise Unfit("a ZoneInfo without a key", "use zoneinfo.ZoneInfo(key)")
    return [zone.key]


def _take_timezone(zone: dt.timezone) -> Parts:
    named: Parts = zone.__getinitargs__()  # type: ignore[attr-defined]  # the offset, and the name if it was given one
    return named


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


def _make_slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)


_ROWS: list[tuple[str, type, Callable[[Any], Parts], Callable[..., Any]]] = [
    ("int", int, _take_int, _make_int),  # beyond the 64 bits that MessagePack has
    ("complex", complex, lambda value: [value.real, value.imag], complex),
    ("bytearray", bytearray, lambda value: [bytes(value)], bytearray),
    ("range", range, lambda value: [value.start, value.stop, value.step], range),
    ("slice", slice, lambda value: [value.start, value.stop, value.step], _make_slice),
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
    ("timezone", dt.timezone, _take_timezone, dt.timezone),
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
