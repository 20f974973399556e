"""The load that one stream carries with a number of hosts, which its leader's core limits.

The leader's time for a block is a line: a constant for the request, and a term for each row. It is fitted to measured
blocks of several sizes. Each host also costs its membership (`bench.membership`), and a lease that etcd's leader
renews.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """`base + each * x`."""

    base: float
    each: float

    def at(self, x: float) -> float:
        return self.base + self.each * x

    @classmethod
    def through(cls, points: Mapping[float, float]) -> Line:
        """The line of least squares of relative errors, with a slope that is not negative. `points`: y by x."""
        x, y = np.array([*points.keys()]), np.array([*points.values()])
        each = float(np.polyfit(x, y, 1, w=1.0 / np.maximum(y, 1e-9))[0]) if len(points) > 1 else 0.0
        if each <= 0:
            return cls(float(y.mean()), 0.0)
        return cls(float(np.average(y - each * x, weights=1.0 / np.maximum(y, 1e-9))), each)


@dataclass(frozen=True)
class Costs:
    """`leader_us`: the leader's time for a block that is appended, delivered and acked, by its rows. `member`, `etcd`:
    the share of a core of a node for its membership, and of etcd's leader, by the number of hosts."""

    leader_us: Line
    member: Line
    etcd: Line


@dataclass(frozen=True)
class Outcome:
    """The load for hosts that each append `rows_s` rows a second in blocks of `block` rows. `leader`, `etcd`: the share
    of a core that the stream's and etcd's leader need. `streams`: over how many the rows must be spread."""

    hosts: int
    rows_s: float
    block: int
    leader: float
    etcd: float

    @property
    def streams(self) -> int:
        return max(1, int(np.ceil(self.leader)))

    @property
    def bottleneck(self) -> str:
        return "etcd's leader" if self.etcd > max(self.leader, 1.0) else "the stream's leader"


def outcomes(costs: Costs, hosts: Sequence[int], rows_s: Sequence[float], blocks: Sequence[int]) -> list[Outcome]:
    """The outcomes for all combinations of hosts, rates and blocks."""
    return [
        Outcome(
            count,
            rate,
            block,
            count * rate / block * costs.leader_us.at(block) / 1e6 + costs.member.at(count),
            costs.etcd.at(count),
        )
        for count in hosts
        for rate in rows_s
        for block in blocks
    ]


def text(found: Sequence[Outcome]) -> str:
    """The outcomes as a table in text."""
    lines = ["  hosts  rows/s a host  rows a block  leader's core %  etcd's leader %  streams  full first"]
    lines += [
        f"{each.hosts:7d} {each.rows_s:14,.0f} {each.block:13d} {100 * each.leader:16.1f} {100 * each.etcd:16.2f}"
        f" {each.streams:8d}  {each.bottleneck}"
        for each in found
    ]
    return "\n".join(lines)


def scaling(found: Sequence[Outcome]) -> dict[str, object]:
    """The outcomes as points for the report's picture, by series."""
    kinds = dict.fromkeys((each.rows_s, each.block) for each in found)
    points = {
        f"{rows_s:g} rows/s a host, blocks of {block}": [
            [each.hosts, 100 * each.leader] for each in found if (each.rows_s, each.block) == (rows_s, block)
        ]
        for rows_s, block in kinds
    }
    return json.loads(json.dumps({"x": "hosts", "y": "leader's core, %", "series": points}))  # type: ignore[no-any-return]
