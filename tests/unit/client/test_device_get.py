"""Columns copied into arrays and tensors that are there already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dataplane.batch.batch import Batch
from dataplane.client.device_get import jobs_into as jobs
from dataplane.errors import DataplaneError, Misuse, SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import local_batch

DENSE = np.arange(12, dtype=np.float32).reshape(4, 3)
RAGGED = [np.arange(2 * n, dtype=np.int64).reshape(n, 2) for n in (3, 0, 2, 1)]


@pytest.fixture
def batch() -> Batch:
    bits = torch.arange(4).bfloat16()
    return local_batch({"dense": DENSE, "ragged": RAGGED, "bits": bits, "text": list("abcd")})


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
        ({"dense": torch.zeros(4, 3, requires_grad=True)}, Misuse, "detach"),
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
