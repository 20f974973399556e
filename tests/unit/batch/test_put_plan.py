from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.batch.layout import aligned_bytes, check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.put_plan import plan
from dataplane.errors import SchemaMismatch
from tests.cases import each_case


@each_case(
    ("columns", "name", "says"),
    [
        ({}, "", "0 columns"), ({"": [1]}, "", "name"), ({1: [1]}, "1", "name"),
        ({"a": [1], "b": [1, 2]}, "b", "2 rows, and column 'a' has 1"), ({"a": 1}, "a", "no sequence"),
        ({"a": "text"}, "a", "no sequence"), ({"a": b"bytes"}, "a", "no sequence"),
        ({"a": {1, 2}}, "a", "list"), ({"a": np.array(1)}, "a", "0-d"), ({"a": torch.tensor(1)}, "a", "0-d"),
        ({"a": np.zeros(2, np.longdouble)}, "a", "cannot be stored"),
        ({"a": np.zeros(2, "i4,O")}, "a", "cannot hold"), ({"a": np.zeros(2, np.longdouble)}, "a", "float64"),
        ({"a": np.ma.masked_array([1, 2], [0, 1])}, "a", "masked"),
        ({"a": np.zeros((1,) * 40)}, "a", "dimensions"), ([1, 2], "", "no batch"),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(columns: Any, name: str, says: str) -> None:
    with pytest.raises(SchemaMismatch, match=says.replace("(", r"\(")) as caught:
        plan(columns)
    assert caught.value.column == name


_MIXED: dict[str, Any] = {
    "dense": np.arange(4000.0).reshape(1000, 4),
    "strided": np.arange(8000).reshape(1000, 8)[:, ::2],
    "tensor": torch.arange(4000).view(4, 1000).t(),
    "ragged": [np.arange(i % 17) for i in range(1000)],
    "tensors": [torch.ones(i % 5, 3) * i for i in range(1000)],
    "images": [np.full((i % 3, 2, i % 4), i) for i in range(1000)],
    "text": [f"answer {i}" for i in range(1000)],
    "bytes": [b"x" * (i % 2000) for i in range(1000)],
    "object": [None if i % 2 else i for i in range(1000)],
    "struct": [{"a": i} if i % 3 else {"b": [i] * (i % 4)} for i in range(1000)],
    "twice": [f"prompt {i // 8}" for i in range(1000)],
}


@each_case("piece", [1, 100, 4096, 1 << 30])
def test_jobs_write_every_byte_in_any_order_and_in_threads(piece: int) -> None:
    planned = plan(_MIXED, dedupe=["twice"])
    results = []
    for fill in (0, 255):
        memory = aligned_bytes(planned.nbytes)
        memory[:] = fill
        jobs = planned.jobs(memory, piece)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(job) for job in jobs[::-1]]:
                done.result()
        results.append(memory)
    assert bool((results[0] == results[1]).all())
    layout = planned.layout()
    check_layout(layout.encode(), planned.nbytes)
    check_contents(layout, results[0])
