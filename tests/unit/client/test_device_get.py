"""Columns copied into arrays and tensors that are there already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import gc
import weakref

import torch

from dataplane.batch.batch import Batch, Column
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import StoredPiece
from dataplane.batch.views import _there
from dataplane.client.device_get import jobs_into as jobs
from dataplane.client.kept_columns import MappedDevice
from dataplane.errors import DataplaneError, Misuse, SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import local_batch, of_pieces

DENSE = np.arange(12, dtype=np.float32).reshape(4, 3)
RAGGED = [np.arange(2 * n, dtype=np.int64).reshape(n, 2) for n in (3, 0, 2, 1)]
SHARED = np.zeros(18, np.float32)


@pytest.fixture
def batch() -> Batch:
    bits = torch.arange(4).bfloat16()
    return local_batch(
        {"dense": DENSE, "ragged": RAGGED, "bits": bits, "text": list("abcd"), "complex": torch.zeros(4).cfloat()}
    )


def fill(batch: Batch, **out: Any) -> None:
    for job in jobs(batch, out):
        job()


def test_columns_are_copied_into_given_tensors_and_arrays(batch: Batch) -> None:
    tensor, array, bits = torch.zeros(4, 3), np.zeros((6, 2), np.int64), torch.zeros(4, dtype=torch.bfloat16)
    fill(batch, dense=tensor, ragged=array, bits=bits)
    assert torch.equal(tensor, torch.from_numpy(DENSE))
    np.testing.assert_array_equal(array, np.concatenate(RAGGED))
    assert torch.equal(bits, torch.arange(4).bfloat16())


@each_case(
    ("out", "error", "match"),
    [
        ({"dense": torch.zeros(4, 4)}, SchemaMismatch, r"float32 \[4, 3\], and the tensor to be filled .*\[4, 4\]"),
        ({"dense": torch.zeros(4, 3, dtype=torch.float64)}, SchemaMismatch, "float64"),
        ({"dense": np.zeros((4, 3))}, SchemaMismatch, "float64"),
        ({"ragged": torch.zeros(7, 2, dtype=torch.int64)}, SchemaMismatch, r"\[6, 2\]"),
        ({"text": torch.zeros(4)}, SchemaMismatch, "text"),
        ({"absent": torch.zeros(4)}, SchemaMismatch, "absent"),
        ({"dense": torch.zeros(3, 4).T}, Misuse, "contiguous"),
        ({"dense": torch._neg_view(torch.zeros(4, 3))}, Misuse, "contiguous"),
        ({"complex": torch.zeros(4, dtype=torch.complex64).conj()}, Misuse, "contiguous"),
        ({"dense": torch.zeros(4, 3, requires_grad=True)}, Misuse, "detach"),
        ({"dense": torch.zeros(4, 3, device="meta")}, Misuse, "meta"),
        ({"dense": SHARED[:12].reshape(4, 3), "complex": torch.from_numpy(SHARED[10:].view("c8"))}, Misuse, "own"),
        ({"dense": [0.0] * 12}, Misuse, "list"),
        ([torch.zeros(4, 3)], Misuse, "mapping"),
    ],
)
def test_targets_of_a_wrong_shape_or_type_are_refused_before_any_write(
    batch: Batch, out: Any, error: type[DataplaneError], match: str
) -> None:
    ready = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(error, match=match):
        jobs(batch, {"bits": ready, **out} if isinstance(out, dict) else out)
    assert not ready.any()


# Memory that is mapped as a tensor; here of the host, which torch treats alike but for the copies.


class Pin:
    """What must live as long as a tensor looks at the memory."""


def mapped(columns: dict[str, object]) -> tuple[MappedDevice, list[Column], weakref.ref[Pin]]:
    planned = plan(columns)
    tensor = torch.zeros(planned.nbytes, dtype=torch.uint8)
    for job in planned.jobs(tensor.numpy()):
        job()
    pin = Pin()
    memory, kept = MappedDevice(tensor, pin), weakref.ref(pin)
    layouts = dict(planned.layout().columns)
    return (
        memory,
        [
            of_pieces(n, lay.field, [StoredPiece(lay, memory, RowIndices.range(0, lay.rows))])
            for n, lay in layouts.items()
        ],
        kept,
    )


def test_host_reads_of_mapped_device_memory_are_copies() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    _, (dense, ragged), _ = mapped({"x": values, "ids": [[1, 2], [], [3], [4, 5, 6]]})
    assert np.array_equal(dense.numpy(), values)
    dense.torch().zero_()
    assert np.array_equal(dense[1:3].torch().numpy(), np.zeros((2, 3)))
    assert np.array_equal(dense.numpy(), values)
    assert ragged.to_list() == [[1, 2], [], [3], [4, 5, 6]]


@each_case("picked", [slice(0, 4), slice(1, 3)])
def test_device_tensors_view_mapped_memory_without_a_copy(picked: slice) -> None:
    values = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    rows = [[1, 2], [], [3], [4, 5, 6]]
    _, (dense, ragged), _ = mapped({"x": values, "ids": rows})
    cpu = torch.device("cpu")
    found = _there("x", dense.field, dense[picked].reading, cpu)
    assert torch.equal(found, values[picked])
    nested = _there("ids", ragged.field, ragged[picked].reading, cpu)
    assert [row.tolist() for row in nested.unbind()] == rows[picked]
    assert _there("x", dense.field, dense[::2].reading, cpu) is None
    assert _there("x", dense.field, dense.reading, torch.device("meta")) is None
    found.zero_()
    assert not dense[picked].torch().any()


def test_only_device_tensors_hold_the_pin_of_mapped_memory() -> None:
    memory, (column,), kept = mapped({"x": torch.arange(12).reshape(4, 3)})
    view = _there("x", column.field, column[1:2].reading, torch.device("cpu"))
    del memory, column
    gc.collect()
    assert kept() is not None
    assert view.tolist() == [[3, 4, 5]]
    del view
    gc.collect()
    assert kept() is None
