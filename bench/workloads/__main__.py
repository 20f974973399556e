"""`python -m bench.workloads TASK` prints the distributions of an RLVR task or of a trace file.

Without a task it prints the distances of generated traces from the tables, the largest of a few seeds, at several
sizes. The bound is 0.03 from 512 prompts on. The distance of n values from a smooth distribution is at least 1/2n.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.workloads import TASKS, distance, generate, read, summary, write
from bench.workloads.tables import task
from dataplane.errors import DataplaneError

SIZES = (16, 128, 512, 2560)
SEEDS = range(5)
BOUND, BOUND_FROM = 0.03, 512

#: Columns that are sums of others. They are drawn near their tables, but the other columns have priority.
SUMS = {"total_tokens"}


def worst(name: str, prompts: int) -> dict[str, float]:
    """The largest distance over the seeds, by the name of a table."""
    found: dict[str, float] = {}
    for seed in SEEDS:
        trace = generate(name, prompts=prompts // 16, steps=16, seed=seed)
        for column, made, other in distance.figures(trace):
            found[column] = max(found.get(column, 0.0), distance.distance(made, other))
    return found


def distances() -> int:
    """Print the distances. Returns 1 if one is beyond the bound, else 0."""
    failed = False
    print(f"{'two-sample KS distance, prompts:':<56}" + "".join(f"{n:>8,}" for n in SIZES))
    for name in TASKS:
        by_size = [worst(name, prompts) for prompts in SIZES]
        for column in by_size[0]:
            print(f"{name:<24}{column:<32}" + "".join(f"{found[column]:8.4f}" for found in by_size))
            large = [found[column] for n, found in zip(SIZES, by_size, strict=True) if n >= BOUND_FROM]
            failed |= column not in SUMS and max(large) > BOUND
    print(f"\n{'alike, of 10,240 prompts:':<58}{'table':>8}{'made':>8}")
    for name in TASKS:
        known = task(name).figures
        if "sibling_spearman" in known:
            for what, value in distance.alike(generate(name, prompts=640, steps=16), known["group_size"]).items():
                print(f"{name:<24}{what:<34}{known[what]:8.3f}{value:8.3f}")
    return int(failed)


def shown(chosen: argparse.Namespace) -> int:
    """Print the distributions of a task or a trace file. Raises ValueError (a wrong command line), DataplaneError."""
    sizes = {name: getattr(chosen, name) for name in ("prompts", "samples", "steps", "seed", "scale")}
    given = {name: value for name, value in sizes.items() if value is not None}
    if chosen.task in TASKS:
        if chosen.cycle:
            raise ValueError("--cycle goes with a trace file")
        trace = generate(chosen.task, **given)
    elif not Path(chosen.task).exists():
        raise ValueError(f"{chosen.task!r} is neither a file nor one of the tasks: {', '.join(TASKS)}")
    elif given.keys() - {"samples"}:
        raise ValueError(f"--{', --'.join(sorted(given))} are of generated tasks; a trace file has its own")
    else:
        trace = read(chosen.task, group_size=given.get("samples"), unpaired="cycle" if chosen.cycle else "refuse")
    print(summary.text(trace))
    if chosen.json:
        write(trace, chosen.json)
    if chosen.plot:
        summary.plot(trace, chosen.plot)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of `arguments`, by default of the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.workloads", description=__doc__)
    parser.add_argument("task", metavar="TASK", nargs="?", help="one of the seven tasks, or a trace file")
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts a step (default: the task's)")
    parser.add_argument("--samples", type=int, metavar="N", help="responses a prompt (default: the task's)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: 4)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the generator (default: 0)")
    parser.add_argument("--scale", type=float, metavar="X", help="factor of the prompts (default: 1)")
    parser.add_argument("--cycle", action="store_true", help="of a file: reuse inputs if there are more outputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the trace to a file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions, to a .png, .pdf or .svg")
    chosen = parser.parse_args(arguments)
    if chosen.task is None:
        return distances()
    try:
        return shown(chosen)
    except ValueError as error:
        parser.error(str(error))
    except (DataplaneError, OSError) as error:
        print(f"bench.workloads: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
