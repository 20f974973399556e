"""What one rank packs, another reads: every kind of column, whatever rows of it, and each stored row once."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from dataplane.batch.batch import Batch
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import StoredPiece
from dataplane.batch.views import _there
from dataplane.clock import Deadline
from dataplane.collective.link import RankLink
from dataplane.collective.memory import ReceivedBlock
from dataplane.collective.packing import PIECE, PackedHeader, numbers, opened, pack, unpacked
from dataplane.errors import PeerUnavailable, ProtocolMismatch
from tests.cases import each_case
from tests.unit.batch import exact
from tests.unit.batch.exact import LocalMemory, filled, local_batch, of_pieces

ROWS = 23
KINDS: dict[str, Any] = {
    "dense": np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3),
    "empty dense": np.zeros((ROWS, 0), np.int16),
    "flags": np.arange(ROWS) % 3 == 0,
    "ragged": [np.arange(i % 5, dtype=np.int64) for i in range(ROWS)],
    "images": [np.full((3, i % 4, 1 + i % 3), i, np.uint8) for i in range(ROWS)],
    "text": [f"row {i} – ü" for i in range(ROWS)],
    "bytes": [bytes(range(i)) for i in range(ROWS)],
    "struct": [{"a": i, "b": {"c": str(i)}} if i % 2 else {"a": -i} for i in range(ROWS)],
    "object": [[i, {"k": None}, 2**70] for i in range(ROWS)],
}


def sent(batch: Batch) -> tuple[Batch, PackedHeader]:
    """The batch as another rank has it."""
    packed = pack(batch)
    header = opened(packed.header)
    memory = ReceivedBlock(header.nbytes)
    memory.block[:] = 0xAA  # a byte that is not sent is not read
    for (start, stop), piece in zip(header.pieces, packed.pieces, strict=True):
        memory.block[start:stop] = piece
    return unpacked(header, memory), header


def check(batch: Batch) -> PackedHeader:
    received, header = sent(batch)
    assert received.schema == batch.schema
    assert received.to_dict() == batch.to_dict()
    return header


@each_case("rows", [slice(3, 9), slice(4, 4), slice(20, 3, -2)], ids=str)
@each_case("kind", KINDS)
def test_rows_of_every_kind_arrive(kind: str, rows: slice) -> None:
    check(Batch({kind: local_batch({kind: KINDS[kind]})[kind][rows]}))


@each_case("kind", KINDS)
def test_columns_with_and_without_repeated_rows_arrive_in_one_batch(kind: str) -> None:
    stored = exact.piece(kind, KINDS[kind])
    repeated = of_pieces(kind, stored.layout.field, [stored], np.arange(ROWS) // 4)
    header = check(Batch({kind: repeated, "number": local_batch({"number": np.arange(ROWS)})["number"]}))
    assert set(header.orders) == {kind}


def test_contiguous_rows_are_packed_without_a_copy() -> None:
    planned = plan({"x": np.zeros((3, PIECE), np.uint8)})
    memory = filled(planned)
    ((name, layout),) = planned.layout().columns
    column = of_pieces(name, layout.field, [StoredPiece(layout, LocalMemory(memory), RowIndices.range(1, 3))])
    pieces = pack(Batch({name: column})).pieces
    assert [len(piece) for piece in pieces] == [PIECE, PIECE]
    assert all(np.shares_memory(piece, memory) for piece in pieces)


@each_case(
    "text",
    [
        b"",
        b"\x93\x01\x02\x03",
        b"\x94\x90\x80\x10\x91\x92\x08\x04",  # a piece that ends before it begins
        b"\x94\x90\x80\x10\x91\x92\x00\x20",  # beyond the end
    ],
    ids=["nothing", "numbers", "backwards", "beyond"],
)
def test_an_invalid_header_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolMismatch):
        opened(text)


def test_columns_received_into_device_memory_are_not_copied_again() -> None:
    """The host's memory stands for a device's."""
    torch = pytest.importorskip("torch")
    cpu = torch.device("cpu")
    large = np.arange(ROWS << 15, dtype=np.uint64).view(np.uint8).reshape(ROWS, -1)
    packed = pack(local_batch(KINDS | {"large": large}))
    header = opened(packed.header)
    memory = ReceivedBlock(header.nbytes)
    memory.mirror(cpu, numbers(header))
    for (start, stop), piece in zip(header.pieces, packed.pieces, strict=True):
        memory.block[start:stop] = piece
        memory.arrived(start, stop)
    batch = unpacked(header, memory)
    for name in ("dense", "ragged", "flags", "large"):
        column = batch[name]
        there = _there(name, column.field, column.reading, cpu)
        expected = column.torch()
        assert there.is_nested or there.data_ptr() != expected.data_ptr()
        for a, b in zip(there.unbind(), expected.unbind(), strict=True):
            assert torch.equal(a, b)
    assert _there("text", batch["text"].field, batch["text"].reading, cpu) is None
    assert memory.there(0, header.nbytes, cpu) is None  # more than one column's
    assert memory.there(0, 1, torch.device("meta")) is None


# The memory of a received batch: kept by its views, and used again after the last of them.

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


# The link of a rank: no wait is longer than the call's deadline, also where nothing answers.


class Work:
    """Torch's work, which notes how long it is waited for."""

    limits: list[timedelta]

    def __init__(self) -> None:
        self.limits = []

    def wait(self, limit: timedelta) -> None:
        self.limits.append(limit)


@pytest.mark.parametrize("seconds", [0.0, 0.0009, 0.0019])
def test_a_wait_at_the_deadline_has_a_limit_of_whole_milliseconds(seconds: float) -> None:
    """Torch drops parts of a millisecond, and takes 0 as no limit."""
    link, work = RankLink(None, 0, 1), Work()
    link.begin(Deadline.after(seconds, lambda: 0.0))
    link.wait(work, 0)
    link.end(None)
    assert work.limits
    assert all(limit >= timedelta(milliseconds=1) for limit in work.limits)
    assert all(limit % timedelta(milliseconds=1) == timedelta() for limit in work.limits)


class SilentStore:
    """A store whose process is stopped, until `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.over.wait()
        raise RuntimeError("the store has gone")


def test_a_silent_rendezvous_store_is_reported_as_an_incomplete_group() -> None:
    pytest.importorskip("torch")
    store = SilentStore()
    link = RankLink(store, 0, 2)
    link.begin(Deadline.after(0))
    with pytest.raises(PeerUnavailable, match="not all 2 ranks") as caught:
        link.connect()
    store.over.set()
    assert caught.value.address == "the group"
    link.end(None)
