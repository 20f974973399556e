"""Columns that stay on a CUDA device: mapped by another process without a copy, landed, lost."""

from __future__ import annotations

import signal
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import dataplane as dp
from tests.gpu.conftest import cuda
from tests.processes import MIB, StandingNode, Worker, eventually

pytestmark = cuda()

ROWS = 8


def columns(seed: int = 0) -> dict[str, Any]:
    values = torch.arange(ROWS << 17, dtype=torch.float32, device="cuda").view(ROWS, -1) + seed
    ragged = [torch.full((n,), seed + n, dtype=torch.int64, device="cuda") for n in (3, 0, 70_000, 1, 5, 9, 0, 2)]
    return {"x": values, "ids": ragged, "text": [f"{seed} {i}" for i in range(ROWS)]}


def same(batch: dp.Batch, seed: int) -> bool:
    expected = columns(seed)
    return (
        torch.equal(batch["x"].torch().cpu(), expected["x"].cpu())
        and all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(batch["ids"].torch().unbind(), expected["ids"], strict=True)
        )
        and batch["text"].to_list() == expected["text"]
    )


def produce(pipe: Any, address: str) -> None:
    with dp.connect(address, gpu_budget="4GiB") as plane:
        while (told := pipe.recv()) is not None:
            torch.cuda._sleep(100_000_000)
            pipe.send(plane.put(columns(told), device="keep"))


def test_kept_device_columns_are_mapped_by_another_process(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, Worker(produce, node.address) as producer:
        producer.say(1)
        ref = producer.hear(60)
        plane.get(ref, device="cuda")  # the driver's first time
        batch = plane.get(ref, device="cuda")
        assert same(batch, 1)
        assert same(plane.get(ref), 1)  # on the host: copied
        assert plane.stats().memory_used < MIB
        sliced = plane.get(ref[2:5], device="cuda")["x"].torch()
        assert torch.equal(sliced.cpu(), columns(1)["x"][2:5].cpu())
        plane.free(ref)
        assert same(batch, 1)  # a view keeps the memory
        del batch, sliced


def test_kept_columns_are_read_by_their_process_and_appended_to_a_stream(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        ref = plane.put(columns(1), device="keep")
        assert same(plane.get(ref, device="cuda"), 1)
        stream = plane.stream("rollouts", tasks=["actor"])
        stream.append(ref)
        with stream.consume("actor", rows=ROWS, columns=["x", "ids", "text"]) as delivery:
            assert same(delivery.get(), 1)


def test_kept_columns_move_to_the_arena_on_close_and_die_with_the_process(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        with dp.connect(node.address) as keeping:
            ref = keeping.put(columns(2), device="keep")
        assert same(plane.get(ref), 2)
        with Worker(produce, node.address) as producer:
            producer.say(3)
            lost = producer.hear(60)
            producer.kill(signal.SIGKILL)

            def gone() -> bool:
                try:
                    plane.get(lost)
                except dp.OwnerDied:
                    return True
                return False

            eventually(gone, "the node noticed")


def test_unmapped_kept_columns_return_their_device_memory(node: StandingNode) -> None:
    """torch counts who is to map what it shared, and would wait for the first for good."""
    with dp.connect(node.address) as plane:
        before = torch.cuda.memory_allocated()
        for seed in range(3):
            plane.free(plane.put({"x": columns(seed)["x"]}, device="keep"))
        eventually(lambda: not plane._inner._kept_columns.used, "the node said that nobody needs it")
        assert torch.cuda.memory_allocated() <= before


def hold(pipe: Any, address: str) -> None:
    """Maps what it is told to, and holds it until it is told something else."""
    with dp.connect(address) as plane:
        ref = pipe.recv()
        batch = plane.get(ref, device="cuda")
        tensor = batch["x"].torch()
        pipe.send(True)
        pipe.recv()
        pipe.send(bool(same(batch, 4)))
        del batch, tensor


def test_mapped_columns_outlive_the_plane_that_kept_them(node: StandingNode) -> None:
    with dp.connect(node.address) as keeping, Worker(hold, node.address) as consumer:
        consumer.say(keeping.put(columns(4), device="keep"))
        assert consumer.hear(60)
        keeping.close()
        others = [torch.zeros(ROWS << 17, device="cuda") for _ in range(8)]  # which may not take its place
        consumer.say(None)
        assert consumer.hear(60)
        del others
