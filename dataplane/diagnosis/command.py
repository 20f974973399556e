"""`dataplane diagnose`: looks at a running job for some seconds, or compares two saved runs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from dataplane.diagnosis.diagnosis import compared, diagnosed, watched
from dataplane.diagnosis.graph import GraphRun, Look
from dataplane.diagnosis.text import as_text


class Looking(Protocol):
    """The part of a plane that this needs."""

    async def graphs(self) -> Look:
        """See `AsyncPlane.graphs`."""


Connect = Callable[[argparse.Namespace], AbstractAsyncContextManager[Looking]]
"""Connects to the node that a command line names."""


def add_parser(commands: argparse._SubParsersAction[Any], connect: Connect) -> None:
    """Add `diagnose` to the commands."""
    parser = commands.add_parser("diagnose", help="explain the duration of a running job's step")
    parser.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="seconds to observe (default: 10)")
    parser.add_argument("--role", metavar="NAME", help="the role whose deliveries count as steps (default: the last)")
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="write the observation to this file, for --compare and --read"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar="RUN",
        help="compare two such files, and explain why the larger run does not scale",
    )
    parser.add_argument("--read", type=Path, metavar="RUN", help="diagnose such a file")
    parser.add_argument("--causes", type=int, default=5, metavar="N", help="list at most N causes (default: 5)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=lambda chosen: _diagnose(chosen, connect))


def _diagnose(chosen: argparse.Namespace, connect: Connect) -> int:
    if not 0.5 <= chosen.seconds <= 86400:
        raise ValueError(f"a job is looked at for 0.5 to 86400 seconds, not {chosen.seconds}")
    if chosen.compare:
        small, large = (GraphRun.load(path) for path in chosen.compare)
        found = compared(small, large, chosen.role)
    else:
        run = GraphRun.load(chosen.read) if chosen.read else asyncio.run(_watch(chosen, connect))
        if chosen.out:
            run.save(chosen.out)
        found = diagnosed(run, chosen.role)
    print(found.json() if chosen.json else as_text(found, chosen.causes))
    return 0


async def _watch(chosen: argparse.Namespace, connect: Connect) -> GraphRun:
    async with connect(chosen) as plane:
        return await watched(plane.graphs, asyncio.sleep, chosen.seconds)
