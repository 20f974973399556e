"""A meter of the bytes that this process puts into Ray and gets from it, and of the seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray
from ray.experimental import get_object_locations


class Meter:
    """A context in which `ray.put` and `ray.get` of this process are counted. The time of waits for objects is not."""

    def __init__(self) -> None:
        self.moved = {"put": 0, "got": 0}
        self.seconds = 0.0

    def __enter__(self) -> Meter:
        self._put, self._get = ray.put, ray.get
        ray.put, ray.get = self._counted_put, self._counted_get
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        ray.put, ray.get = self._put, self._get

    def _counted_put(self, value: Any, **options: Any) -> Any:
        began = time.perf_counter()
        ref = self._put(value, **options)
        self.seconds += time.perf_counter() - began
        self.moved["put"] += _size([ref])
        return ref

    def _counted_get(self, refs: Any, **options: Any) -> Any:
        several = list(refs) if isinstance(refs, Sequence) else [refs]
        ray.wait(several, num_returns=len(several), fetch_local=False)
        self.moved["got"] += _size(several)
        began = time.perf_counter()
        value = self._get(refs, **options)
        self.seconds += time.perf_counter() - began
        return value


def _size(refs: Sequence[Any]) -> int:
    return sum(place.get("object_size") or 0 for place in get_object_locations(list(refs)).values())
