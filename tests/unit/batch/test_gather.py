"""Rows of several pieces, selected and put in order: every view of every kind against the plain list of rows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.batch import Column
from dataplane.batch.field import Field, merge_fields
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import StoredPiece
from tests.unit.batch.exact import local_batch, of_pieces, piece, rows_as, same

_RNG = np.random.default_rng(7)

#: For each kind, values of three pieces. Their fields differ where a column's may.
_PIECES: dict[str, list[Any]] = {
    "scalars": [np.arange(n, dtype=np.int32) + 10 * n for n in (4, 1, 3)],
    "dense": [_RNG.random((n, 2, 3)) for n in (4, 1, 3)],
    "no elements": [np.zeros((n, 0, 3), np.float32) for n in (4, 1, 3)],
    "bfloat16": [torch.from_numpy(_RNG.random((n, 2))).to(torch.bfloat16) for n in (4, 1, 3)],
    "ragged": [[_RNG.random(int(i)) for i in _RNG.integers(0, 5, n)] for n in (4, 1, 3)],
    "items": [[_RNG.random((int(i), 3)) for i in _RNG.integers(0, 5, n)] for n in (4, 1, 3)],
    "empty items": [[np.zeros((int(i), 0)) for i in _RNG.integers(0, 5, n)] for n in (4, 1, 3)],
    "images": [
        [_RNG.random((2, i % 3, 1 + i)) for i in range(4)],
        [np.ones((1, 2, 3))],
        [np.ones((n, 5, 3)) for n in range(3)],
    ],
    "text": [["a", "", "ü", "xyz"], ["日本"], ["q", "r", "s"]],
    "ascii": [["a", "", "b", "xyz"], ["c"], ["q", "r", "s"]],
    "bytes": [[b"a", b"", b"\xff", b"xyz"], [b""], [b"q", b"r", b"s"]],
    "object": [[None, 1, (2, [3]), {"a": {4: 5}}], [["x"]], ["q", 2.5, b"r"]],
    "empty lists": [[[], [], [], []], [[1, 2]], [[], [], []]],
    "empty lists and objects": [[["a"], [], ("b",), []], [[]], [[], [], []]],
    "struct": [
        [{"a": 1, "t": "x"}, {}, {"a": 2}, {"t": "y", "r": np.ones((2, 3))}],
        [{"u": {"v": [1.5, 2.5]}}],
        [{"a": 3, "r": np.zeros((1, 4))}, {"u": {}}, {"u": {"v": [], "w": None}}],
    ],
}


def _rows(values: Any) -> list[Any]:
    return list(values.unbind()) if isinstance(values, torch.Tensor) else list(values)


@given(st.data())
@pytest.mark.parametrize("kind", _PIECES)
def test_any_selection_of_pieces_reads_the_selected_rows(kind: str, data: st.DataObject) -> None:
    pieces: list[StoredPiece] = []
    expected: list[Any] = []
    fields: list[Field] = []
    for i in data.draw(st.lists(st.integers(0, 2), max_size=4)):
        values = _PIECES[kind][i]
        one = piece("x", values, dedupe=data.draw(st.booleans()))
        count = one.layout.rows
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, count))
            rows = RowIndices.range(start, data.draw(st.integers(start, count)))
        else:
            rows = RowIndices.index(np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=6)), np.int64))
        pieces.append(one._replace(rows=rows))
        fields.append(one.layout.field)
        stored = _rows(values)
        expected += [stored[row] for row in rows.array().tolist()]
    order = None
    if expected and data.draw(st.booleans()):
        positions = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=8))
        order = np.array(positions, np.int64)
        expected = [expected[position] for position in positions]
    field = merge_fields("x", fields or [piece("x", _PIECES[kind][0]).layout.field])
    column = of_pieces("x", field, pieces, order)
    _check(column, expected)
    cut = data.draw(st.slices(len(expected)))
    _check(column[cut], expected[cut])
    if expected:
        at = data.draw(st.integers(-len(expected), len(expected) - 1))
        assert same(column[at], list(column)[at])


def _check(column: Column, expected: list[Any]) -> None:
    assert len(column) == len(expected)
    plain = [_plain(row) for row in expected]
    assert same(column.to_list(), plain)
    assert len(column.arrow()) == len(expected)
    if column.kind == "text":
        assert column.arrow().to_pylist() == expected
    if column.dtype == "bfloat16":
        assert same(list(column.torch().unbind()), expected)
    elif column.kind in ("dense", "ragged"):
        arrays = [np.array(row, np.int64) if type(row) is list else row for row in expected]
        assert same(rows_as(column, "numpy"), arrays)
        assert same(rows_as(column, "torch"), [torch.from_numpy(np.array(row)) for row in arrays])
        assert column.nbytes == sum(row.nbytes for row in arrays)
    elif column.kind != "struct":
        assert same(list(column.numpy()), expected)
    else:
        assert [sorted(row) for row in column.torch()] == [sorted(row) for row in expected]
        assert same(_without_nested(column.numpy()), _without_nested(expected))


def _without_nested(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The keys whose rows NumPy gives as they were put."""
    return [{key: value for key, value in row.items() if key in ("r", "t")} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def test_contiguous_rows_are_read_in_place_and_others_are_gathered() -> None:
    one = piece("x", np.arange(12.0).reshape(6, 2))
    stored = one.memory.read(*one.layout.buffers[0])
    whole = of_pieces("x", one.layout.field, [one])
    assert np.shares_memory(whole.numpy(), stored)
    assert np.shares_memory(whole[2:4].numpy(), stored)
    assert np.shares_memory(np.asarray(whole.arrow().storage.values), stored)
    assert not np.shares_memory(whole[::2].numpy(), stored)
    assert not np.shares_memory(of_pieces("x", one.layout.field, [one, one]).numpy(), stored)


def test_importing_and_using_batches_imports_neither_torch_nor_pyarrow() -> None:
    program = """
import sys
import dataplane.batch.layout
assert not {"torch", "pyarrow", "xxhash", "tensordict"} & set(sys.modules), "layout"
import numpy as np
from dataplane.batch.batch import Batch, Column
from dataplane.batch.stored_column import Selection, StoredColumn
from dataplane.batch.layout import aligned_bytes
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.client.memory import CarriedShard
planned = plan(
    {
        "x": np.zeros(3), "t": ["a", "b", "c"], "r": [[1], [], [2]], "o": [None, 1, (2,)],
        "s": [{"a": np.ones(2)}, {}, {}],
    },
    dedupe=["t"],
)
memory = aligned_bytes(planned.nbytes)
for job in planned.jobs(memory):
    job()
held, rows = CarriedShard(memory.data, 0, len(memory)), RowIndices.range(0, planned.rows)
selected = [(n, c.field, Selection(StoredColumn(n, c, held), rows)) for n, c in planned.layout().columns]
batch = Batch({name: Column(name, field, [each]) for name, field, each in selected})
for column in batch.values():
    column.numpy(), column.to_list(), column.nbytes
assert not {"torch", "pyarrow", "tensordict"} & set(sys.modules), "columns"
batch.to_arrow()
assert not {"torch", "tensordict"} & set(sys.modules), "arrow"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_packed_columns_consist_of_values_and_row_offsets() -> None:
    rows = [np.arange(6, dtype=np.float32).reshape(3, 2), np.zeros((0, 2), np.float32), np.ones((1, 2), np.float32)]
    column = local_batch({"x": rows, "y": ["a", "b", "c"]})["x"]
    values, offsets = column.packed()
    assert values.tolist() == [[0, 1], [2, 3], [4, 5], [1, 1]]
    assert offsets.tolist() == [0, 3, 3, 4]
    values.zero_()
    assert column.numpy()[0].tolist() == rows[0].tolist()
