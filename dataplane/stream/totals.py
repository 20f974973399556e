"""What a stream's partitions had counted that are gone, so that what it counts for ever never goes back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_EVER = ("delivered", "redelivered", "acked", "expired")
"""What a task's figures count since the stream was made."""


class _Totals(msgspec.Struct, frozen=True, array_like=True):
    """`tasks`: of each the counts of `_EVER`."""

    appended: int = 0
    tasks: dict[str, tuple[int, ...]] = {}


def added(totals: bytes, figures: Mapping[str, Any]) -> bytes:
    """The totals, b"" at first, with the last figures of a partition that goes."""
    before = _decoded(totals)
    tasks = {name: tuple(task[each] for each in _EVER) for name, task in figures["task"].items()}
    zeros = (0,) * len(_EVER)
    summed = {
        name: tuple(a + b for a, b in zip(before.tasks.get(name, zeros), now, strict=True))
        for name, now in tasks.items()
    }
    return msgspec.msgpack.encode(_Totals(before.appended + figures["appended"], before.tasks | summed))


def with_totals(figures: dict[str, Any], totals: bytes) -> dict[str, Any]:
    """The figures of the partitions that there are, with the totals of those that are gone."""
    gone = _decoded(totals)
    tasks = {
        name: task | {each: task[each] + more for each, more in zip(_EVER, gone.tasks.get(name, ()), strict=False)}
        for name, task in figures["task"].items()
    }
    return figures | {"appended": figures["appended"] + gone.appended, "task": tasks}


def _decoded(totals: bytes) -> _Totals:
    return msgspec.msgpack.decode(totals, type=_Totals) if totals else _Totals()
