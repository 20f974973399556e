"""Large copies into memory that other processes will read, and comparing what is large: at the pace of memory.

Copies go past the caches where the extension `_memory` was built (it says why); small ones stay in the caches, for
whoever reads them next. Without the extension NumPy does both, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.layout import Bytes

_STREAMED = 4 << 20  # bytes from which on a copy goes past the caches: about what a core has of its own

_join: Callable[[Bytes, tuple[Any, ...]], None] | None
_equal: Callable[[tuple[Any, ...]], list[bool]] | None
try:
    from dataplane.batch._memory import equal as _equal
    from dataplane.batch._memory import join as _join
except ImportError:  # there was no C compiler
    _join = _equal = None


def copy(target: Bytes, source: Bytes) -> None:
    """Write `source` into `target`, as long."""
    if _join is None or len(target) < _STREAMED:
        np.copyto(target, source)
    else:
        _join(target, (source,))


def join(target: Bytes, rows: Sequence[npt.NDArray[Any]], item_shape: tuple[int, ...] | None = None) -> None:
    """Write arrays of one dtype, one behind another, into `target`, as long as all of them. `item_shape` is what their
    shapes share behind the first dimension; None: they do not."""
    if _join is not None and len(target) >= _STREAMED:
        with suppress(BufferError, ValueError):  # a row with strides, or of a dtype without buffers, as datetime64
            _join(target, tuple(rows))
            return
    into = target.view(rows[0].dtype)
    if item_shape is None:
        np.concatenate([row.reshape(-1) for row in rows], out=into)
    else:
        np.concatenate(rows, out=into.reshape(-1, *item_shape))


def equal(rows: Sequence[Any]) -> list[bool]:
    """Of each of these buffers, all as long, whether it has the bytes of the first."""
    if _equal is not None:
        return _equal(tuple(rows))
    first = np.frombuffer(rows[0], np.uint8)
    return [True, *(np.array_equal(first, np.frombuffer(row, np.uint8)) for row in rows[1:])]
