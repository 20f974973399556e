"""Arrow arrays that are not what their types say: found before anything of them is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataplane.batch.arrow_check import check
from dataplane.batch.columns import plan
from dataplane.errors import SchemaMismatch
from tests.cases import each_case

TEXT = pa.large_string()
FAR = 1 << 40


def numbers(*values: int, dtype: type = np.int64) -> Any:
    return pa.py_buffer(np.array(values, dtype).tobytes())


def text(*offsets: int, data: bytes = b"abcd", kind: Any = TEXT, dtype: type = np.int64) -> Any:
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, numbers(*offsets, dtype=dtype), pa.py_buffer(data)])


def lists(*offsets: int, child: Any = None) -> Any:
    values = pa.array([1, 2]) if child is None else child
    kind = pa.large_list(values.type)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, numbers(*offsets)], children=[values])


def struct(child: Any, **how: Any) -> Any:
    return pa.Array.from_buffers(pa.struct([("a", child.type)]), len(child), [None], children=[child], **how)


def union() -> Any:
    kind = pa.dense_union([pa.field("a", pa.int64()), pa.field("b", pa.string())])
    types, offsets = pa.py_buffer(bytes([0, 1])), numbers(0, 1 << 30, dtype=np.int32)
    return pa.Array.from_buffers(kind, 2, [None, types, offsets], children=[pa.array([1]), pa.array(["x"])])


FALSE: dict[str, Callable[[], Any]] = {
    "an offset beyond the text": lambda: text(0, FAR, 4),
    "an offset below the text": lambda: text(0, -2, 4),
    "offsets that fall": lambda: text(0, 3, 1, 4),
    "an offset beyond text of 32 bits": lambda: text(0, 1 << 30, 4, kind=pa.string(), dtype=np.int32),
    "an offset beyond the bytes": lambda: text(0, FAR, 4, kind=pa.large_binary()),
    "text that is not UTF-8": lambda: text(0, 2, 4, data=b"ab\xff\xfe"),
    "an offset in a character": lambda: text(0, 1, 2, data="ü".encode()),
    "an offset beyond a list": lambda: lists(0, FAR, 2),
    "text in a list": lambda: lists(0, 1, 2, child=text(0, FAR, 4)),
    "text in a list of a fixed size": lambda: pa.Array.from_buffers(
        pa.list_(TEXT, 1), 2, [None], children=[text(0, FAR, 4)]
    ),
    "text in a struct": lambda: struct(text(0, FAR, 4)),
    "text in a struct in a struct": lambda: struct(struct(text(0, FAR, 4))),
    "nulls that are not counted": lambda: pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x02"), numbers(1, 2)], null_count=2
    ),
    "nulls of a struct that are not there": lambda: pa.Array.from_buffers(
        pa.struct([("a", pa.int64())]), 2, [pa.py_buffer(b"\x03")], null_count=2, children=[pa.array([1, 2])]
    ),
    "nulls of a list that are not there": lambda: pa.Array.from_buffers(
        pa.large_list(pa.int64()),
        2,
        [pa.py_buffer(b"\x03"), numbers(0, 1, 2)],
        null_count=1,
        children=[pa.array([1, 2])],
    ),
    "an index beyond a dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0, FAR]), pa.array(["a", "b"]), safe=False
    ),
    "a union's offset beyond its child": union,
    "run ends that fall": lambda: pa.Array.from_buffers(
        pa.run_end_encoded(pa.int64(), pa.string()),
        4,
        [None],
        children=[pa.array([3, 2, 4]), pa.array(["a", "b", "c"])],
    ),
    "an extension's storage": lambda: pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), [1]),
        pa.Array.from_buffers(
            pa.list_(pa.int64(), 1), 2, [pa.py_buffer(b"\x03")], null_count=1, children=[pa.array([1, 2])]
        ),
    ),
}


@each_case("what", FALSE)
def test_what_is_not_as_its_type_says_is_refused(what: str) -> None:
    """By the check, and by whoever puts it: alone, in chunks, in a table and in a slice."""
    try:
        array = FALSE[what]()
    except pa.ArrowInvalid:
        pytest.skip("this pyarrow makes no such array")
    for given in (array, pa.chunked_array([array]), pa.chunked_array([array.slice(0, 0), array])):
        with pytest.raises(SchemaMismatch, match="'x'") as error:
            check("x", given)
        assert error.value.column == "x"
        with pytest.raises(SchemaMismatch):
            plan({"x": given})
        with pytest.raises(SchemaMismatch):
            plan(pa.table({"x": given}))
