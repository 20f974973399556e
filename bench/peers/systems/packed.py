"""Packs columns as a header and buffers, for stores of bytes, without copies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bench.peers.work import Columns


def pack(columns: Columns) -> tuple[bytes, list[Any]]:
    """The header, and the bytes of the arrays in its order."""
    arrays, header = [], {}
    for name, values in columns.items():
        rows = values if isinstance(values, list) else [values]
        header[name] = [isinstance(values, list), [[row.dtype.str, list(row.shape)] for row in rows]]
        arrays += rows
    return json.dumps(header).encode(), [row.reshape(-1).view(np.uint8) for row in arrays]


def unpack(header: bytes, payload: Any) -> Columns:
    """Unpack columns, as views of the payload, in which the buffers follow each other."""
    whole, at, columns = np.frombuffer(payload, np.uint8), 0, {}
    for name, (ragged, rows) in json.loads(header).items():
        made = []
        for dtype, shape in rows:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            made.append(whole[at : at + size].view(dtype).reshape(shape))
            at += size
        columns[name] = made if ragged else made[0]
    return columns
