"""The command `dataplane diagnose`: observes a job for some seconds, diagnoses a saved run, or compares two."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from dataplane.diagnosis.causes import Cause, Diagnosis
from dataplane.diagnosis.diagnosis import compared, diagnosed, watched
from dataplane.diagnosis.graph import GraphRun, Look


class Looking(Protocol):
    """The part of a plane that the command needs."""

    async def graphs(self) -> Look:
        """The reports of all nodes; see `AsyncPlane.graphs`."""


Connect = Callable[[argparse.Namespace], AbstractAsyncContextManager[Looking]]
"""A function that connects to the node that the command line names."""


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
    names = _RUNS
    if chosen.compare:
        runs = [(str(path), GraphRun.load(path)) for path in chosen.compare]
        (first, small), (second, large) = sorted(runs, key=lambda run: len(run[1].processes))
        names, found = (first, second), compared(small, large, chosen.role)
    else:
        run = GraphRun.load(chosen.read) if chosen.read else asyncio.run(_watch(chosen, connect))
        if chosen.out:
            run.save(chosen.out)
        found = diagnosed(run, chosen.role)
    print(found.json() if chosen.json else as_text(found, chosen.causes, names))
    return 0


async def _watch(chosen: argparse.Namespace, connect: Connect) -> GraphRun:
    async with connect(chosen) as plane:
        return await watched(plane.graphs, asyncio.sleep, chosen.seconds)


# A diagnosis as text: the step, the roles, and the causes with their line, chain and advice.

NAMED = 0.02
"""The smallest share of a step for which a cause is listed."""


_RUNS = "the smaller run", "the larger run"


def as_text(found: Diagnosis, most: int = 5, names: tuple[str, str] = _RUNS) -> str:
    """The diagnosis as lines of text, with at most `most` causes, the most costly first. `names`: of the runs of a
    comparison."""
    lost = f"{_time(found.lost_s)} ({found.lost_s / found.step_s if found.step_s else 0.0:.0%})"
    step = f"a step of {found.role!r} takes {_time(found.step_s)}"
    ending = f"; {found.steps:.0f} steps in {found.seconds:.0f} s"
    if found.compared:
        small, large = found.compared
        lines = [
            f"{names[0]}: {_processes(small.processes)}, {_time(small.step_s)} a step; {names[1]}: {large.processes},"
            f" {_time(large.step_s)}: {small.step_s / large.step_s if large.step_s else 0.0:.1f} times as fast",
            f"{names[1]}: {step}, of which {lost} is additional wait against {names[0]}{ending}",
        ]
    else:
        lines = [f"{step}, of which it waits {lost}{ending}"]
    lines += [f"  note: {note}" for note in found.notes]
    for role in found.roles:
        waits = ", ".join(
            f"{kind} {share:.0%}" for kind, share in sorted(role.waiting.items(), key=lambda e: -e[1]) if share >= 0.01
        )
        where = f"{role.name:<16} {_processes(role.processes)} on {', '.join(role.hosts)}"
        lines.append(f"  {where}: busy {role.busy:.0%}; waits: {waits or 'no'}")
    named = [cause for cause in found.causes if cause.share >= NAMED][:most]
    for number, cause in enumerate(named, 1):
        lines += ["", *_cause(number, cause, "more " if found.compared else "")]
    if not named:
        lines += ["", "no wait costs the step more than 2 %" + (f" beyond {names[0]}" if found.compared else "")]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _cause(number: int, cause: Cause, more: str) -> list[str]:
    where = f"{_file(cause.file)}:{cause.line} in {cause.function}"
    pids = f"{len(cause.processes)} processes" if len(cause.processes) > 1 else f"process {cause.processes[0]}"
    lines = [
        f"{number}. {cause.kind}: {where}",
        f"   costs {_time(cause.seconds)} {more}a step ({cause.share:.0%}); role {cause.role}, {pids} on {cause.host}",
    ]
    because = ""
    for link in cause.chain:
        lines.append(
            f"   {because}{link.role} waits {_time(link.seconds)} for {_kind(link.kind)} at"
            f" {_file(link.file)}:{link.line} in {link.function},"
        )
        because = "because "
    if cause.chain:
        lines.append(f"   because {cause.role} is at the line above")
    return [*lines, f"   remedy: {cause.advice}"]


def _kind(kind: str) -> str:
    if kind == "collective":
        return "other ranks"
    return f"room ({kind})" if kind.startswith("max_") else "room" if kind == "permits" else kind


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _file(path: str) -> str:
    """The path, relative to the current directory if it is below."""
    try:
        near = os.path.relpath(path)
    except ValueError:
        return path
    return path if near.startswith("..") else near
