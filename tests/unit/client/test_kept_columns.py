"""Memory that is mapped as a tensor; here of the host, which torch treats alike but for the copies."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dataplane.batch.batch import Column, StoredPiece
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.views import _there
from dataplane.client.kept_columns import MappedDevice
from tests.cases import each_case


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
        [Column(n, lay.field, [StoredPiece(lay, memory, RowIndices.range(0, lay.rows))]) for n, lay in layouts.items()],
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
