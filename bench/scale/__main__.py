"""Compute how many hosts one stream carries, from the measured cost of its leader.

`python -m bench.scale` measures a leader beside three other nodes with blocks of several sizes, and fits a line to the
costs. It compares the line with a block size that was left out, measures the cost of members with a real etcd, and
extrapolates to 4,096 hosts. It takes about three minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench import membership, partition
from bench.measure import finished, row, table
from bench.scale.model import Costs, Line, outcomes, scaling, text

HELD_AGAINST = 64
"""Rows of the blocks that are left out of the fit, and compared with the line."""

HOSTS, ROWS_S, BLOCKS = (8, 64, 512, 4096), (1.0, 10.0, 100.0), (1, 64)
_RESULTS = Path(__file__).parents[1] / "results"


def members() -> tuple[dict[float, float], dict[float, float]]:
    """By number of members, the share of a core that a node needs, and the share that etcd's leader needs."""
    with tempfile.TemporaryDirectory() as directory, membership.server(Path(directory)) as (address, etcd):
        _, extra = membership.measure(address, etcd)
    node: dict[float, float] = {}
    leader: dict[float, float] = {}
    for hosts, several in extra["costs_us"].items():
        node[float(hosts)] = statistics.median(membership.share(each) for each in several) / 100
        leader[float(hosts)] = statistics.median(membership.etcd_share(each, int(hosts)) for each in several) / 100
    return node, leader


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=_RESULTS / "scale.json")
    chosen = parser.parse_args()
    measured = partition.measure(partition.NODES, chosen.runs)
    a_block = {block: block * statistics.median(of["leader_us_a_row"]) for block, of in measured.items() if block > 0}
    line = Line.through({float(block): us for block, us in a_block.items() if block != HELD_AGAINST})
    node, etcd = members()
    costs = Costs(line, Line.through(node), Line.through(etcd))
    error = line.at(HELD_AGAINST) / a_block[HELD_AGAINST] - 1
    detail = f"a block costs the leader {line.base:.0f} us and {line.each:.2f} us a row"
    rows = [row(f"the line at blocks of {HELD_AGAINST}, off by", [abs(error)], at_most=0.5, unit="of 1", detail=detail)]
    found = outcomes(costs, HOSTS, ROWS_S, BLOCKS)
    print(table(rows), text(found), f"load {os.getloadavg()[0]:.1f}", sep="\n")
    content = {"leader_us_a_block": {str(block): us for block, us in a_block.items()}, "member": node, "etcd": etcd}
    return finished(chosen.json, rows, content | {"scaling": scaling(found), "load": os.getloadavg()})


if __name__ == "__main__":
    sys.exit(main())
