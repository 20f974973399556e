"""`dataplane trace`: the last seconds of all processes of a cluster, as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    trace = commands.add_parser("trace", help="write what all nodes and clients did in the last seconds, for Perfetto")
    trace.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    trace.add_argument("--seconds", type=float, default=10.0, metavar="N", help="how many (default: 10)")
    trace.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")
    trace.set_defaults(run=_trace)


def _trace(chosen: argparse.Namespace) -> int:
    from dataplane.client.connecting import Connecting
    from dataplane.client.embedded import find
    from dataplane.client.observing import collect
    from dataplane.observe.trace import Trace

    address = find(chosen.address)

    async def ask() -> Trace:
        async with Connecting(address, None, writes=False) as plane:
            return await collect(plane, chosen.seconds)

    trace = asyncio.run(ask())
    with chosen.out.open("w") as file:
        spans = trace.write(file)
    for node, why in trace.missing.items():
        sys.stderr.write(f"node {node} is missing: {why}\n")
    what = f"{spans} events of {len(trace.processes)} processes"
    sys.stdout.write(f"{chosen.out}: {what}; open it at https://ui.perfetto.dev\n")
    return 0
