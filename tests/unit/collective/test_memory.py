"""The memory of a received batch: kept by its views, and used again after the last of them."""

from __future__ import annotations

import gc

import pytest

from dataplane.collective.memory import ReceivedBlock

MIB = 1 << 20


def address(memory: ReceivedBlock) -> int:
    where: int = memory.block.__array_interface__["data"][0]
    return where


def test_a_block_is_reused_after_its_last_view_is_released() -> None:
    first = ReceivedBlock(4 * MIB)
    where, view = address(first), first.read(128, 64)[8:]
    del first
    gc.collect()
    second = ReceivedBlock(4 * MIB)
    assert address(second) != where
    second.block[:] = 5
    del view
    gc.collect()
    third = ReceivedBlock(3 * MIB)
    assert address(third) == where
    assert len(third.block) == 3 * MIB


def test_a_block_is_not_reused_while_a_tensor_views_it() -> None:
    torch = pytest.importorskip("torch")
    memory = ReceivedBlock(2 * MIB)
    memory.block[:] = 3
    tensor = torch.from_numpy(memory.private(0, 16))[4:]
    del memory
    gc.collect()
    other = ReceivedBlock(2 * MIB)
    other.block[:] = 9
    assert tensor.tolist() == [3] * 12
