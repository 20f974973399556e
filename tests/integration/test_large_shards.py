"""Shards of many rows, of which some were freed: the rest is readable, on their own host and on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.integration.test_hosts import Host, together

ROWS = 20_000_000


def values() -> Any:
    return (np.arange(ROWS, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)


def random_rows() -> Any:
    return np.unique(np.random.default_rng(0).integers(0, ROWS, 300_000))


def test_a_shard_of_20_million_rows_is_readable_on_another_host_but_for_what_was_freed(tmp_path: Path) -> None:
    large = {"memory": "64MiB"}
    with (
        Host(tmp_path / "0", **large) as one,
        Host(tmp_path / "1", one, **large) as two,
        dp.connect(one.address) as a,
        dp.connect(two.address) as b,
    ):
        together(a, b)
        ref, gone = a.put({"x": values()}), random_rows()
        a.free(ref[gone])
        start = int(gone[7]) + 1
        part = slice(start, int(gone[8]))
        assert np.array_equal(b.get(ref[part])["x"].numpy(), values()[part])
        with pytest.raises(dp.Freed, match=f"row {gone[7]} of shard"):
            b.get(ref[start - 1 : start])
