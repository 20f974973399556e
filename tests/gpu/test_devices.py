"""Rows on CUDA devices: read there, filled there, fed to a loop there, and sent there by a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import dataplane as dp
from tests.gpu.conftest import cuda

pytestmark = cuda()

SIZES = [0, 1, 4096, (8 << 20) - 4, 8 << 20, (40 << 20) + 4]  # bytes around the ring's buffers, and more than all


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_get_reads_numeric_columns_to_a_device(plane: dp.Plane, nbytes: int) -> None:
    values = np.arange(nbytes // 4, dtype=np.float32).reshape(1, -1)
    batch = plane.get(plane.put({"x": values, "text": ["a"]}), device="cuda")
    assert batch["x"].torch().is_cuda
    assert torch.equal(batch["x"].torch().cpu(), torch.from_numpy(values))
    assert batch["text"].to_list() == ["a"]


def test_ragged_rows_are_read_to_a_device(plane: dp.Plane) -> None:
    rows = [np.arange(n, dtype=np.int64) for n in (5, 0, 70_000)]
    nested = plane.get(plane.put({"ids": rows}), device="cuda")["ids"].torch()
    assert nested.is_cuda
    for row, expected in zip(nested.unbind(), rows, strict=True):
        assert torch.equal(row.cpu(), torch.from_numpy(expected))


@pytest.mark.parametrize("nbytes", SIZES[1:])
def test_device_tensors_are_filled_after_pending_uses(plane: dp.Plane, nbytes: int) -> None:
    values = torch.randint(0, 255, (1, nbytes), dtype=torch.uint8)
    ref = plane.put({"x": values})
    target, before = torch.zeros_like(values, device="cuda"), torch.empty_like(values, device="cuda")
    torch.cuda._sleep(50_000_000)
    before.copy_(target)
    plane.get(ref, out={"x": target})
    assert not before.any()
    assert torch.equal(target.cpu(), values)


def test_a_loader_yields_batches_on_a_device(plane: dp.Plane) -> None:
    stream = plane.stream("rollouts", tasks=["actor"])
    stream.append({"id": list(range(40)), "ids": [[i] * (i % 5) for i in range(40)], "text": list("ab" * 20)})
    stream.close()
    seen: list[int] = []
    for batch in dp.loader(stream, "actor", rows=4, columns=["id", "ids", "text"], device="cuda", prefetch=2):
        assert batch["id"].is_cuda
        assert [row.tolist() for row in batch["ids"].unbind()] == [[i] * (i % 5) for i in batch["id"].tolist()]
        assert batch["text"] == [*"ab" * 2]
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(40))


def test_a_missing_device_is_misuse(plane: dp.Plane) -> None:
    with pytest.raises(dp.Misuse, match="there is no cuda:99"):
        plane.get(plane.put({"x": [1]}), device="cuda:99")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_collective_returns_tensors_on_a_device(plane: dp.Plane, tmp_path: Path, backend: str) -> None:
    import torch.distributed as dist

    method: Any = f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=method, rank=0, world_size=1)
    try:
        batch = dp.collective.broadcast(plane.put({"x": torch.arange(5)}), None, plane=plane, device="cuda")
        assert batch["x"].torch().is_cuda
        assert batch["x"].to_list() == [0, 1, 2, 3, 4]
    finally:
        dist.destroy_process_group()


# Tensors on CUDA devices that are put: after what the caller's stream had to do, and from any of its forms.

_CYCLES = 200_000_000  # of the device: a tenth of a second or more


@pytest.mark.parametrize("nbytes", [4, 4096, (8 << 20) - 4, 8 << 20, (100 << 20) + 4])
@pytest.mark.parametrize("side", [False, True])
def test_a_put_waits_for_pending_writes_of_the_calling_stream(plane: dp.Plane, nbytes: int, side: bool) -> None:
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    tensor = torch.zeros((1, nbytes // 4), dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES)
        tensor.copy_(torch.arange(nbytes // 4, dtype=torch.int32, device="cuda"))
        ref = plane.put({"x": tensor})
        tensor.zero_()
    assert torch.equal(plane.get(ref)["x"].torch()[0], torch.arange(nbytes // 4, dtype=torch.int32))


@pytest.mark.parametrize("item", [(), (3,)])
def test_ragged_rows_are_gathered_on_the_device(plane: dp.Plane, item: tuple[int, ...]) -> None:
    lengths = [5, 0, 70_000, 1, 900_000]
    rows = [torch.randn(n, *item) for n in lengths]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES)
        there = [row.to("cuda", non_blocking=True) for row in rows]
        listed = plane.put({"x": there})
        nested = plane.put({"x": torch.nested.nested_tensor(there, layout=torch.jagged)})
    for ref in (listed, nested):
        for row, expected in zip(plane.get(ref)["x"].torch().unbind(), rows, strict=True):
            assert torch.equal(row, expected)


def test_strided_and_repeated_device_rows_round_trip(plane: dp.Plane) -> None:
    tensor = torch.randn(300, 5000)
    there = tensor.cuda()
    assert torch.equal(plane.get(plane.put({"x": there.t()}))["x"].torch(), tensor.t())
    repeated = there[:2].repeat(8, 1)
    ref = plane.put({"x": repeated}, dedupe=["x"])
    assert torch.equal(plane.get(ref)["x"].torch(), repeated.cpu())


def test_device_columns_can_be_appended_to_a_stream(plane: dp.Plane) -> None:
    stream = plane.stream("rollouts", tasks=["actor"])
    stream.append({"x": torch.arange(5).cuda(), "rows": [torch.arange(n).cuda() for n in range(5)]})
    with stream.consume("actor", rows=5, columns=["x", "rows"]) as delivery:
        batch = delivery.get()
    assert batch["x"].to_list() == list(range(5))
    assert batch["rows"].to_list() == [list(range(n)) for n in range(5)]
