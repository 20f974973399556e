"""Routing indices sliced for ranks: bytes stored, and bytes sent to each of eight context-parallel ranks, over the
bytes of all as int64; and the time of a rank's get.

    python -m bench.slices [--tokens 200000] [--json PATH]

Each rank is a node on this machine's loopback, with a client that reads the rank's share. The bytes sent are those that
the node reports as fetched.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import dataplane as dp
from bench.measure import Row, finished, row, table
from bench.namespaces import End, Host, keygen, seeds_at, together
from bench.peers.work import EXPERTS, LAYERS, TOP

RANKS = 8
_START_S = 60.0
_END: End = ("", "127.0.0.1")


def rows_of(tokens: int) -> list[np.ndarray[tuple[int, int, int], np.dtype[np.int64]]]:
    """Random rows of at least `tokens` tokens in all, with clipped log-normal lengths."""
    source = np.random.default_rng(0)
    lengths = np.clip(source.lognormal(np.log(8192), 0.8, 1 + tokens // 4096), 64, 32_768).astype(int)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    return [source.integers(0, EXPERTS, (int(n), LAYERS, TOP)) for n in lengths]


@contextmanager
def node(key: Path, seeds: str, memory: int) -> Iterator[dp.Plane]:
    """Run a node of the cluster on loopback. Yields a plane of it."""
    host = Host(_END, key, seeds, str(memory))
    try:
        with dp.connect(host.address) as plane:
            yield plane
    finally:
        host.stop()


def measure(tokens: int, scratch: Path) -> list[Row]:
    """The bytes and times of all ranks."""
    rows = rows_of(tokens)
    whole = sum(each.nbytes for each in rows)
    memory = max(2 * whole // 8 + (64 << 20), 64 << 20)
    sent, seconds = [], []
    key, seeds = keygen(scratch), seeds_at([_END])
    with node(key, seeds, memory) as owner:
        ref = owner.put({"routed_experts": rows}, narrow=["routed_experts"])
        stored = owner.stats().memory_used
        for rank in range(RANKS):
            with node(key, seeds, memory) as plane:
                together([plane, owner], _START_S)
                before = plane.stats().fetched_bytes
                began = time.perf_counter()
                got = plane.get(ref.share_rows("routed_experts", rank, RANKS, zigzag=True))["routed_experts"]
                found = got.narrow().numpy()
                seconds.append(1000 * (time.perf_counter() - began))
                sent.append((plane.stats().fetched_bytes - before) / whole)
                if sum(map(len, found)) not in range(tokens // RANKS // 2, 2 * tokens // RANKS):
                    raise RuntimeError("a share of other tokens")
                del got, found
    about = f"{len(rows)} rows, {sum(map(len, rows)):,} tokens, {whole / 1e6:,.0f} MB as int64"
    return [
        row("R3: bytes stored over int64", [stored / whole], at_most=1 / 8 * 1.001, unit="x", detail=about),
        row("R3: bytes sent to a context-parallel rank of 8, over int64 for all", sent, at_most=1 / 60, unit="x"),
        row("R3: a rank's get of its share", seconds, at_most=1000.0, unit="ms"),
    ]


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.slices", description="Routing indices sliced for ranks.")
    parser.add_argument("--tokens", type=int, default=200_000, help="of all rows together (default: 200,000)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/slices.json"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="dp-") as scratch:
        rows = measure(asked.tokens, Path(scratch))
    print(table(rows))
    return finished(asked.json, rows, {"tokens": asked.tokens, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    sys.exit(main())
