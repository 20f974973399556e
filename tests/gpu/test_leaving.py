"""Tensors on CUDA devices that are put: after what the caller's stream had to do, and from any of its forms."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import dataplane as dp
from tests.gpu.conftest import cuda

pytestmark = cuda()

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
