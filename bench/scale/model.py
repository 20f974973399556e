"""What one stream carries, whatever the number of hosts: its leader's core is what is full first.

A request costs the leader some time, and a row some more: a line through what blocks of several sizes cost. Hosts add
what being members costs (`bench.membership`), and etcd's leader renews a lease for each.
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
        """The line of least squares, of a slope that is not negative; small points count as much as large ones."""
        x, y = np.array([*points.keys()]), np.array([*points.values()])
        each = float(np.polyfit(x, y, 1, w=1.0 / np.maximum(y, 1e-9))[0]) if len(points) > 1 else 0.0
        if each <= 0:
            return cls(float(y.mean()), 0.0)
        return cls(float(np.average(y - each * x, weights=1.0 / np.maximum(y, 1e-9))), each)


@dataclass(frozen=True)
class Costs:
    """`leader_us`: of a block that is appended, given and acked, by its rows. `member`: the part of a core that being a
    member takes, by the number of hosts; `etcd`: the same of etcd's leader."""

    leader_us: Line
    member: Line
    etcd: Line


@dataclass(frozen=True)
class Outcome:
    """So many hosts that each append so many rows/s in blocks of so many rows: the part of its core that the stream's
    leader needs, and etcd's leader of its own; `streams`: into how many streams the rows have to go."""

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
    """What these costs mean for so many hosts."""
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
    """A table of them."""
    lines = ["  hosts  rows/s a host  rows a block  leader's core %  etcd's leader %  streams  full first"]
    lines += [
        f"{each.hosts:7d} {each.rows_s:14,.0f} {each.block:13d} {100 * each.leader:16.1f} {100 * each.etcd:16.2f}"
        f" {each.streams:8d}  {each.bottleneck}"
        for each in found
    ]
    return "\n".join(lines)


def scaling(found: Sequence[Outcome]) -> dict[str, object]:
    """Points for the report's picture."""
    kinds = dict.fromkeys((each.rows_s, each.block) for each in found)
    points = {
        f"{rows_s:g} rows/s a host, blocks of {block}": [
            [each.hosts, 100 * each.leader] for each in found if (each.rows_s, each.block) == (rows_s, block)
        ]
        for rows_s, block in kinds
    }
    return json.loads(json.dumps({"x": "hosts", "y": "leader's core, %", "series": points}))  # type: ignore[no-any-return]
