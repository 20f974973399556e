from __future__ import annotations

import datetime
import decimal
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataplane.batch.arrow_out import VariableShapeTensorType
from dataplane.batch.put_plan import values_of
from dataplane.errors import SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import column, local_batch, same

_DTYPES = [
    *("bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128"),
    *(">float32", ">int16", ">complex64", "datetime64[ns]", "datetime64[s]", "datetime64[D]", "timedelta64[us]"),
    *("timedelta64[25s]", ">datetime64[ms]"),
]


def _of(dtype: str, *shape: int, seed: int = 3) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype[1:]).newbyteorder(">") if dtype[0] == ">" else np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * kind.itemsize)
    return raw.astype(np.uint8).view(kind).reshape(shape)


def _through(batch: Any) -> Any:
    """The batch as a table that was written to a stream and read again, put again."""
    table = batch.to_arrow()
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    read = pa.ipc.open_stream(sink.getvalue()).read_all()
    again = local_batch(read)
    assert again.schema == batch.schema
    return again


@each_case("dtype", _DTYPES)
def test_every_dtype_and_shape_survives_arrow(dtype: str) -> None:
    columns: dict[str, Any] = {
        "flat": _of(dtype, 4),
        "dense": _of(dtype, 4, 2, 3),
        "none": _of(dtype, 4, 0, 3),
        "pair": _of(dtype, 4, 2),
        "ragged": [_of(dtype, n) for n in (2, 0, 3, 1)],
        "items": [_of(dtype, n, 2) for n in (2, 0, 3, 1)],
        "gone": [_of(dtype, n, 0) for n in (2, 0, 3, 1)],
        "images": [_of(dtype, 2, n, 3) for n in (2, 0, 3, 1)],
        "struct": [{"a": _of(dtype, 2), "b": _of(dtype, 1)[0]}, {}, {"b": _of(dtype, 1)[0]}, {}],
    }
    batch = local_batch(columns)
    again = _through(batch)
    for name in batch:
        assert same(again[name].numpy(), batch[name].numpy()), name
    sliced = local_batch(batch.to_arrow().slice(1, 2))
    for name in batch:
        assert sliced.schema[name] == batch.schema[name]
        assert same(sliced[name].numpy(), batch[name][1:3].numpy()), name
    empty = local_batch(batch.to_arrow().slice(0, 0))
    assert {name: field.kind for name, field in empty.schema.items()} == {n: f.kind for n, f in batch.schema.items()}


@each_case(
    ("array", "kind", "rows"),
    [
        (pa.array(["a", "ü", ""]), "text", ["a", "ü", ""]),
        (pa.array(["a", "ü", ""], pa.string_view()), "text", ["a", "ü", ""]),
        (pa.array([b"a", b""]), "bytes", [b"a", b""]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), "bytes", [b"ab", b"cd"]),
        (pa.array([b"a", b""], pa.binary_view()), "bytes", [b"a", b""]),
        (pa.array([True, False, True]), "dense", [True, False, True]),
        (pa.array([1.5, 2.5], pa.float16()), "dense", [1.5, 2.5]),
        (pa.array(["x", "y", "x"]).dictionary_encode(), "text", ["x", "y", "x"]),
        (pa.array([[1, 2], []]), "ragged", [[1, 2], []]),
        (pa.array([[True], [False, True]]), "ragged", [[True], [False, True]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), "dense", [[1, 2], [3, 4]]),
        (pa.array([[[1, 2]], []], pa.list_(pa.list_(pa.int32(), 2))), "ragged", [[[1, 2]], []]),
        (pa.array([[[1, 2], [3]], []]), "object", [[[1, 2], [3]], []]),
        (pa.array([["a"], []]), "object", [["a"], []]),
        (pa.array([1, None]), "object", [1, None]),
        (pa.array(["a", None]), "object", ["a", None]),
        (pa.array([[1], None]), "object", [[1], None]),
        (pa.array([[1, None]]), "object", [[1, None]]),
        (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), "object", [[1, 2], None]),
        (pa.array([None, None]), "object", [None, None]),
        (pa.array([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]), "struct", [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]),
        (pa.array([{"a": 1}, {"a": None}]), "struct", [{"a": 1}, {"a": None}]),
        (pa.array([{"a": 1}, None]), "object", [{"a": 1}, None]),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "object", [[("k", 1)]]),
        (pa.array([datetime.date(2020, 1, 1)]), "object", [datetime.date(2020, 1, 1)]),
        (pa.array([datetime.time(1)]), "object", [datetime.time(1)]),
        (pa.array([1], pa.timestamp("s", "UTC")), "object", pa.array([1], pa.timestamp("s", "UTC")).to_pylist()),
        (pa.array([1], pa.decimal128(5)), "object", [decimal.Decimal(1)]),
        (pa.array([], pa.string()), "text", []),
        (pa.array([], pa.list_(pa.int8())), "ragged", []),
        (pa.array([], pa.float32()), "dense", []),
    ],
    ids=str,
)
def test_arrows_types_become_columns(array: Any, kind: str, rows: list[Any]) -> None:
    found = column(array)
    assert found.kind == kind
    assert found.to_list() == rows
    if len(array):
        assert column(array[1:]).to_list() == rows[1:]
        chunked = pa.chunked_array([array, array[:0], array[1:]])
        assert column(chunked).to_list() == rows + rows[1:]


def test_arrow_tensors_with_inconsistent_shapes_are_refused() -> None:
    storage = pa.array(
        [{"data": [1, 2, 3], "shape": [2, 2]}],
        pa.struct([("data", pa.list_(pa.int16())), ("shape", pa.list_(pa.int32(), 2))]),
    )
    with pytest.raises(SchemaMismatch, match="shapes") as caught:
        values_of("x", pa.ExtensionArray.from_storage(VariableShapeTensorType(pa.int16(), 2), storage))
    assert caught.value.column == "x"
