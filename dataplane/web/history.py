"""Some minutes of statistics, in memory of constant size: a ring of buckets for each series.

A series is a row of a matrix. Invariants: there are at most `MAX_SERIES` series, and values of further ones are
ignored. A series without values in all buckets is removed. A bucket holds the mean of its values, and NaN without any.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

MAX_SERIES = 16_384

Key = tuple[Hashable, ...]


_LATEST = frozenset(("version",))
"""Series whose buckets hold the last value: a mean would be meaningless."""


class RateHistory:
    """The last `buckets` buckets of `bucket_s` seconds, for each series."""

    def __init__(self, bucket_s: float, buckets: int, max_series: int = MAX_SERIES) -> None:
        self.bucket_s = bucket_s
        self.buckets = buckets
        self._most = max_series
        self._rows: dict[Key, int] = {}
        self._free: list[int] = []
        self._seen: dict[Key, int] = {}
        self._values = np.full((64, buckets), np.nan, np.float32)
        self._counts = np.zeros(64, np.int32)  # of values in the newest bucket
        self._now = -1

    def __len__(self) -> int:
        """The number of series."""
        return len(self._rows)

    def add(self, at_s: float, values: Mapping[Key, float | None], since_s: float | None = None) -> None:
        """Add measurements of a time, by series; None is unknown. A time before the newest bucket counts for it. The
        values also fill the buckets since `since_s`."""
        last = max(self._now, int(at_s // self.bucket_s))
        first = last if since_s is None or self._now < 0 else max(self._now, int(since_s // self.bucket_s)) + 1
        for bucket in range(max(min(first, last), last - self.buckets + 1), last + 1):
            self._advance(bucket)
            self._put(values)

    def _put(self, values: Mapping[Key, float | None]) -> None:
        column = self._now % self.buckets
        for key, value in values.items():
            if value is None or not math.isfinite(value):
                continue
            row = self._row(key)
            if row is None:
                continue
            self._seen[key] = self._now
            count = self._counts[row]
            before = self._values[row, column] if count and key[-1] not in _LATEST else value
            self._values[row, column] = before + (value - before) / (count + 1)
            self._counts[row] = count + 1

    def _advance(self, now: int) -> None:
        if now == self._now:
            return
        if self._now < 0 or now - self._now >= self.buckets:
            self._values[:] = np.nan
        else:
            passed = [bucket % self.buckets for bucket in range(self._now + 1, now + 1)]
            self._values[:, passed] = np.nan
        self._counts[:] = 0
        self._now = now
        for key in [key for key, seen in self._seen.items() if now - seen >= self.buckets]:
            del self._seen[key]
            self._free.append(self._rows.pop(key))

    def _row(self, key: Key) -> int | None:
        row = self._rows.get(key)
        if row is not None:
            return row
        if len(self._rows) >= self._most:
            return None
        if not self._free:
            there = len(self._values)
            self._free = list(range(there, 2 * there)) if self._rows else list(range(there))
            if self._rows:
                self._values = np.vstack([self._values, np.full((there, self.buckets), np.nan, np.float32)])
                self._counts = np.concatenate([self._counts, np.zeros(there, np.int32)])
        row = self._rows[key] = self._free.pop()
        self._values[row] = np.nan
        self._counts[row] = 0
        return row

    @property
    def end(self) -> int:
        """The number of the newest bucket: seconds divided by `bucket_s`."""
        return self._now

    def series(self, key: Key) -> npt.NDArray[np.float32]:
        """The buckets of a series, the oldest first; all NaN for an unknown one."""
        row = self._rows.get(key)
        if row is None:
            return np.full(self.buckets, np.nan, np.float32)
        newest = self._now % self.buckets
        return np.roll(self._values[row], self.buckets - 1 - newest)

    def items(self) -> Iterator[tuple[Key, list[float | None]]]:
        """All series with their buckets rounded to four digits, the oldest first; None for empty buckets."""
        for key in self._rows:
            yield key, rounded(self.series(key))


def rounded(values: npt.NDArray[np.float32]) -> list[float | None]:
    """The values with four significant digits, None for NaN, and integers without a fraction."""
    return [None if math.isnan(v) else _short(v) for v in values.tolist()]


def _short(value: float) -> float:
    if value == 0.0:
        return 0
    digits = 3 - math.floor(math.log10(abs(value)))
    short = round(value, digits)
    return int(short) if digits <= 0 or short == int(short) else short
