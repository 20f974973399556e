"""What both metas do alike: copies of tags, parts of nearly equal length, and values that all parts agree on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


def copied(tags: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tags that nobody else has. `copy.deepcopy` takes ten times as long for those that hold plain values."""
    return [dict(each) if _PLAIN.issuperset(map(type, each.values())) else copy.deepcopy(dict(each)) for each in tags]


def sizes(rows: int, chunks: int) -> list[tuple[int, int]]:
    """Where each of so many consecutive parts begins and ends; the first are one row longer."""
    if chunks < 1:
        raise ValueError(f"a batch is cut into one part or more, not {chunks}")
    base, longer = divmod(rows, chunks)
    ends = np.cumsum([base + (i < longer) for i in range(chunks)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def merged(what: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of all. Raises ValueError where two have a key with different values."""
    info: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in info and not _equal(info[key], value):
                raise ValueError(
                    f"{what}.concat: extra_info[{key!r}] is {info[key]!r} in one part, {value!r} in another"
                )
            info.setdefault(key, value)
    return info


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    try:
        return bool(a == b)
    except (ValueError, TypeError, RuntimeError):  # arrays within, which have no one answer
        return False
