"""Workers that bring rows piece by piece, and are killed as they do: every token is there, once, and spans are exact.

`ROWS=1000 PIECES=20 KILLS=100 WORKERS=8 python -m pytest tests/chaos/test_unfinished.py -s` is the full form.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import StandingNode, Worker, eventually

ROWS, PIECES, KILLS, WORKERS = (
    int(os.environ.get(name, small)) for name, small in (("ROWS", 24), ("PIECES", 6), ("KILLS", 5), ("WORKERS", 2))
)


def piece(row: int, number: int) -> tuple[Any, int]:
    """The tokens of a piece of a row, and the policy version that made them."""
    rng = Random(f"{row} {number}")
    first = row * 1_000_000 + number * 1000
    return np.arange(first, first + rng.randint(0, 40)), rng.randint(0, 1) + number // 3


def expected(row: int) -> tuple[list[int], list[list[int]]]:
    """All tokens of a row, and its spans."""
    tokens: list[int] = []
    spans: list[list[int]] = []
    for number in range(PIECES):
        made, version = piece(row, number)
        first, last = len(tokens), len(tokens) + len(made)
        tokens += made.tolist()
        if len(made) and spans and spans[-1][2] == version:
            spans[-1][1] = last
        elif len(made):
            spans.append([first, last, version])
    return tokens, spans


EVERY = max(1, ROWS * PIECES // (KILLS + WORKERS + 1))
"""Pieces that a worker brings before it waits for a word: so there is work left when the last one is killed."""


def work(pipe: Any, address: str, seed: int) -> None:
    """Take rows up, append a few pieces to each, and leave it to others or finish it, until none is in progress. It
    tells of its first pieces, and then waits for a word."""
    rng, brought = Random(seed), 0
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        while True:
            row = stream.resume()
            if row is None:
                if not stream.unfinished():
                    pipe.send("done")
                    return
                time.sleep(0.01)  # others bring the last ones
                continue
            done = len(row.get("piece")["piece"].numpy()[0]) if row.spans is not None else 0
            for number in range(done, min(PIECES, done + rng.randint(1, 8))):
                tokens, version = piece(row.tags["row"], number)
                row.append({"response_ids": [tokens], "piece": [[number]]}, version=version)
                brought += 1
                if brought <= EVERY:
                    pipe.send("piece")
                if brought == EVERY:
                    pipe.recv()
                done = number + 1
            if done == PIECES:
                row.finish()
            else:
                row.release()


@pytest.mark.timeout(600)
def test_no_token_is_lost_or_duplicated_when_workers_are_killed(tmp_path: Path) -> None:
    began, rng = time.monotonic(), Random(7)
    with StandingNode(tmp_path, memory="256MiB") as node, dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", tasks=["actor"])
        for number in range(ROWS):
            columns = {"prompt": [f"prompt {number}"], "piece": [np.empty(0, np.int64)]}
            stream.begin(f"row-{number}", tags={"row": number}, columns=columns).release()
        workers = [Worker(work, plane.address, seed) for seed in range(WORKERS)]
        try:
            for killed in range(KILLS):
                victim = workers[rng.randrange(WORKERS)]
                for _ in range(rng.randint(1, EVERY)):
                    assert victim.hear() == "piece"
                victim.kill()
                victim.__exit__(None, None, None)
                workers[workers.index(victim)] = Worker(work, plane.address, WORKERS + killed)
            for worker in workers:
                worker.say()
            for worker in workers:
                while worker.hear(600.0) != "done":
                    pass
        finally:
            for worker in workers:
                worker.__exit__(None, None, None)
        took_s = time.monotonic() - began
        assert stream.unfinished() == []
        names = ["prompt", "response_ids", "version_spans", "piece"]
        seen: dict[int, str] = {}
        while len(seen) < ROWS:
            with stream.consume("actor", rows=256, columns=names, timeout=30) as delivery:
                batch = delivery.get()
                rows = zip(
                    delivery.tags["row"],
                    batch["prompt"].to_list(),
                    batch["response_ids"].to_list(),
                    batch["version_spans"].to_list(),
                    batch["piece"].to_list(),
                    strict=True,
                )
                for number, prompt, tokens, spans, pieces in rows:
                    assert number not in seen
                    seen[number] = prompt
                    assert (prompt, pieces) == (f"prompt {number}", list(range(PIECES)))
                    assert (tokens, spans) == expected(number)
                del batch
        assert len(seen) == ROWS
        eventually(lambda: plane.stats().shards == 0, "nothing is left in the node")
        sys.stderr.write(f"{ROWS} rows of {PIECES} pieces, {KILLS} of {WORKERS} workers killed: {took_s:.1f} s\n")
