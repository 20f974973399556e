"""The format of a checkpoint of a stream: a head, and blocks of rows."""

from __future__ import annotations

import msgspec

from dataplane.stream.pieces import Begun
from dataplane.stream.settings import Settings

Value = str | int | float | bool | None


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The stream as a whole. `following`: the number of its next row. `counts`: for each task the number of leases,
    acks, expired rows, dead letters and redeliveries so far. `pages`: the pages that have rows, of `PAGE` numbers
    each."""

    settings: Settings
    mark: str
    following: int
    appended: int
    latest: int
    closed: bool
    counts: list[list[int]]
    pages: list[int]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Rows in ascending order. Integers are int64, `ages_s` float64, `states` and `tries` uint8 of [tasks, rows]. A
    key is empty if none was given. `calls`: see `Keys.calls`. `dropped`: for each group, the dropped rows that count
    for each task. `begun`: the rows in progress."""

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
