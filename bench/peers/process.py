"""A process of a measurement, a server, producer or consumer of a system: `python -m bench.peers.process KIND SYSTEM`.

Requests are lines of JSON on standard input. Each is answered by a line of JSON on the original standard output, while
the output of the system goes to standard error. The process ends when its input ends. Times are of the monotonic clock,
which all processes of a host share. It runs in the environment of the system.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

from bench.peers import systems, work

Answer = dict[str, Any]


def _measured(act: Callable[[], Any]) -> tuple[Any, Answer]:
    began, cpu = time.monotonic(), time.process_time()
    made = act()
    spent = time.process_time() - cpu
    return made, {"began": began, "ended": time.monotonic(), "cpu_s": spent}


class Stage:
    """A producer or consumer. Each method executes a request, and returns the answer."""

    def __init__(self, system: str, address: dict[str, Any]) -> None:
        self._door = systems.door(system, address)
        self._made: work.Columns = {}
        self._singly = False
        self._got: list[list[work.Columns]] = []

    def make(self, share: dict[str, Any], seed: int, parts: int, ranks: bool) -> Answer:
        """Generate the rows, which is not timed. The answer has the checksum of each part or, with `ranks`, of each
        rank's share of the rows."""
        self._singly = share["singles"] > 0
        self._made = work.columns(work.share_of(share), seed)
        return {
            "nbytes": work.nbytes(self._made),
            "digests": [
                work.digest(work.shared(self._made, i, parts) if ranks else work.part(self._made, i, parts))
                for i in range(parts)
            ],
        }

    def put(self, name: str, parts: int) -> Answer:
        """Put the generated rows. The answer has the tokens of each part."""
        rows = work.rows_of(self._made)
        alone = [work.part(self._made, i, rows) for i in range(rows)] if self._singly else []

        def act() -> list[list[str]]:
            if not alone:
                return [[token] for token in self._door.put(name, self._made, parts)]
            tokens = [self._door.put(f"{name}r{i}", row, 1)[0] for i, row in enumerate(alone)]
            return [tokens[slice(*work.bounds(rows, part, parts))] for part in range(parts)]

        tokens, measured = _measured(act)
        return measured | {"tokens": tokens}

    def get(self, tokens: list[list[str]], rank: list[int]) -> Answer:
        """Get the rows of each producer's tokens as arrays. `rank`: a rank and the number of ranks, to get its share of
        each row; empty: all."""

        def one(token: str) -> work.Columns:
            if not rank:
                return self._door.get(token)
            if isinstance(self._door, systems.Shares):
                return self._door.share(token, *rank)
            return work.shared(self._door.get(token), *rank)

        def act() -> None:
            for several in tokens:
                self._got.append([one(token) for token in several])

        _, measured = _measured(act)
        return measured

    def read(self) -> Answer:
        """Read and release all rows of `get`. The answer has the checksum of each producer's rows."""
        digests, measured = _measured(lambda: [work.digest(work.joined(several)) for several in self._got])
        self._got.clear()
        return measured | {"digests": digests}

    def drop(self, tokens: list[list[str]]) -> Answer:
        """Drop the rows of these tokens."""
        self._door.drop([token for several in tokens for token in several])
        return {}

    def close(self) -> Answer:
        """Close the connection to the system."""
        self._got.clear()
        self._door.close()
        return {}


def _versions(system: str) -> dict[str, str]:
    found = {}
    for package in systems.SYSTEMS[system].packages or ("rollout-dataplane",):
        name = package.split("==")[0].split(">=")[0]
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _told(lines: TextIO) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield json.loads(line)


def main() -> int:
    """Start, and execute requests until the input ends."""
    kind, system = sys.argv[1:3]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    told = _told(sys.stdin)
    first = next(told)
    if kind == "server":
        server = systems.server(system, first)
        out.write(json.dumps({"address": server.address, "versions": _versions(system)}) + "\n")
        for _ in told:
            break
        server.close()
        return 0
    stage = Stage(system, first)
    out.write("{}\n")
    for what in told:
        out.write(json.dumps(getattr(stage, what.pop("do"))(**what)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
