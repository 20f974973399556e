"""What rows cost on more hosts than there are: lines through what real nodes cost, over the partitions a block hits.

Rows that come whole stay in the partition of their host, with one follower: they cost more on more hosts only as
consumers that have taken all of their own look at all others, which is a line over the hosts. Groups that the placement
table places go to the partitions that a block's groups hit; each of those is a request, a message to a follower, and
their answers. So costs are a line over that number, which is at most the number of groups of a block. What being a
member costs is measured by itself (`bench.membership`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.partitions import BLOCK, GROUP

GROUPS = BLOCK // GROUP
"""Groups of a block."""


def partitions_hit(hosts: int, groups: int = GROUPS) -> float:
    """How many of so many partitions have one of these groups at least, on average: placed at random, each alike."""
    return hosts * (1.0 - (1.0 - 1.0 / hosts) ** groups)


@dataclass(frozen=True)
class Line:
    """`base + each * x`."""

    base: float
    each: float

    def at(self, x: float) -> float:
        return self.base + self.each * x

    @classmethod
    def through(cls, points: Mapping[float, float]) -> Line:
        """The line of least squares, of a slope that is not negative."""
        x, y = np.array([*points.keys()]), np.array([*points.values()])
        each = float(np.polyfit(x, y, 1)[0]) if len(points) > 1 else 0.0
        if each <= 0:
            return cls(float(y.mean()), 0.0)
        return cls(float(y.mean() - each * x.mean()), each)


@dataclass(frozen=True)
class Costs:
    """Of all nodes together: microseconds of processors a row, and requests between nodes for 512 rows. `member`: the
    part of a core that being a member takes, by the number of hosts; `etcd`: the same of etcd's leader."""

    whole_us: Line
    placed_us: Line
    placed_requests: Line
    member: Line
    etcd: Line

    @classmethod
    def of(
        cls,
        whole: Mapping[int, Mapping[str, float]],
        placed: Mapping[int, Mapping[str, float]],
        member: Mapping[float, float],
        etcd: Mapping[float, float],
    ) -> Costs:
        """Those of what real nodes cost, by how many there were."""

        def line(name: str) -> Line:
            return Line.through({partitions_hit(hosts): found[name] for hosts, found in placed.items()})

        return cls(
            Line.through({float(hosts): found["us_per_row"] for hosts, found in whole.items()}),
            line("us_per_row"),
            line("requests_per_512_rows"),
            Line.through(member),
            Line.through(etcd),
        )


@dataclass(frozen=True)
class Outcome:
    """So many hosts: rows a second of each at which its one core is full, and what they need. `etcd`: the part of a
    core that etcd's leader needs."""

    hosts: int
    whole_rows_s: float
    placed_rows_s: float
    placed_requests: float
    member: float
    etcd: float


def outcomes(costs: Costs, hosts: Sequence[int]) -> list[Outcome]:
    """What these costs mean for so many hosts."""
    found = []
    for count in hosts:
        hit = partitions_hit(count)
        left = 1e6 * max(0.0, 1.0 - costs.member.at(count))
        found.append(
            Outcome(
                count,
                left / costs.whole_us.at(count),
                left / costs.placed_us.at(hit),
                costs.placed_requests.at(hit),
                costs.member.at(count),
                costs.etcd.at(count),
            )
        )
    return found


def text(found: Sequence[Outcome]) -> str:
    """A table of them."""
    lines = ["  hosts  whole rows/s  placed rows/s  requests for 512 placed  member %  etcd's leader %"]
    lines += [
        f"{each.hosts:7d} {each.whole_rows_s:13,.0f} {each.placed_rows_s:14,.0f} {each.placed_requests:24.1f}"
        f" {100 * each.member:9.3f} {100 * each.etcd:16.2f}"
        for each in found
    ]
    return "\n".join(lines)


def scaling(found: Sequence[Outcome]) -> dict[str, object]:
    """Points for the report's picture."""
    points = {
        "rows that come whole": [[each.hosts, each.whole_rows_s * each.hosts] for each in found],
        "groups of several producers": [[each.hosts, each.placed_rows_s * each.hosts] for each in found],
    }
    return json.loads(json.dumps({"x": "hosts", "y": "rows/s", "series": points}))  # type: ignore[no-any-return]
