"""What a process knows of the versions of one set of weights: what the register says, and layouts that it has read.

A version mostly has the layout of the one before: the same tensors at the same places of as many chunks. So what is
asked for is looked up in a layout once, and of each later version on the same host two things are asked: what there is
and where (one look at the register), and the chunks.

Invariants: what is kept is named by the digest of the layout that it was made of, and never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.client.weightmap import Place, Plan
from dataplane.weights.layout import Placement, placement
from dataplane.weights.slices import Selected

PLACED = "placed"
"""The tag of a part's row that says where its chunks are."""

_PLANS = 4  # of one process: with other names, or other slices


@dataclass(frozen=True, slots=True)
class Seen:
    """What the register has: of each complete version, by rank, in how many rows its part is, and where it is, if that
    is told; the number of the last news; all keys."""

    complete: dict[int, list[int]]
    placed: dict[int, list[Any]]
    news: int
    keys: list[str]

    @staticmethod
    def of(keys: list[str], tags: Sequence[Mapping[str, Any]]) -> Seen:
        """What these rows of the register say."""
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
        return Seen(complete, placed, news, keys)

    def placements(self, version: int) -> list[Placement] | None:
        """Where each rank's part of a version is; None where that is not told of all of them."""
        found = [placement(where) for where in self.placed.get(version, [])]
        told = [each for each in found if each is not None]
        return told if told and len(told) == len(found) else None


class Plans:
    """What was asked for lately, of which layouts, and where in their chunks that is."""

    def __init__(self) -> None:
        self._plans: list[tuple[list[bytes], Any, Plan]] = []

    def find(
        self, placed: Sequence[Placement], names: Sequence[str] | None, slices: Mapping[str, Selected] | None
    ) -> Plan | None:
        """What this is in these layouts; None where it was not asked for lately."""
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
        """This is what was asked for."""
        asked = (None if names is None else list(names), copy.deepcopy(dict(slices)) if slices else None)
        self._plans = [([each.layout for each in placed], asked, plan), *self._plans[: _PLANS - 1]]


def shards_here(placed: Sequence[Placement], node: bytes, chunks: Iterable[Place]) -> list[int] | None:
    """The shards of these chunks, where all of them are on this node."""
    if any(each.node != node for each in placed):
        return None
    numbers = [each.numbers() for each in placed]
    wanted = list(chunks)
    if any(chunk >= len(numbers[rank]) for rank, chunk in wanted):
        return None
    return [numbers[rank][chunk] for rank, chunk in wanted]
