"""Columns that stay in memory of the process that put them: mapped, landed, dropped, lost. On the host's memory, which
goes the way that a device's goes; `tests/gpu` has the same on CUDA devices."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from pathlib import Path

import torch

import dataplane as dp
from dataplane.wire import shard_messages as sm
from tests.integration.keepers import ITEMS, LENGTHS, ROWS, consume, same
from tests.integration.test_hosts import connected
from tests.processes import MIB, WAIT_S, StandingNode, Worker, eventually, until
from tests.torches import torches

pytestmark = pytest.mark.usefixtures("with_torch")

NODE = {"memory": "64MiB"}


def columns(seed: int = 0) -> dict[str, Any]:
    values = torch.arange(ROWS * 2 * ITEMS, dtype=torch.float32).view(ROWS, -1) + seed
    ragged = [torch.full((n,), seed + n, dtype=torch.int64) for n in LENGTHS]
    return {"x": values, "ids": ragged, "text": [f"{seed} {i}" for i in range(ROWS)]}


def produce(pipe: Any, address: str) -> None:
    """Keeps what it is told to, and says what the reference is."""
    with dp.connect(address, gpu_budget=64 * MIB) as plane:
        while (told := pipe.recv()) is not None:
            pipe.send(plane.put(columns(told), device="keep"))


def test_columns_kept_by_a_process_are_mapped_by_others(node: StandingNode) -> None:
    with dp.connect(node.address) as keeping, dp.connect(node.address) as plane:
        ref = keeping.put(columns(1), device="keep")
        batch = plane.get(ref)
        assert same(batch, 1)
        assert np.array_equal(plane.get(ref[2:5])["x"].numpy(), columns(1)["x"][2:5].numpy())
        assert same(keeping.get(ref), 1)
        assert plane.stats().memory_used < MIB
        batch["x"].torch().zero_()  # a copy of this process's own
        del batch
        with Worker(consume, node.address, context=torches) as consumer:
            assert consumer.ask((ref, 1)) is True
            plane.free(ref)
            assert consumer.ask((ref, 1)) == "Freed"
            consumer.say(None)
            consumer.join()
        with pytest.raises(dp.Freed):
            plane.get(ref)
        eventually(lambda: not keeping._inner._kept_columns.used, "the memory was let go")


def test_the_oldest_kept_columns_move_to_the_arena_beyond_the_budget(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        with dp.connect(node.address, gpu_budget="10MiB") as keeping:
            refs = [keeping.put(columns(seed), device="keep") for seed in range(3)]
            assert MIB < plane.stats().memory_used < 9 * MIB
            batches = [plane.get(ref) for ref in refs]
            refs += [keeping.put(columns(seed), device="keep") for seed in range(3, 6)]
            assert all(same(batch, seed) for seed, batch in enumerate(batches))  # what is mapped stays so
            assert keeping._inner._kept_columns.used <= 10 * MIB
            del batches
        assert all(same(plane.get(ref), seed) for seed, ref in enumerate(refs))  # and the rest when the plane is closed


async def test_a_close_waits_for_kept_columns_that_are_moving_to_the_arena(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        async with dp.aio.connect(node.address, gpu_budget="10MiB") as keeping:
            ref = await keeping.put(columns(1), device="keep")
            kept = keeping._kept_columns
            for shard in kept._kept:
                kept._told(sm.Keeping(0, shard, True))
            while not kept._landed:  # the copies begin in the next step of the loop, and end later
                await asyncio.sleep(0)
            await kept.aclose()
        assert same(await plane.get(ref), 1)


async def test_a_kept_shard_is_asked_for_again_after_its_move_was_given_up(node: StandingNode) -> None:
    async with dp.aio.connect(node.address, gpu_budget="10MiB") as keeping, dp.aio.connect(node.address) as plane:
        ref = await keeping.put({"x": columns()["x"]}, device="keep")
        kept, told = keeping._kept_columns, list[sm.Keeping]()
        (shard,) = kept._kept
        keeping.connection.keeping = lambda each: (told.append(each), kept._told(each))
        held = []
        with pytest.raises(dp.Backpressure):
            while True:
                filler = await plane.put({"z": np.ones(MIB, np.uint8)}, timeout=0)
                held.append((filler, (await plane.get(filler))["z"].numpy()))
        moving = asyncio.create_task(kept.land(shard))
        await until(lambda: kept._landed)
        reading = asyncio.create_task(plane._getter.hold(ref, WAIT_S))  # as for a reader that cannot map it
        await until(lambda: told)
        moving.cancel()
        with pytest.raises(dp.PeerUnavailable, match="given up"):
            await reading
        for filler, _ in held:
            await plane.free(filler)
        held.clear()
        await plane._getter.hold(ref, WAIT_S)
        found = await plane.get(ref)
        assert np.array_equal(found["x"].numpy(), columns()["x"].numpy())


def gone(plane: dp.Plane, ref: dp.BatchRef) -> bool:
    """Whether the process that kept it is known to have ended."""
    try:
        plane.get(ref, device="cpu")
    except dp.OwnerDied as error:
        return "has gone" in str(error)
    return False


def test_columns_beyond_the_budget_of_their_process_are_put_in_the_arena(node: StandingNode) -> None:
    with dp.connect(node.address, gpu_budget=0) as plane:
        assert same(plane.get(plane.put(columns(), device="keep")))  # more than the budget


# Columns that a process of one host keeps and a process of another reads: by way of the arena.


def test_kept_columns_are_read_by_another_host_until_their_process_dies(tmp_path: Path) -> None:
    with (
        connected(tmp_path, memory="64MiB") as ((one, two), (_, second)),
        Worker(produce, one.address, context=torches) as producer,
    ):
        refs = [producer.ask(seed) for seed in (1, 2, 3)]
        assert same(second.get(refs[0], device="cpu"), 1)
        assert same(second.get(refs[1]), 2)
        assert int(two.facts()["fetched"]) >= 2 * refs[0].select("x").nbytes
        second.free(refs[0][4:5])
        with pytest.raises(dp.Freed):
            second.get(refs[0][3:6], device="cpu")
        assert len(second.get(refs[0][:4], device="cpu")) == 4

        producer.kill(signal.SIGKILL)

        eventually(lambda: gone(second, refs[2]), "the node noticed")
        assert same(second.get(refs[1]), 2)
