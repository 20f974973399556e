"""Measure other systems beside dataplane: seconds, processor time and memory for the same rows and processes.

    python -m bench.peers [--only ray] [--workload video] [--scale 1/16] [--runs 5] [--python ray=/path/to/python]

Systems are measured one after another, while the machine's load may change: so dataplane is first and last, and its
runs are pooled. A missing or failed system is reported with the reason and how to install it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.measure import Row, table, write_json
from bench.peers import environments, workloads
from bench.peers.children import Failed
from bench.peers.cycle import Cycle, summary
from bench.peers.environments import Missing, cache, environment
from bench.peers.room import TooLittle, check, room, scale_that_fits
from bench.peers.systems import SYSTEMS, System
from bench.peers.targets import OURS, faster, targets
from bench.peers.workloads import Workload

POOLED = ("put_s", "get_s", "step_s", "read_s", "cpu_s", "read_cpu_s")


def measure(system: System, chosen: list[Workload], runs: int, given: Path | None, scratch: Path) -> dict[str, Any]:
    """Measure a system on each workload. Returns its measurements, or the reason why there are none. `given`: its
    interpreter."""
    found: dict[str, Any] = {"title": system.title, "how": system.how, "workloads": {}, "errors": {}}
    try:
        where = environment(system, given)
    except Missing as error:
        return found | {"error": str(error)}
    left = list(chosen)
    while left:  # the same processes for all workloads, and new processes after a failure
        with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as own:
            try:
                with Cycle(system.name, where.python, where.env, Path(own), max(w.nbytes for w in chosen)) as cycle:
                    found["versions"] = cycle.versions
                    while left:
                        measured = cycle.measure(left[0], runs)
                        print(f"{system.title:<18} {left[0].name:<20} {summary(measured)}", flush=True)
                        found["workloads"][left.pop(0).name] = measured
            except Failed as error:
                print(f"{system.title:<18} {left[0].name:<20} {error}", flush=True)
                found["errors"][left.pop(0).name] = str(error)
    if not found["workloads"]:
        found["error"] = next(iter(found["errors"].values()))
    return found


def pooled(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """The runs of both measurements together, with the memory of the one that used more."""
    for name, of in last["workloads"].items():
        there = first["workloads"].setdefault(name, of)
        if there is not of:
            most = max(there, of, key=lambda measured: measured["peak_bytes"])
            first["workloads"][name] = most | {kind: there[kind] + of[kind] for kind in POOLED}
    return first


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=[n for n in SYSTEMS if n != OURS], help="this one beside ours"
    )
    parser.add_argument("--workload", action="append", choices=workloads.NAMES, help="only this workload")
    parser.add_argument("--scale", type=Fraction, help="the part of a step's prompts, as 1/32 (default: what fits)")
    parser.add_argument("--runs", type=int, default=5, help="timed cycles of each (default: 5)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="an environment that is there"
    )
    parser.add_argument("--json", type=Path, default=Path("bench/results/peers.json"))
    return parser.parse_args()


def main() -> int:
    """Check the free memory and disk, measure, print and write JSON. Returns 0, 1 if a target is not met, or 2 if there
    is too little room."""
    asked = _arguments()
    given = {name: Path(path) for name, _, path in (each.partition("=") for each in asked.python)}
    names = [n for n in SYSTEMS if n != OURS and (asked.only is None or n in asked.only)]
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="dp-") as scratch:
        there = room(Path(scratch), cache())
        wanted = asked.workload or workloads.NAMES
        scale = float(asked.scale) if asked.scale else scale_that_fits(there, wanted)
        if scale is None:
            print("there is not the memory for any scale of these workloads", file=sys.stderr)
            return 2
        chosen = [workloads.workload(n, scale) for n in wanted]
        missing = [n for n in names if SYSTEMS[n].packages and n not in given and not environments.made(SYSTEMS[n])]
        try:
            check(chosen, there, len(missing))
        except TooLittle as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{Fraction(scale)} of the tasks' prompts; {asked.runs} runs after one that warms up", flush=True)
        load = [os.getloadavg()[0]]
        found: dict[str, dict[str, Any]] = {}
        for name in (OURS, *names, OURS):
            measured = measure(SYSTEMS[name], chosen, asked.runs, given.get(name), Path(scratch))
            found[name] = pooled(found[name], measured) if name in found else measured
            load.append(os.getloadavg()[0])
            about = {"scale": scale, "runs": asked.runs, "load": load}
            rows = _keep(
                asked.json, chosen, found, about
            )  # after each, so that finished measurements are kept if a later one fails
    if rows:
        print(table(rows))
    for name, of in found.items():
        if "error" in of:
            print(f"{name}: not measured: {of['error']}" + (f"\n  to get it: {of['how']}" if of["how"] else ""))
    print(f"written to {asked.json}")
    return 0 if all(row.met for row in rows) else 1


def _keep(path: Path, chosen: list[Workload], found: dict[str, dict[str, Any]], about: dict[str, Any]) -> list[Row]:
    measured = {name: of["workloads"] for name, of in found.items()}
    rows = targets(measured)
    shown = {w.name: {"what": w.what, "nbytes": w.nbytes, "reads": w.reads} for w in chosen}
    write_json(path, rows, about | {"workloads": shown, "systems": found, "faster": faster(measured)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
