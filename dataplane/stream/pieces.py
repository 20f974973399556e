"""Rows in progress and their pieces, as values in commands, messages and the state; see `unfinished`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

SPANS = "version_spans"
"""The column of a finished row with the policy version of each span of tokens."""


@dataclass(frozen=True, slots=True)
class RowBeginning:
    """The beginning of a row in progress. `tokens`: the column whose tokens are counted by policy version."""

    token: int
    lease_s: float
    tokens: str
    client: str = ""


class RowPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a row in progress, made by this policy version. `number`: from 0, without the columns with which the
    row began. `last`: it finishes the row, which gets this version. `digest`: of the whole piece, to recognise a
    repeated one."""

    token: int
    number: int
    version: int
    last: bool = False
    digest: int = 0


class Begun(msgspec.Struct, array_like=True):
    """A row in progress. `spans`: (policy version, number of tokens) in order; neighbours differ in version."""

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
    """A row in progress, for users. `free`: it has no producer. `columns`: for its new producer, a reference to the
    columns of all pieces."""

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
    """The newest policy version such that at most this share of the tokens is older; a share of 0 gives the oldest.
    `otherwise` is returned for a row without tokens."""
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
