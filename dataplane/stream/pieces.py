"""What is said of rows in progress, and of their pieces, in commands, messages and state: see `unfinished`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Begin:
    """What is said of a row that is begun. `tokens`: the column whose lengths versions are counted by."""

    token: int
    lease_s: float
    tokens: str
    client: str = ""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Which piece of a row: the `number`-th after what it was begun with, from 0, made by this policy version. `last`:
    with it the row is finished, of this version. `digest`: of all that is brought, so that one which comes again is
    known from another of its number."""

    token: int
    number: int
    version: int
    last: bool = False
    digest: int = 0


class Begun(msgspec.Struct, array_like=True):
    """A row in progress. `spans`: policy versions and how many tokens of each, in order, neighbours unequal."""

    row: int
    token: int
    client: str
    lease_s: float
    tokens: str
    version: int
    pieces: int = 0
    spans: list[tuple[int, int]] = []
    digest: int = 0


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A row in progress as it is told. `free`: nobody holds it. `columns`: to who takes it up, those of all pieces,
    read as one."""

    row: int
    key: str
    group: str | int | None
    version: int
    tags: dict[str, str | int | float | bool | None]
    tokens: str
    pieces: int
    spans: list[tuple[int, int]]
    age_s: float
    free: bool
    columns: bytes = b""


def stale_version(spans: Sequence[tuple[int, int]], share: float, otherwise: int) -> int:
    """The newest policy version that at most this share of the tokens is older than: 0 gives the oldest. Of a row
    without tokens, `otherwise`."""
    total, older = sum(count for _, count in spans), 0
    by_version: dict[int, int] = {}
    for version, count in spans:
        by_version[version] = by_version.get(version, 0) + count
    found = otherwise
    for version in sorted(by_version):
        if older > share * total:
            break
        found = version
        older += by_version[version]
    return found
