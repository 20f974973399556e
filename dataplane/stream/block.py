"""What a snapshot of a stream is told in, to another process or to a file: a head, and blocks of rows."""

from __future__ import annotations

import msgspec

from dataplane.stream.pieces import Begun
from dataplane.stream.settings import Settings

Value = str | int | float | bool | None


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the stream as a whole. `following`: the number of its next row. `counts`: by task, how many rows
    ever came to be leased, acked, expired and dead, and were leased again. `pages`: the numbers of those that have
    rows, `PAGE` by number in each."""

    settings: Settings
    mark: str
    following: int
    appended: int
    latest: int
    closed: bool
    counts: list[list[int]]
    pages: list[int]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Rows, ascending by number. Integers are int64, `ages_s` float64, `states` and `tries` uint8 of [tasks, rows]; a
    key is empty where none was given. `calls` as `Keys.calls` gives them; `dropped`: of groups, the rows
    dropped, as they count to each task; `begun`: those that are in progress."""

    rows: bytes
    groups: list[str | int | None]
    versions: bytes
    ages_s: bytes
    tags: dict[str, list[Value]]
    keys: list[str]
    calls: list[tuple[str, int, int, bytes]]
    states: bytes
    tries: bytes
    dropped: list[tuple[str | int, list[int]]]
    begun: list[Begun] = []
