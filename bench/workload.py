"""The measured batches, and limits of the machine to compare with."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import timed

FIELDS, SEQUENCE = 9, 8192
ROWS = 1024


def dense(rows: int = ROWS) -> dict[str, Any]:
    """TransferQueue's own throughput workload: `rows` x 9 fields x 8192 float32; 1024 rows are 288 MiB."""
    source = np.random.default_rng(0)
    return {f"field_{i}": source.standard_normal((rows, SEQUENCE), dtype=np.float32) for i in range(FIELDS)}


def ragged(rows: int = ROWS) -> dict[str, Any]:
    """Four columns of 1 to 8192 int64 a row, and one of text, of the length of a short answer."""
    source = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    for i in range(4):
        lengths = source.integers(1, SEQUENCE + 1, rows)
        columns[f"tokens_{i}"] = [source.integers(0, 150_000, n, dtype=np.int64) for n in lengths]
    columns["text"] = ["the answer is " + "7 " * int(n) for n in source.integers(1, 200, rows)]
    return columns


def nbytes(columns: dict[str, Any]) -> int:
    """The bytes of the values."""
    total = 0
    for values in columns.values():
        if isinstance(values, list):
            total += sum(len(v.encode()) if isinstance(v, str) else v.nbytes for v in values)
        else:
            total += values.nbytes
    return total


class WarmCopy:
    """The limit for a put: NumPy copying the same bytes into shared memory whose pages are warm and mapped."""

    def __init__(self, size: int) -> None:
        fd = os.memfd_create("bench-limit")
        os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        os.close(fd)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._bytes[:] = 1

    def seconds(self, columns: dict[str, Any]) -> float:
        """Seconds of one copy of all arrays. Texts are left out."""
        arrays = [a for v in columns.values() for a in (v if isinstance(v, list) else [v]) if isinstance(a, np.ndarray)]
        whole = [np.concatenate([a.reshape(-1).view(np.uint8) for a in arrays])] if len(arrays) > FIELDS else arrays

        def copy() -> None:
            start = 0
            for array in whole:
                source = array.reshape(-1).view(np.uint8)
                np.copyto(self._bytes[start : start + len(source)], source)
                start += len(source)

        return timed(copy)


def direct_write(directory: Path, size: int = 256 << 20, chunk: int = 8 << 20) -> float:
    """The limit for a spill: bytes/s of one sequential O_DIRECT write, in chunks, of a fresh file."""
    buffer = mmap.mmap(-1, chunk)
    buffer[:] = os.urandom(chunk)
    path = directory / "bench-direct-write"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        seconds = timed(lambda: [os.pwrite(fd, buffer, start) for start in range(0, size, chunk)])
    finally:
        os.close(fd)
        path.unlink()
    return size / seconds
