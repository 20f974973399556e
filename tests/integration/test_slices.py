"""Slices inside rows, of another host: what is read is the share that was asked for, and that alone travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from tests.integration.test_hosts import Host, together
from tests.processes import MIB

RANKS = 8
LENGTHS = (3000, 1, 0, 4097, 2500, 16, 17, 3999)


def routed() -> list[np.ndarray[Any, Any]]:
    """Experts that tokens were routed to, [tokens, layers, top-k], as an engine gives them."""
    random = np.random.default_rng(3)
    return [random.integers(0, 128, (tokens, 47, 4)) for tokens in LENGTHS]


def share(row: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """What Megatron gives a context-parallel rank of a row, without its padding."""
    half = -(-len(row) // (2 * RANKS))
    other = 2 * RANKS - 1 - rank
    return np.concatenate([row[rank * half : (rank + 1) * half], row[other * half : (other + 1) * half]])


def test_a_rank_of_another_host_is_sent_its_share_alone(tmp_path: Path) -> None:
    rows = routed()
    size = sum(row.size for row in rows)  # a byte each, of eight
    with Host(tmp_path / "one", memory="64MiB") as owner, dp.connect(owner.address) as one:
        ref = one.put({"routed_experts": rows, "length": list(LENGTHS)}, narrow=["routed_experts"])
        for rank in (0, 5):
            with Host(tmp_path / f"rank{rank}", owner, memory="64MiB") as host, dp.connect(host.address) as other:
                together(one, other)
                mine = ref.share_rows("routed_experts", rank, RANKS, zigzag=True)
                batch = other.get(mine.select("routed_experts"))
                for found, row in zip(batch["routed_experts"].numpy(), rows, strict=True):
                    np.testing.assert_array_equal(found, share(row, rank))
                    assert found.dtype == np.int64
                fetched = host.facts()["fetched"]
                assert fetched < 1.06 * size / RANKS, "the share, and the rows' offsets"
                assert fetched > 0.9 * size / RANKS


def test_slices_of_many_kinds_of_another_host(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    dense = random.integers(0, 1000, (64, 4096))
    pairs = [
        {"ids": random.integers(0, 150_000, (n, 32)), "logprobs": random.random((n, 32), np.float32)}
        for n in range(1, 129, 2)
    ]
    varying = [random.random((n, 1 + n % 3, 700)) for n in range(64)]
    images = [random.integers(0, 256, (1 + n // 8, 3000), np.uint8) for n in range(64)]
    with Host(tmp_path / "one", memory="64MiB") as owner, dp.connect(owner.address) as one:
        columns = {"dense": dense, "pairs": pairs, "varying": varying, "same": [images[n // 4 * 4] for n in range(64)]}
        ref = one.put(columns, narrow=["dense"], dedupe=["same"])
        starts, stops = random.integers(-9, 20, 64), random.integers(-5, 90, 64)
        with Host(tmp_path / "two", owner, memory="64MiB") as host, dp.connect(host.address) as other:
            together(one, other)
            sliced = ref.slice_rows("dense", 0, 100, 200).slice_rows(["pairs", "same"], 0, starts, stops)
            sliced = sliced.slice_rows("varying", start=-2).slice_rows("varying", 1, 0, 1)[[60, 3, 3, 9, 63]].repeat(2)
            for plane in (other, one):
                batch = plane.get(sliced)
                for at, row in enumerate(row for row in (60, 3, 3, 9, 63) for _ in range(2)):
                    cut = slice(int(starts[row]), int(stops[row]))
                    np.testing.assert_array_equal(batch["dense"].numpy()[at], dense[row, 100:200])
                    np.testing.assert_array_equal(batch["pairs"].numpy()[at]["ids"], pairs[row]["ids"][cut])
                    np.testing.assert_array_equal(batch["pairs"].numpy()[at]["logprobs"], pairs[row]["logprobs"][cut])
                    np.testing.assert_array_equal(batch["varying"].numpy()[at], varying[row][-2:, :1])
                    np.testing.assert_array_equal(batch["same"].numpy()[at], images[row // 4 * 4][cut])
            assert host.facts()["fetched"] < MIB, "of 8 MiB"
            np.testing.assert_array_equal(other.get(ref)["dense"].numpy(), dense)  # what is asked for later is added
