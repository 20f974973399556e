from __future__ import annotations

import subprocess
import sys

import numpy as np

from tests.unit.batch.exact import local_batch


def test_importing_and_using_batches_imports_neither_torch_nor_pyarrow() -> None:
    program = """
import sys
import dataplane.batch.layout
assert not {"torch", "pyarrow", "xxhash", "tensordict"} & set(sys.modules), "layout"
import numpy as np
from dataplane.batch.batch import Batch, Column, StoredPiece
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
batch = Batch({name: Column(name, c.field, [StoredPiece(c, held, rows)]) for name, c in planned.layout().columns})
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
