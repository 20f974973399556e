"""`make simulate`: run many seeds, or one again.

python -m tests.simulation --seeds 10000 --first 0
python -m tests.simulation --seed 17 [--keep 2,5]

With --stream the runs are those of the stream's own partitions (`tests.simulation.stream`), with --table those of a
table's (`tests.simulation.table`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from tests.simulation import faults, run
from tests.simulation.faults import Plan
from tests.simulation.run import Outcome
from tests.simulation.shrink import Runner, only, report
from tests.simulation.stream import run as stream
from tests.simulation.table import run as table

CHUNK = 100


class Kind(NamedTuple):
    plan: Callable[[int], Plan]
    run: Runner
    run_seed: Callable[[int], Outcome]
    make: str


PROTOCOL = Kind(faults.plan, run.run, run.run_seed, "make simulate")
STREAM = Kind(stream.plan, stream.run, stream.run_seed, "make simulate STREAM=1")

TABLE = Kind(table.plan, table.run, table.run_seed, "make simulate TABLE=1")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def campaign(first: int, seeds: int, jobs: int, kind: Kind = PROTOCOL) -> int:
    """Run seeds, and say which break an invariant. How many do."""
    began = time.monotonic()
    done = broken = lost = events = 0
    with ExitStack() as stack:
        outcomes: Iterator[Outcome] = map(kind.run_seed, range(first, first + seeds))
        if jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
            outcomes = pool.imap(kind.run_seed, range(first, first + seeds), CHUNK)
        for outcome in outcomes:
            done += 1
            lost += outcome.lost
            events += outcome.events
            if outcome.broken is not None:
                broken += 1
                say(report(outcome, kind.run, kind.make))
            if done % 10_000 == 0 or done == seeds:
                took = time.monotonic() - began
                say(
                    f"seeds {first} to {first + done - 1}: {broken} break an invariant; {lost} lost a partition in "
                    f"memory with all its replicas; {events} events, {took:.0f} s"
                )
    return broken


def again(seed: int, keep: str | None, kind: Kind = PROTOCOL) -> int:
    """Run one seed, and say what goes wrong in it."""
    it = kind.plan(seed)
    if keep is not None:
        it = only(it, [] if keep == "none" else [int(i) for i in keep.split(",")])
    say(f"{it.nodes} nodes, {it.followers} wanted followers, {'durable' if it.durable else 'in memory'}")
    for fault in it.faults:
        say(f"  {fault}")
    outcome = kind.run(it)
    say(f"{outcome.broken or 'every invariant holds'} ({outcome.events} events, {outcome.ended_s:.3f} s)")
    return outcome.broken is not None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--keep", help="with --seed: the numbers of the faults to keep, or none")
    parser.add_argument("--stream", action="store_true", help="run the stream's own partitions")
    parser.add_argument("--table", action="store_true", help="run a table's own partition")
    given = parser.parse_args()
    kind = STREAM if given.stream else TABLE if given.table else PROTOCOL
    if given.seed is not None:
        return again(given.seed, given.keep, kind)
    return campaign(given.first, given.seeds, given.jobs, kind) > 0


if __name__ == "__main__":
    sys.exit(main())
