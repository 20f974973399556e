"""Metadata of rows: group, policy version, age, tags, and the lengths of ragged columns. Samplers read it, and
deliveries contain it.

The values are in arrays, by page. The names of groups are in `groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded
from dataplane.stream.page import NONE, PAGE, Index, Objects, Page
from dataplane.stream.rows import Places, StreamRows

UNFINISHED = 1 << 62
"""The policy version of a row in progress (`unfinished`), which has none yet."""

MAX_TAGS = 256
"""The most names of tags in a stream. Each takes space in every row."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The metadata of an append, a value for each row. `tags` and `lengths` are by name."""

    groups: Sequence[Any] | None
    versions: Index
    tags: Mapping[str, Sequence[Any]]
    lengths: Mapping[str, Index]
    spares: Sequence[bytes] = ()
    """Other nodes that have copies of the columns."""
    begin: Any = None
    """`pieces.RowBeginning` of a single row in progress, else None."""


class RowMetadata:
    """The metadata of all rows of a stream, which are in the pages of `rows`."""

    def __init__(self, rows: StreamRows) -> None:
        self._rows = rows
        self._names: dict[str, None] = {}  # of tags
        self.latest = 0
        """The newest policy version that was appended."""

    def enter(
        self, places: Places, groups: Index, versions: Index, arrived: Any, tags: Mapping[str, Sequence[Any]]
    ) -> None:
        """Add rows in groups of these numbers. `arrived`: one time for all rows, or one each."""
        arrived = np.broadcast_to(np.asarray(arrived, np.float64), len(groups))
        for page, inside, chosen in places:
            page.group[inside] = groups[chosen]
            page.version[inside] = versions[chosen]
            page.arrived[inside] = arrived[chosen]
            for name, values in tags.items():
                if name not in page.tags:
                    page.tags[name] = np.full(page.room, None, object)
                page.tags[name][inside] = np.fromiter(values, object, len(groups))[chosen]
        self._names.update(dict.fromkeys(tags))
        self.latest = max(self.latest, int(versions.max(initial=self.latest, where=versions < UNFINISHED)))

    def enter_one(
        self,
        page: Page,
        inside: int,
        group: int,
        version: int,
        arrived: float,
        tags: Mapping[str, Sequence[Any]],
        lengths: Mapping[str, Index],
    ) -> None:
        """As `enter` and `measure`, for a single new row of the page."""
        page.group[inside], page.version[inside], page.arrived[inside] = group, version, arrived
        for name, (value,) in tags.items():
            if name not in page.tags:
                page.tags[name] = np.full(page.room, None, object)
            page.tags[name][inside] = value
            self._names[name] = None
        for name, length in lengths.items():
            if name not in page.lengths:
                page.lengths[name] = np.zeros(page.room, np.int64)
            page.lengths[name][inside] = length[0]
        self.latest = max(self.latest, version) if version < UNFINISHED else self.latest

    def set_version(self, place: tuple[Page, int], version: int, arrived: float) -> None:
        """Set the version and the arrival of a row that was in progress."""
        place[0].version[place[1]], place[0].arrived[place[1]] = version, arrived
        self.latest = max(self.latest, version)

    def require_room(self, tags: Iterable[str]) -> None:
        """Raise LimitExceeded if the stream would have more than `MAX_TAGS` names of tags."""
        names = self._names.keys() | tags
        if len(names) > MAX_TAGS:
            what = "tags of a stream"
            raise LimitExceeded(f"at most {MAX_TAGS} {what}, by name", what=what, asked=len(names), limit=MAX_TAGS)

    def measure(self, places: Places, lengths: Mapping[str, Index]) -> None:
        for name, values in lengths.items():
            for page, inside, chosen in places:
                if name not in page.lengths:
                    page.lengths[name] = np.zeros(page.room, np.int64)
                page.lengths[name][inside] = values[chosen]

    def groups(self, places: Places) -> Index:
        """The numbers of the groups of the rows."""
        found: Index = _gathered(places, (page.group for page, _, _ in places))
        return found

    def versions(self, places: Places) -> Index:
        found: Index = _gathered(places, (page.version for page, _, _ in places))
        return found

    def arrived(self, places: Places) -> npt.NDArray[np.float64]:
        """The times at which the rows were appended, in seconds of the clock of the stream."""
        found: npt.NDArray[np.float64] = _gathered(places, (page.arrived for page, _, _ in places))
        return found

    def tags(self, places: Places, names: Iterable[str] | None = None) -> dict[str, Objects]:
        """The values of these or all tags for each row, None for a row without the tag. A tag that no page of the rows
        has is absent."""
        known = dict.fromkeys(name for page, _, _ in places for name in page.tags)
        nothing = np.full(PAGE, None, object)
        return {
            name: _gathered(places, (page.tags.get(name, nothing) for page, _, _ in places))
            for name in (known if names is None else names)
            if name in known
        }

    def lengths(self, places: Places, column: str) -> Index:
        """The lengths of these rows in a ragged column; 0 if unknown."""
        nothing = np.zeros(PAGE, np.int64)
        found: Index = _gathered(places, (page.lengths.get(column, nothing) for page, _, _ in places))
        return found

    def measured(self, places: Places) -> list[str]:
        """The columns for which the pages of these rows have lengths."""
        return sorted({name for page, _, _ in places for name in page.lengths})

    @property
    def tag_names(self) -> list[str]:
        return list(self._names)

    def know_tags(self, names: Iterable[str]) -> None:
        self._names.update(dict.fromkeys(names))

    def in_groups(self, groups: Sequence[int]) -> Index:
        """The existing rows in groups of these numbers."""
        found = [
            page.first + np.flatnonzero(np.isin(page.group[: page.count], groups) & page.present)
            for page in self._rows.pages.values()
        ]
        return np.concatenate(found) if found else NONE

    def oldest(self) -> float | None:
        """The arrival of the oldest existing row; None if there is none."""
        arrived = [
            float(page.arrived[: page.count][page.present].min()) for page in self._rows.pages.values() if page.left
        ]
        return min(arrived, default=None)

    def copy(self, rows: StreamRows) -> RowMetadata:
        """A copy, for a copy of the rows."""
        copied = RowMetadata(rows)
        copied.latest, copied._names = self.latest, dict(self._names)
        return copied


def _gathered(places: Places, arrays: Iterable[npt.NDArray[Any]]) -> Any:
    """The entry of each row in the array of its page."""
    parts = [values[inside] for values, (_, inside, _) in zip(arrays, places, strict=True)]
    if len(parts) == 1:
        return parts[0]
    found = np.concatenate(parts) if parts else NONE
    order = np.concatenate([chosen for _, _, chosen in places]) if places else NONE
    back = np.empty_like(found)
    back[order] = found
    return back
