"""Arrow values of others, and tables in files, are validated before they are used."""

from __future__ import annotations

import datetime
import decimal
import io
import random
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataplane.batch import arrow_in
from dataplane.batch.arrow_in import check
from dataplane.batch.arrow_out import VariableShapeTensorType
from dataplane.batch.batch import Batch
from dataplane.batch.layout import check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.put_plan import plan, values_of
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import StoredPiece
from dataplane.errors import Corrupt, DataplaneError, SchemaMismatch
from tests.cases import each_case
from tests.processes import Worker
from tests.unit.batch.exact import LocalMemory, column, filled, local_batch, of_pieces, same


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, to what offsets, lengths and counts are wrong with."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(changed))
        match chance.randrange(5):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                at &= ~7
                far = chance.choice((1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, 1 << 31, 0, 7, 1 << 20))
                changed[at : at + 8] = far.to_bytes(8, "little")
            case 3:
                at &= ~3
                changed[at : at + 4] = chance.choice((1 << 30, (1 << 31) - 1, (1 << 32) - 1, 0, 1)).to_bytes(
                    4, "little"
                )
            case _:
                size = len(changed[at : at + 16])
                changed[at : at + size] = chance.randbytes(size)
    return bytes(changed[: len(data)])


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
def test_invalid_arrow_arrays_are_refused(what: str) -> None:
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


ROWS = 4
KINDS: dict[str, Any] = {
    "numbers": np.arange(12, dtype=np.float32).reshape(ROWS, 3),
    "flags": np.array([True, False, True, True]),
    "nothing": np.empty((ROWS, 0), np.int16),
    "times": np.array([0, 1, "NaT", 3], "datetime64[ns]"),
    "complex": np.array([1j, 2, 3, 4]),
    "lists": [np.arange(n) for n in (2, 0, 3, 1)],
    "items": [np.ones((n, 2), np.int16) for n in (2, 0, 3, 1)],
    "images": [np.ones((2, n, 3), np.float32) for n in (1, 2, 0, 3)],
    "text": ["a", "bc", "", "ü"],
    "bytes": [b"\xff", b"", b"abc", b"\0"],
    "objects": [None, 1, (2,), {"k": 3}],
    "structs": [{"a": 1}, {"b": "x"}, {}, {"a": 2, "b": "y"}],
    "nested": [{"s": {"t": ["x"]}, "r": np.arange(3)}, {"s": {"u": b"b"}}, {}, {"r": np.arange(1)}],
}


def stored(columns: Any) -> Batch:
    """The columns as a put of them would be read."""
    planned = plan(columns)
    memory = filled(planned)
    layout = planned.layout()
    check_layout(layout.encode(), len(memory))
    check_contents(layout, memory)
    held, rows = LocalMemory(memory), RowIndices.range(0, planned.rows)
    return Batch(
        {name: of_pieces(name, column.field, [StoredPiece(column, held, rows)]) for name, column in layout.columns}
    )


def written(name: str) -> bytes:
    return bytes(arrow_in.encode_table(stored({name: KINDS[name]}).to_arrow()))


@each_case("name", KINDS)
def test_every_kind_of_column_round_trips_through_an_arrow_table(name: str) -> None:
    before = stored({name: KINDS[name]})
    after = stored(dict(arrow_in.columns_of(arrow_in.decode_table(written(name)), checked=True)))
    assert after.schema == before.schema
    assert repr(after[name].to_list()) == repr(before[name].to_list())


def outcome(data: bytes) -> str:
    """What comes of restoring these bytes and of looking at them in every way."""
    try:
        table = arrow_in.decode_table(data)
        if table.num_rows != ROWS:
            return "other rows"
        batch = stored(dict(arrow_in.columns_of(table.combine_chunks(), checked=True)))
        for column in batch.values():
            column.to_list()
            column.numpy()
            column.arrow()
    except DataplaneError as error:
        return type(error).__name__
    return "data"


def tries(pipe: Any, seed: int, count: int) -> None:
    """Tells what came of all, if it may have as much memory as the few bytes of a file are worth, and lives."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    files, found = {name: written(name) for name in KINDS}, Counter[str]()
    for number in range(count):
        chance = random.Random(seed * 1_000_003 + number)
        found[outcome(mutated(chance, files[chance.choice(list(files))]))] += 1
    pipe.send(dict(found))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_any_bytes_are_data_or_a_typed_error(seed: int) -> None:
    """In a process of its own, which would die of an offset that is followed and false."""
    with Worker(tries, seed, 1000) as worker:
        found = worker.hear()
        assert worker.join() == 0
    assert found.keys() <= {"data", "other rows", Corrupt.__name__, SchemaMismatch.__name__}
    assert found["data"] > 50
    assert found[Corrupt.__name__] > 500


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


@each_case("tensor", [np.complex128(1 + 2j), np.ones((2, 3))])
def test_rows_without_a_struct_of_tensors_survive_arrow(tensor: Any) -> None:
    rows = [{"media": {"pixels": tensor}}, {}, {}]
    table = local_batch({"inputs": rows}).to_arrow()
    for lacking in (table.slice(1), table.slice(0, 1), table):
        found = local_batch(lacking)["inputs"]
        assert repr(found.field) == repr(local_batch({"inputs": rows})["inputs"].field)
        assert same(found.numpy(), rows[-len(found) :] if len(found) != 1 else rows[:1])


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
