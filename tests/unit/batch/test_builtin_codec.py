from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dataplane.batch.object_codec import decode_row
from dataplane.errors import Corrupt
from tests.cases import each_case

_KIND = 6  # the extension


@each_case(
    "parts",
    [
        [], ["no such kind"], [1], [["int"]], ["set", []], ["set", {}], ["Fraction", 1, 0], ["Decimal", "x"],
        ["Decimal", "1E+9999999999999999999"], ["UUID", b"1"], ["date", 1, 2], ["date", 0, 1, 1],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 0], ["datetime", 1, 1, 1, 1, 1, 1, 1, 0, "UTC"],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 7, None], ["time", 25, 0, 0, 0, 0, None],
        ["ZoneInfo", "../../etc/passwd"], ["ZoneInfo", "/etc/passwd"], ["ZoneInfo", "No/Where"],
        ["timezone", 1], ["defaultdict", "print"], ["defaultdict", "int", 1], ["OrderedDict", 1], ["deque", -1],
        ["range", 1, 2, 0], ["slice", 1], ["complex", "1", "2"], ["timedelta", 10**10, 0, 0],
        ["WindowsPath", "a"],
    ],
    ids=repr,
)  # fmt: skip
def test_encoded_parts_that_form_no_value_are_corrupt(parts: list[Any]) -> None:
    forged = msgspec.msgpack.encode(msgspec.msgpack.Ext(_KIND, msgspec.msgpack.encode(parts)))
    with pytest.raises(Corrupt):
        decode_row("x", forged)
