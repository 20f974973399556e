"""Attacks nodes for as long as it is told: `make attack`, or `python -m tests.attack [--minutes M] [--seed N] [NAME]`.

Each attack has its share of the time, and raises AssertionError where a node did not do what it must: live, answer
every request that has a number with a value or a typed error, keep others' answers right, and hold nothing afterwards.
It says what it did and with which seed, and the same seed does the same again, as far as scheduling allows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.attack import frames, peers
from tests.chaos import kills
from tests.faults import driver

Attack = Callable[[int, float, Path], Mapping[str, object]]


def failing_calls(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    """Failing calls into the operating system, drawn from the matrix of `tests.faults`."""
    summary = driver.run(seed, seconds)
    assert not summary["failures"], f"cells {summary['failures']} of `python -m tests.faults.driver`"
    return {"cells": summary["cells"], "failed calls": summary["failed_calls"]}


def killed(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    """Producers, consumers and drafters of one stream, killed at random moments under load: see `tests.chaos.kills`."""
    found = kills.run(seed, 1 << 30, directory, seconds)
    assert not found.broken, found.broken[:5]
    return {"kills": found.kills, "rows appended": found.appended, "acked": found.acked}


ATTACKS: dict[str, Attack] = {"frames": frames.attack, "peers": peers.attack, "faults": failing_calls, "kills": killed}


def main() -> int:
    """The command: 0 where every attack was withstood."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("--minutes", type=float, default=2.0, help="for all attacks together")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="a new one each time unless given")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ATTACKS)}; all unless given")
    given = parser.parse_args()
    unknown = set(given.names) - set(ATTACKS)
    if unknown:
        parser.error(f"no attack is called {', '.join(sorted(unknown))}")
    names = given.names or list(ATTACKS)
    failed = 0
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="attack-") as directory:
            try:
                done = ATTACKS[name](given.seed, 60 * given.minutes / len(names), Path(directory))
            except AssertionError as error:
                failed += 1
                sys.stdout.write(f"{name}: NOT WITHSTOOD, seed {given.seed}: {error}\n")
            else:
                figures = ", ".join(f"{value} {what}" for what, value in done.items())
                sys.stdout.write(f"{name}: {figures} in {time.monotonic() - began:.0f} s, seed {given.seed}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(names) - failed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
