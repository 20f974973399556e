"""The model against real nodes: 1 to 8 of them on loopback, each with a process that appends and consumes, all on the
cores of this machine, and the same in simulated time.

What is compared is the nodes' and clients' processor time a row, which others on the machine disturb little, the
requests between nodes, and the rows a second, with as many cores as the run was given (others may have had the rest).
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import host_streams
from bench.measure import Row, row
from bench.scale.calibrate import loopback
from bench.scale.costs import Costs
from bench.scale.job import Job
from bench.scale.streams import Stream

HOSTS = (1, 2, 4, 8)
_BLOCKS = {1: 400, 2: 240, 4: 150, 8: 100}
"""Of each process: long enough that starting does not count."""

FACTOR = 2.0
"""Within which the model's processor time is right: it is of warm caches, and of one thing at a time."""

_RUNS = 3
_FIRST = "from bench.scale.still import still; still()"


@dataclass(frozen=True)
class Compared:
    """Of one number of nodes: what was measured, and what the model says."""

    hosts: int
    us: float
    us_model: float
    messages: float
    messages_model: float
    rows_s: float
    rows_s_model: float
    cores: float

    @property
    def errors(self) -> dict[str, float]:
        """Of the model, as shares of what was measured."""
        us, rows_s = self.us_model / self.us - 1, self.rows_s_model / self.rows_s - 1
        return {"us": us, "rows_s": rows_s, "messages": self.messages_model - self.messages}

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"errors": self.errors}


def real(hosts: int) -> dict[str, Any]:
    """One run of real nodes."""
    with tempfile.TemporaryDirectory() as scratch, loopback(hosts, Path(scratch)) as nodes:
        return host_streams.flow([node.address for node in nodes], hosts, _BLOCKS[hosts], _FIRST)


def modelled(hosts: int, costs: Costs, cores: int) -> dict[str, float]:
    """The same in simulated time."""
    job = Job(hosts, appends=_BLOCKS[hosts], ahead=1 << 20, cores=cores, latency_s=0.0, seconds=3600)
    stream = Stream(job, costs)
    while not stream.over:
        stream.loop.run(stream.loop.now + 0.01)
    rows, busy = stream.homes.acked, stream.cluster.processors.busy
    asked = sum(count for what, count in stream.cluster.messages.items() if what != "greet")
    took = max(ended for _, ended, _ in stream.delivered)
    return {"rows_s": rows / took, "us": float(busy.sum()) / rows * 1e6, "messages": asked * host_streams.BLOCK / rows}


def compare(costs: Costs, cores: int = 2) -> list[Compared]:
    """Medians of a few runs, beside the model. Rows a second of the model are those of the cores that the runs had."""
    found = []
    for hosts in HOSTS:
        runs, model = [real(hosts) for _ in range(_RUNS)], modelled(hosts, costs, cores)
        us = statistics.median(run["node_us"] + run["client_us"] for run in runs)
        used = statistics.median(run["cores_used"] for run in runs)
        rows_s = statistics.median(run["rows_s"] for run in runs)
        asked = statistics.median(sum(run["messages"]) / 2 for run in runs)
        rows = hosts * _BLOCKS[hosts] * host_streams.BLOCK
        modelled_cores = model["us"] * model["rows_s"] / 1e6
        found.append(
            Compared(
                hosts,
                us,
                model["us"],
                asked * host_streams.BLOCK / rows,
                model["messages"],
                rows_s,
                model["rows_s"] * min(1.0, used / modelled_cores),
                used,
            )
        )
    return found


def rows(found: list[Compared]) -> list[Row]:
    """How far the model is right, as promised."""
    made = []
    for each in found:
        detail = f"{each.us:.1f} and {each.us_model:.1f} us"
        name = f"{each.hosts} nodes: processor time a row, over the model's"
        made.append(row(name, [each.us / each.us_model], at_most=FACTOR, unit="x", detail=detail))
    return made


def text(found: list[Compared]) -> str:
    """The table."""
    lines = ["real nodes on this machine's cores, and the model", "nodes  us a row        requests/512    rows/s"]
    for each in found:
        lines.append(
            f"{each.hosts:>5}  {each.us:5.1f} {each.us_model:5.1f} {each.errors['us']:+4.0%}"
            f"  {each.messages:5.1f} {each.messages_model:5.1f}    "
            f"{each.rows_s:8,.0f} {each.rows_s_model:8,.0f} {each.errors['rows_s']:+4.0%}  ({each.cores:.1f} cores)"
        )
    return "\n".join(lines)
