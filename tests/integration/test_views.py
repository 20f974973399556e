"""What was handed out stays valid and unchanged, whatever becomes of the reference, the plane and the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataplane as dp
from tests.cases import each_case
from tests.integration.test_hosts import Host, together
from tests.processes import MIB, StandingNode, eventually, pattern

NODE = {"spill": 0}
SIZE = 2 * MIB

KINDS: dict[str, Callable[[dp.Column], Any]] = {
    "numpy": lambda column: column.numpy(),
    "torch": lambda column: column.torch(),
    "arrow": lambda column: column.arrow(),
    "slice": lambda column: column.numpy()[0, 100:][::3],
    "memoryview": lambda column: memoryview(column.numpy()),
}


def values(view: Any) -> Any:
    """Of every kind of view: the values it shows, copied."""
    if hasattr(view, "to_numpy_ndarray"):  # Arrow's tensors
        return view.to_numpy_ndarray().copy()
    return np.array(view.numpy() if isinstance(view, torch.Tensor) else view)


def overwrite(plane: dp.Plane) -> None:
    """Put over all memory that is free, several times."""
    room = plane.stats().memory_budget - plane.stats().memory_used
    for seed in range(90, 94):
        plane.free(plane.put({"x": pattern(seed, room)}, timeout=60))


@each_case("kind", KINDS)
def test_a_view_outlives_free(node: StandingNode, kind: str) -> None:
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, SIZE).view(np.int64)})
        view = KINDS[kind](plane.get(ref)["x"])
        before = values(view)
        plane.free(ref)
        assert plane.stats().memory_used == SIZE
        overwrite(plane)
        assert np.array_equal(values(view), before)
        del view
        eventually(lambda: plane.stats().memory_used == 0, "its memory goes with it")


@each_case("kind", KINDS)
def test_a_view_outlives_its_plane(node: StandingNode, kind: str) -> None:
    with dp.connect(node.address) as other:
        plane = dp.connect(node.address)
        ref = plane.put({"x": pattern(1, SIZE).view(np.int64)})
        view = KINDS[kind](plane.get(ref)["x"])
        before = values(view)
        plane.close()
        other.free(ref)
        overwrite(other)
        assert np.array_equal(values(view), before)
        assert other.stats().clients == 2
        del view
        eventually(lambda: other.stats().clients == 1, "the connection goes with it")
        assert other.stats().memory_used == 0


def test_writes_into_a_torch_tensor_do_not_affect_other_readers(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, dp.connect(node.address) as other:
        ref = plane.put({"x": pattern(1, SIZE).view(np.int64)})
        one, two = plane.get(ref)["x"].torch(), other.get(ref)["x"].torch()
        array = plane.get(ref)["x"].numpy()
        one.mul_(-1)
        assert torch.equal(one, -two)
        two.zero_()
        assert int(one[0, 5]) == -int(array[0, 5])
        assert np.array_equal(array, pattern(1, SIZE))
        again = other.get(ref)["x"]
        assert np.array_equal(again.numpy(), pattern(1, SIZE))
        assert torch.equal(again.torch(), -one)


def test_views_outlive_the_node(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node:
        with dp.connect(node.address) as plane:
            batch = plane.get(plane.put({"x": pattern(1, SIZE).view(np.int64)}))
            array, tensor = batch["x"].numpy(), batch["x"].torch()
            node.kill()
            with pytest.raises(dp.PeerUnavailable):
                plane.stats()
        tensor[0, 0] = 7
        assert np.array_equal(array, pattern(1, SIZE))
        assert np.array_equal(tensor.numpy()[0, 1:], pattern(1, SIZE)[0, 1:])


# Slices inside rows, of another host: what is read is the share that was asked for, and that alone travels.

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
