"""A process's knowledge of the versions of one set of weights: the content of the register, and decoded layouts.

A version mostly has the layout of the previous one: the same tensors at the same positions of as many chunks. So a
request is resolved in a layout once, and each later version on the same host needs two requests: the register, for the
versions and their locations, and the chunks.

Invariants: a cached plan belongs to the digest of its layout, and never changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.client.weight_map import Place, Plan
from dataplane.weights.layout import Placement, placement
from dataplane.weights.slices import Selected

PLACED = "placed"
"""The tag of a part's row with the locations of its chunks."""

_PLANS = 4  # of one process: with other names, or other slices


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """The content of the register: for each complete version, by rank, the number of rows of its part, and its
    location if known; the number of the last change; all keys."""

    complete: dict[int, list[int]]
    placed: dict[int, list[Any]]
    news: int
    keys: list[str]

    @staticmethod
    def of(keys: list[str], tags: Sequence[Mapping[str, Any]]) -> KnownVersions:
        """The content of these rows of the register."""
        parts: dict[int, dict[int, tuple[int, int, Any]]] = {}
        news = 0
        for key, said in zip(keys, tags, strict=True):
            kind, *numbers = key.split("/")
            if kind == "n":
                news = max(news, int(numbers[0]))
            elif kind == "p":
                version, rank, ranks, pages = map(int, numbers)
                parts.setdefault(version, {})[rank] = ranks, pages, said.get(PLACED)
        complete: dict[int, list[int]] = {}
        placed: dict[int, list[Any]] = {}
        for version, each in parts.items():
            if all(ranks == len(each) for ranks, *_ in each.values()):
                complete[version] = [pages for _, (_, pages, _) in sorted(each.items())]
                placed[version] = [where for _, (_, _, where) in sorted(each.items())]
        return KnownVersions(complete, placed, news, keys)

    def placements(self, version: int) -> list[Placement] | None:
        """The location of each rank's part of a version; None if one is unknown."""
        found = [placement(where) for where in self.placed.get(version, [])]
        told = [each for each in found if each is not None]
        return told if told and len(told) == len(found) else None


class Plans:
    """The last requests by their layouts, with the positions of their tensors in the chunks."""

    def __init__(self) -> None:
        self._plans: list[tuple[list[bytes], Any, Plan]] = []

    def find(
        self, placed: Sequence[Placement], names: Sequence[str] | None, slices: Mapping[str, Selected] | None
    ) -> Plan | None:
        """The plan of this request in these layouts; None if it is not cached."""
        layouts = [each.layout for each in placed]
        asked = (None if names is None else list(names), slices or None)
        return next((plan for of, what, plan in self._plans if of == layouts and what == asked), None)

    def keep(
        self,
        placed: Sequence[Placement],
        names: Sequence[str] | None,
        slices: Mapping[str, Selected] | None,
        plan: Plan,
    ) -> None:
        """Cache the plan of this request."""
        asked = (None if names is None else list(names), copy.deepcopy(dict(slices)) if slices else None)
        self._plans = [([each.layout for each in placed], asked, plan), *self._plans[: _PLANS - 1]]


def shards_here(placed: Sequence[Placement], node: bytes, chunks: Iterable[Place]) -> list[int] | None:
    """The shards of these chunks, if all of them are on this node."""
    if any(each.node != node for each in placed):
        return None
    numbers = [each.numbers() for each in placed]
    wanted = list(chunks)
    if any(chunk >= len(numbers[rank]) for rank, chunk in wanted):
        return None
    return [numbers[rank][chunk] for rank, chunk in wanted]
