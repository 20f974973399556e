"""`python -m bench.diagnosis`: plants faults in pipelines, and counts how many the diagnosis names.

python -m bench.diagnosis matrix [--faults reward,lock] [--pipelines grpo] [--seeds 5] [--at-once 4]
python -m bench.diagnosis scaling [--faults reward,lock] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.diagnosing import cells, scaling


def matrix(chosen: argparse.Namespace) -> int:
    """Run each pipeline with each fault and seed. Prints a line for each, and the shares that were named. Returns 0."""
    faults = [cells.FAULTS[name] for name in (chosen.faults or ",".join(cells.FAULTS)).split(",")]
    wanted = [
        (pipeline, fault, seed)
        for seed in range(chosen.first, chosen.first + chosen.seeds)
        for fault in faults
        for pipeline in chosen.pipelines.split(",")
    ]

    def one(cell: tuple[str, cells.Fault, int]) -> cells.Cell | None:
        found: cells.Cell | None = None
        for _ in range(chosen.tries):
            try:
                found = cells.run(*cell, seconds=chosen.seconds, vary=chosen.vary)
            except Exception as error:
                print(f"{cell[0]} {cell[1].name} seed {cell[2]}: {error!r}", file=sys.stderr)
            if found is not None and not found.starved:
                return found
        return found

    figures, right, lines, healthy, count, sound, starved = [], 0, 0, 0, 0, 0, 0
    with ThreadPoolExecutor(chosen.at_once) as pool:
        for (pipeline, fault, seed), cell in zip(wanted, pool.map(one, wanted), strict=True):
            named, line = (cell.named, cell.line) if cell is not None else (False, False)
            what = cell.first if cell is not None else "failed"
            mark = "ok  " if named and (line or not fault.kinds) else "LINE" if named else "NOT "
            unmeasured = cell is None or cell.starved
            mark = "----" if unmeasured else mark
            load = os.getloadavg()[0]
            print(f"{mark} {pipeline:<6} {fault.name:<10} seed {seed}: {what}; load {load:.0f}", flush=True)
            if cell is not None and chosen.keep:
                chosen.keep.mkdir(parents=True, exist_ok=True)
                cell.run.save(chosen.keep / f"{pipeline}-{fault.name}-{seed}.json")
            figures.append({"pipeline": pipeline, "fault": fault.name, "seed": seed, "named": named, "line": line})
            figures[-1]["first"] = what
            figures[-1]["starved"] = unmeasured
            if unmeasured:
                starved += 1
            elif fault.kinds:
                count, right, lines = count + 1, right + named, lines + line
            else:
                sound, healthy = sound + 1, healthy + named
    if count:
        print(f"cause first in {right} of {count} ({right / count:.0%}), line right in {lines} ({lines / count:.0%})")
    if sound:
        print(f"without a fault, nothing above 5 % of a step in {healthy} of {sound}")
    if starved:
        print(f"not measured, since others took the processors: {starved}")
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))
    return 0


def scale(chosen: argparse.Namespace) -> int:
    """Run two workers and eight with causes that do not scale. Prints a line for each. Returns 0."""
    right = lines = count = 0
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        for name in (chosen.faults or ",".join(scaling.PLANTED)).split(","):
            count += 1
            try:
                pair = scaling.run(scaling.PLANTED[name], seed, chosen.seconds, chosen.keep)
            except Exception:
                traceback.print_exc()
                print(f"NOT  {name:<10} seed {seed}: failed", flush=True)
                continue
            right, lines = right + pair.named, lines + pair.line
            mark = "ok  " if pair.named and pair.line else "LINE" if pair.named else "NOT "
            load = os.getloadavg()[0]
            print(f"{mark} {name:<10} seed {seed}: {pair.first}; load {load:.1f}", flush=True)
    print(f"cause first in {right} of {count}, line right in {lines}")
    return 0


def main() -> int:
    """Run the command `matrix` or `scaling`. Returns its exit code."""
    cells.preload()
    parser = argparse.ArgumentParser("python -m bench.diagnosis", description=__doc__)
    commands = parser.add_subparsers(required=True)
    each = commands.add_parser("matrix")
    each.add_argument("--faults", help="these (default: all)")
    each.add_argument("--pipelines", default=",".join(cells.PIPELINES))
    each.add_argument("--seeds", type=int, default=5)
    each.add_argument("--first", type=int, default=0)
    each.add_argument("--seconds", type=float, default=6.0)
    each.add_argument("--at-once", type=int, default=4)
    each.add_argument("--tries", type=int, default=3, help="of a run that lacked processor time (default: 3)")
    each.add_argument("--vary", action="store_true", help="draw other times and sizes of faults for each seed")
    each.add_argument("--keep", type=Path, help="keep the runs in this directory")
    each.add_argument("--json", type=Path)
    each.set_defaults(run=matrix)
    each = commands.add_parser("scaling")
    each.add_argument("--faults", help="these (default: all)")
    each.add_argument("--seeds", type=int, default=3)
    each.add_argument("--first", type=int, default=0)
    each.add_argument("--seconds", type=float, default=6.0)
    each.add_argument("--keep", type=Path, help="keep the runs in this directory")
    each.set_defaults(run=scale)
    chosen = parser.parse_args()
    return int(chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
