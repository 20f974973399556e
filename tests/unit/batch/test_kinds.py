from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest

from dataplane.batch.objects import decode_row, encode_rows
from dataplane.errors import Corrupt, SchemaMismatch
from tests.cases import each_case


@each_case(
    "value",
    [
        1 << 64,
        -(1 << 200),
        Decimal("-0"),
        Decimal("1E+999999999"),
        Decimal("sNaN123"),
        Fraction(1, 1 << 70),
        UUID(int=7),
        dt.datetime.max,
        dt.datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.timedelta.min,
        deque([1, 2, 3], maxlen=3),
        defaultdict(defaultdict, {1: defaultdict(int, {2: 3})}),
        range(0, 1 << 70, 3),
        {(1, frozenset({2})): {3}},
        complex(-0.0, float("inf")),
    ],
    ids=repr,
)
def test_a_value_at_an_edge_comes_back_exactly(value: Any) -> None:
    [row] = encode_rows("x", [value])
    back = decode_row("x", row)
    assert repr(back) == repr(value)
    assert type(back) is type(value)


class _Zone(dt.tzinfo):
    pass


def _marked() -> Any:
    counter = Counter("a")
    counter.mark = 1  # type: ignore[attr-defined]
    return counter


@each_case(
    ("value", "match"),
    [
        (defaultdict(lambda: 0), "factory"),
        (_marked(), "attributes"),
        (dt.datetime(2020, 1, 1, tzinfo=_Zone()), "time zone"),
        (Path("\udcff"), "surrogate"),
    ],
)
def test_what_can_not_be_held_whole_is_refused(value: Any, match: str) -> None:
    with pytest.raises(SchemaMismatch, match=match) as caught:
        encode_rows("x", [None, {"a": [value]}])
    assert caught.value.row == 1


_KIND = 6  # the extension


@each_case(
    "parts",
    [
        [],
        ["no such kind"],
        [1],
        [["int"]],
        ["set", []],
        ["set", {}],
        ["Fraction", 1, 0],
        ["Decimal", "x"],
        ["Decimal", "1E+9999999999999999999"],
        ["UUID", b"1"],
        ["date", 1, 2],
        ["date", 0, 1, 1],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 0],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 0, "UTC"],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 7, None],
        ["time", 25, 0, 0, 0, 0, None],
        ["ZoneInfo", "../../etc/passwd"],
        ["ZoneInfo", "/etc/passwd"],
        ["ZoneInfo", "No/Where"],
        ["timezone", 1],
        ["defaultdict", "print"],
        ["defaultdict", "int", 1],
        ["OrderedDict", 1],
        ["deque", -1],
        ["range", 1, 2, 0],
        ["slice", 1],
        ["complex", "1", "2"],
        ["timedelta", 10**10, 0, 0],
        ["WindowsPath", "a"],
    ],
    ids=repr,
)
def test_parts_that_make_no_value_are_corrupt(parts: list[Any]) -> None:
    forged = msgspec.msgpack.encode(msgspec.msgpack.Ext(_KIND, msgspec.msgpack.encode(parts)))
    with pytest.raises(Corrupt):
        decode_row("x", forged)
