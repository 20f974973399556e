"""Runs the matrix of failed calls: `python -m tests.faults.driver [--minutes M] [--seed N] [WORD...]`.

Without `--minutes` each cell is tried once, in order; with it, cells are drawn at random until the time is over. WORDs
choose those with one of them in their name (`write-EIO-first`). It prints each cell that fails, and a summary as JSON;
it exits with 1 where one failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.faults.cells import Cell, matrix
from tests.faults.shim import build
from tests.faults.subject import Subject
from tests.faults.trial import Outcome, Trial


def trials(directory: Path, shim: Path, cells: Iterable[Cell]) -> Iterator[Outcome | tuple[Cell, AssertionError]]:
    """Try each cell: what came of it, or why it failed. One node serves many; after a failure it is another."""
    node: Subject | None = None
    trial: Trial | None = None

    def end() -> None:
        nonlocal node, trial
        if trial is not None:
            trial.close()
        if node is not None:
            node.__exit__(None, None, None)
        node = trial = None

    try:
        for number, cell in enumerate(cells):
            try:
                if cell.fresh:
                    yield one(directory / str(number), shim, cell)
                    continue
                if node is None or trial is None:
                    node = Subject(directory / str(number), shim)
                    trial = Trial(node)
                yield trial.run(cell)
            except AssertionError as error:
                yield cell, error
                if not cell.fresh:
                    end()
    finally:
        end()


def one(directory: Path, shim: Path, cell: Cell) -> Outcome:
    with Subject(directory, shim) as node:
        trial = Trial(node, fresh=True)
        try:
            return trial.run(cell)
        finally:
            trial.close()


def run(seed: int, seconds: float | None, chosen: Callable[[Cell], bool] = lambda cell: True) -> dict[str, object]:
    """Try cells, drawn with the seed for so many seconds, or each once; a summary."""
    until = None if seconds is None else time.monotonic() + seconds
    cells = [cell for cell in matrix() if chosen(cell)]

    def drawn() -> Iterator[Cell]:
        draw = random.Random(seed)
        while until is not None and time.monotonic() < until:
            yield draw.choice(cells)

    failures: list[str] = []
    told: Counter[str] = Counter()
    tried = failed_calls = 0
    with tempfile.TemporaryDirectory() as directory:
        shim = build(Path(directory))
        for outcome in trials(Path(directory), shim, cells if until is None else drawn()):
            tried += 1
            if isinstance(outcome, Outcome):
                told.update(outcome.told)
                failed_calls += outcome.failed
            else:
                cell, error = outcome
                failures.append(str(cell))
                sys.stderr.write(f"{cell} failed: {error}\n")
    return {"seed": seed, "cells": tried, "failed_calls": failed_calls, "told": dict(told), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.driver")
    parser.add_argument("--minutes", type=float, help="for how long, with cells drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of the names of the cells that are tried")
    given = parser.parse_args()

    def chosen(cell: Cell) -> bool:
        return not given.words or any(word in str(cell) for word in given.words)

    summary = run(given.seed, None if given.minutes is None else 60 * given.minutes, chosen)
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
