"""Where streams over more hosts than there are meet a bottleneck first: costs of real nodes, and lines through them.

`python -m bench.scale` measures 2, 4 and 8 nodes by turns, holds the lines against 16, and what a member costs with a
real etcd; then it says what that means for up to 4,096 hosts. Costs are processor time of all nodes together, in one
process, so a busy machine changes them little. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import membership, partitions
from bench.measure import row, table, write_json
from bench.scale.model import Costs, outcomes, partitions_hit, scaling, text

MEASURED, HELD_AGAINST = (2, 4, 8), 16
HOSTS = (8, 16, 64, 256, 1024, 4096)
_RESULTS = Path(__file__).parents[1] / "results"

Found = dict[int, dict[str, float]]


def measure(whole: bool, nodes: Sequence[int], runs: int, blocks: int) -> Found:
    """The medians of what so many nodes cost, each number of nodes in its turn."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in nodes}
    for _ in range(runs):
        for count in nodes:
            found[count].append(asyncio.run(partitions.measure(whole, count, blocks, 0.1)))
    return {
        count: {name: statistics.median(each[name] for each in several) for name in several[0]}
        for count, several in found.items()
    }


def members() -> tuple[dict[float, float], dict[float, float]]:
    """The parts of a core that a node, and etcd's leader, need for so many members."""
    with tempfile.TemporaryDirectory() as directory, membership.server(Path(directory)) as (address, etcd):
        _, extra = membership.measure(address, etcd)
    node: dict[float, float] = {}
    leader: dict[float, float] = {}
    for hosts, several in extra["costs_us"].items():
        node[float(hosts)] = statistics.median(membership.share(each) for each in several) / 100
        leader[float(hosts)] = statistics.median(membership.etcd_share(each, int(hosts)) for each in several) / 100
    return node, leader


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=20, help="of 512 rows, that each node appends")
    parser.add_argument("--json", type=Path, default=_RESULTS / "scale.json")
    chosen = parser.parse_args()
    logging.disable()  # members come and go
    nodes = (*MEASURED, HELD_AGAINST)
    whole, placed = (measure(kind, nodes, chosen.runs, chosen.blocks) for kind in (True, False))
    node, etcd = members()
    costs = Costs.of({n: whole[n] for n in MEASURED}, {n: placed[n] for n in MEASURED}, node, etcd)
    for name, found in (("whole", whole), ("placed", placed)):
        for count, each in found.items():
            print(f"{name} {count}: {each['us_per_row']:.1f} us a row, {each['requests_per_512_rows']:.1f} requests")
    hit = partitions_hit(HELD_AGAINST)
    errors: dict[str, Any] = {
        "whole, processor time": costs.whole_us.at(HELD_AGAINST) / whole[HELD_AGAINST]["us_per_row"] - 1,
        "placed, processor time": costs.placed_us.at(hit) / placed[HELD_AGAINST]["us_per_row"] - 1,
        "placed, requests": costs.placed_requests.at(hit) / placed[HELD_AGAINST]["requests_per_512_rows"] - 1,
    }
    rows = [
        row(f"{name}: the model of {HELD_AGAINST} nodes, off by", [abs(error)], at_most=0.5, unit="of 1")
        for name, error in errors.items()
    ]
    found = outcomes(costs, HOSTS)
    print(table(rows), text(found), f"load {os.getloadavg()[0]:.1f}", sep="\n")
    content = {"whole": whole, "placed": placed, "member": node, "etcd": etcd, "errors": errors}
    write_json(chosen.json, rows, content | {"scaling": scaling(found), "load": os.getloadavg()})
    print(f"written to {chosen.json}")


if __name__ == "__main__":
    main()
