"""A process that reads what others keep. Without torch, which takes long to import."""

from __future__ import annotations

from typing import Any

import numpy as np

import dataplane as dp

ROWS, ITEMS = 8, 64 << 10  # 4 MiB of float32 and more
LENGTHS = (3, 0, 70_000, 1, 5, 9, 0, 2)


def same(batch: dp.Batch, seed: int = 0) -> bool:
    """Whether it is what `test_keeping.columns` makes."""
    expected = np.arange(ROWS * 2 * ITEMS, dtype=np.float32).reshape(ROWS, -1) + np.float32(seed)
    return (
        np.array_equal(batch["x"].numpy(), expected)
        and all(np.array_equal(row, np.full(n, seed + n)) for row, n in zip(batch["ids"].numpy(), LENGTHS, strict=True))
        and batch["text"].to_list() == [f"{seed} {i}" for i in range(ROWS)]
    )


def consume(pipe: Any, address: str) -> None:
    """Reads what it is told to, and holds the batch until it is told something else."""
    with dp.connect(address) as plane:
        batch: dp.Batch | None = None
        while (told := pipe.recv()) is not None:
            ref, seed = told
            batch = None
            try:
                batch = plane.get(ref, timeout=60)
                pipe.send(same(batch, seed))
            except dp.DataplaneError as error:
                pipe.send(type(error).__name__)
        del batch
