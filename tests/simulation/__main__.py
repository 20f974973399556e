"""`make simulate`: run many seeds, or one again.

python -m tests.simulation --seeds 10000 --first 0
python -m tests.simulation --seed 17 [--keep 2,5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

from tests.simulation.faults import plan
from tests.simulation.run import Outcome, run, run_seed
from tests.simulation.shrink import only, report

CHUNK = 100


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def campaign(first: int, seeds: int, jobs: int) -> int:
    """Run seeds, and say which break an invariant. How many do."""
    began = time.monotonic()
    done = broken = lost = events = 0
    with ExitStack() as stack:
        outcomes: Iterator[Outcome] = map(run_seed, range(first, first + seeds))
        if jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
            outcomes = pool.imap(run_seed, range(first, first + seeds), CHUNK)
        for outcome in outcomes:
            done += 1
            lost += outcome.lost
            events += outcome.events
            if outcome.broken is not None:
                broken += 1
                say(report(outcome))
            if done % 10_000 == 0 or done == seeds:
                took = time.monotonic() - began
                say(
                    f"seeds {first} to {first + done - 1}: {broken} break an invariant; {lost} lost a partition in "
                    f"memory with all its replicas; {events} events, {took:.0f} s"
                )
    return broken


def again(seed: int, keep: str | None) -> int:
    """Run one seed, and say what goes wrong in it."""
    it = plan(seed)
    if keep is not None:
        it = only(it, [] if keep == "none" else [int(i) for i in keep.split(",")])
    say(f"{it.nodes} nodes, {it.followers} wanted followers, {'durable' if it.durable else 'in memory'}")
    for fault in it.faults:
        say(f"  {fault}")
    outcome = run(it)
    say(f"{outcome.broken or 'every invariant holds'} ({outcome.events} events, {outcome.ended_s:.3f} s)")
    return outcome.broken is not None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--keep", help="with --seed: the numbers of the faults to keep, or none")
    given = parser.parse_args()
    if given.seed is not None:
        return again(given.seed, given.keep)
    return campaign(given.first, given.seeds, given.jobs) > 0


if __name__ == "__main__":
    sys.exit(main())
