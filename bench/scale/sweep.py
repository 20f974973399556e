"""The simulations that docs/scale.md tells of: jobs that differ in one thing each, at growing numbers of hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.scale.costs import Costs
from bench.scale.job import Job
from bench.scale.outcome import Outcome, simulate

HOSTS = (8, 64, 256, 512, 1024, 4096)

JOBS = {
    "groups, 100 rows/s a host": Job(1, rows_s=100),
    "groups, 1,000 rows/s a host": Job(1, rows_s=1000),
    "whole batches, 100 rows/s a host": Job(1, rows_s=100, least=512),
    "groups of 64, 1,000 rows/s a host": Job(1, rows_s=1000, group=64, least=64),
    "limited, 1,000 rows/s a host": Job(1, rows_s=1000, limited=True),
    "a tenth of one home, 1,000 rows/s a host": Job(1, rows_s=1000, hot=0.1),
    "1 MB a row read, 100 rows/s a host": Job(1, rows_s=100, row_bytes=1e6),
    "no greetings, 1,000 rows/s a host": Job(1, rows_s=1000, greetings=False),
}
"""Rows of 8 a group, appended 512 at once and consumed at most 512 at once, unless said otherwise. `groups`: a consumer
takes what there is; `whole batches`: it waits for 512."""

_SECONDS = {8: 6.0, 64: 3.0, 512: 1.5}
_LEAST_S = 1.2


def jobs(name: str, hosts: Sequence[int], seed: int) -> list[Job]:
    """One kind of job, at these numbers of hosts: the more hosts, the shorter."""
    base = JOBS[name]
    found = []
    for count in hosts:
        seconds = next((of for most, of in _SECONDS.items() if count <= most), _LEAST_S)
        if base.rows_s is not None and base.rows_s < 500:
            seconds *= 2
        found.append(dataclasses.replace(base, hosts=count, seed=seed, seconds=seconds, warm_s=seconds / 3))
    return found


def run(names: Iterable[str], hosts: Sequence[int], costs: Costs, seed: int) -> dict[str, list[Outcome]]:
    """The outcomes, by job."""
    return {name: [simulate(job, costs) for job in jobs(name, hosts, seed)] for name in names}


def scaling(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """The points of a picture: rows a second by hosts, of each job, and what one controller can at most."""
    series = {name: [(each.job["hosts"], each.rows_s) for each in found] for name, found in outcomes.items()}
    first = next(iter(outcomes.values()))
    series["one controller, metadata alone, at most"] = [(each.job["hosts"], each.controller_rows_s) for each in first]
    return {"x": "hosts", "y": "rows/s, all hosts together", "series": series}


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """As text."""
    lines = []
    for name, found in outcomes.items():
        lines.append(f"\n{name}")
        lines.append(
            f"{'hosts':>6} {'rows/s':>11} {'node':>6} {'most':>6} {'client':>6} {'link':>6} {'messages/s':>11}"
            f" {'greetings/s':>12} {'append':>8} {'given':>9}  first bottleneck, and what else stands in the way"
        )
        for each in found:
            asked = sum(count for what, count in each.messages_s.items() if what != "greet")
            full = "" if each.node_busiest < 0.9 and each.link < 0.9 else "FULL: "
            lines.append(
                f"{each.job['hosts']:>6} {each.rows_s:>11,.0f} {each.node:>6.2f} {each.node_busiest:>6.2f}"
                f" {each.client:>6.2f} {each.link:>6.2f} {asked:>11,.0f} {each.messages_s.get('greet', 0.0):>12,.0f}"
                f" {each.append_ms:>5.1f} ms {each.delivery_ms:>6.1f} ms  {'; '.join([full + each.first, *each.walls])}"
            )
        one = found[0]
        lines.append(
            f"one controller, whatever the hosts: {one.controller_rows_s:,.0f} rows/s of metadata alone"
            + (f", {one.controller_payload_rows_s:,.0f} with the payload" if one.job["row_bytes"] else "")
        )
    return "\n".join(lines)
