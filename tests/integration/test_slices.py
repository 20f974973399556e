"""Slices inside rows, of another host: what is read is the share that was asked for, and that alone travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from tests.integration.test_hosts import Host, together

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


def test_a_rank_on_another_host_fetches_only_its_share(tmp_path: Path) -> None:
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
