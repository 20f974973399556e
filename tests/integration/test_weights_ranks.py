"""DTensors of real ranks, published as they are sharded and read in any other way."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.processes import StandingNode, Worker
from tests.torches import torches

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")


def _rank(pipe: Any, address: str, store: str, rank: int, ranks: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(35.0).reshape(7, 5)
    tensors = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),  # of uneven shards
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "few": distribute_tensor(whole[:1], mesh, [Shard(0)]),  # of which some ranks have nothing
        "same": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole,
    }
    with dp.connect(address) as plane:
        plane.weights("actor").publish(1, tensors, rank=rank, ranks=ranks, timeout=60)
        plane.weights("actor").publish(2, {"same": tensors["same"]}, rank=rank, ranks=ranks, timeout=60)
        partial = dict(tensors, rows=DTensor.from_local(whole, mesh, [Partial()]))
        with pytest.raises(dp.SchemaMismatch, match="partial"):
            plane.weights("actor").publish(3, partial, rank=rank, ranks=ranks)
    pipe.send("done")
    dist.destroy_process_group()


def test_dtensors_are_published_by_their_ranks_and_read_as_one(
    node: StandingNode, tmp_path: Path, with_torch: None
) -> None:
    ranks, store = 3, str(tmp_path / "store")
    with ExitStack() as undo:
        workers = [
            undo.enter_context(Worker(_rank, node.address, store, rank, ranks, context=torches))
            for rank in range(ranks)
        ]
        assert [worker.hear() for worker in workers] == ["done"] * ranks
    whole = torch.arange(35.0).reshape(7, 5)
    with dp.connect(node.address) as plane:
        found = plane.weights("actor").get(1)
        assert all(torch.equal(found[name], whole) for name in ("rows", "columns", "same", "plain"))
        assert torch.equal(found["few"], whole[:1])
        assert torch.equal(plane.weights("actor").get(2)["same"], whole), "of which the other ranks published nothing"
        part = plane.weights("actor").get(1, names=["columns"], slices={"columns": (slice(2, 6), slice(1, 4))})
        assert torch.equal(part["columns"], whole[2:6, 1:4])
        assert plane.weights("actor").versions() == [1, 2]
