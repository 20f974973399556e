"""Large copies into memory that other processes will read.

They go past the caches where the extension `_copying` was built (it says why); without it NumPy copies, with the same
result. Small ones stay in the caches, for whoever reads them next.
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
try:
    from dataplane.batch._copying import join as _join
except ImportError:  # there was no C compiler
    _join = None


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
