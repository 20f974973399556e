"""Equality of two columns as verl's union defines it: one type and shape, and equal values, with NaN equal to NaN
except in tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Whether they are equal; lists, tuples, dicts and arrays of objects are compared recursively."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, np.ndarray):
        return _same_arrays(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and same(list(a.unbind()), list(b.unbind()))
    return bool(torch.equal(a, b))


def _same_arrays(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind == "O":
        return all(same(x, y) for x, y in zip(a.flat, b.flat, strict=True))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
