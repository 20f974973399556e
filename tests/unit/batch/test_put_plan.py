from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dataplane.batch.layout import aligned_bytes, check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.put_plan import plan
from tests.cases import each_case

ROWS = 250
_MIXED: dict[str, Any] = {
    "dense": np.arange(4.0 * ROWS).reshape(ROWS, 4),
    "strided": np.arange(8 * ROWS).reshape(ROWS, 8)[:, ::2],
    "tensor": torch.arange(4 * ROWS).view(4, ROWS).t(),
    "ragged": [np.arange(i % 17) for i in range(ROWS)],
    "tensors": [torch.ones(i % 5, 3) * i for i in range(ROWS)],
    "images": [np.full((i % 3, 2, i % 4), i) for i in range(ROWS)],
    "text": [f"answer {i}" for i in range(ROWS)],
    "bytes": [b"x" * (i % 2000) for i in range(ROWS)],
    "object": [None if i % 2 else i for i in range(ROWS)],
    "struct": [{"a": i} if i % 3 else {"b": [i] * (i % 4)} for i in range(ROWS)],
    "twice": [f"prompt {i // 8}" for i in range(ROWS)],
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
