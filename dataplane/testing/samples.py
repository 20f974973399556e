"""Candidates for tests of samplers, without a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.stream.sampler import Candidates


def candidates(
    group: Sequence[int],
    *,
    version: Sequence[int] | None = None,
    age_s: Sequence[float] | None = None,
    group_rows: Mapping[int, int] | None = None,
    group_dropped: Mapping[int, int] | None = None,
    lengths: Mapping[str, Sequence[int]] | None = None,
    tags: Mapping[str, Any] | None = None,
    latest: int | None = None,
    closed: bool = False,
    whole: bool = True,
) -> Candidates:
    """Ready rows with these groups, as a sampler gets them.

    `group_rows` and `group_dropped` are by group: the number of rows of the group in the stream (by default the
    ready ones), and of dropped ones (by default none). Versions and ages are 0 by default; `latest` is the newest
    version among the rows. The arrays are read-only: a sampler must not change its input.
    """
    ready = {number: list(group).count(number) for number in set(group)} | dict(group_rows or {})
    dropped = dict(group_dropped or {})
    versions = np.asarray(version if version is not None else [0] * len(group), np.int64)
    made = Candidates(
        group=np.asarray(group, np.int64),
        version=versions,
        age_s=np.asarray(age_s if age_s is not None else [0.0] * len(group), np.float64),
        group_rows=np.asarray([ready[number] for number in group], np.int64),
        group_dropped=np.asarray([dropped.get(number, 0) for number in group], np.int64),
        lengths={name: np.asarray(values, np.int64) for name, values in (lengths or {}).items()},
        tags={name: np.asarray(values) for name, values in (tags or {}).items()},
        latest=latest if latest is not None else int(versions.max(initial=0)),
        closed=closed,
        whole=whole,
    )
    arrays = (made.group, made.version, made.age_s, made.group_rows, made.group_dropped)
    for each in (*arrays, *made.lengths.values(), *made.tags.values()):
        each.flags.writeable = False
    return made
