from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.batch import tensordicts
from dataplane.batch.dtypes import BITS
from dataplane.batch.put_plan import values_of
from dataplane.errors import SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import column, local_batch, same

_DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(name for name in BITS if hasattr(torch, name)),
]


def _of(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * torch.empty(0, dtype=kind).element_size()
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, max(count, 16), dtype=np.uint8)
    return torch.from_numpy(raw).view(kind)[: int(np.prod(shape))].view(*shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@each_case("dtype", _DTYPES)
def test_tensors_of_every_dtype_round_trip_bit_for_bit(dtype: str) -> None:
    tensor = _of(dtype, 4, 3)
    found = column(tensor)
    assert found.dtype == dtype
    assert same(found.torch(), tensor)
    assert same(column(tensor.t()).torch(), tensor.t().contiguous())
    assert same(column(tensor[::2, 1:]).torch(), tensor[::2, 1:].contiguous())
    rows = [_of(dtype, n, seed=n) for n in (3, 0, 5)]
    assert same(list(column(rows).torch().unbind()), rows)
    assert same(list(column(rows)[::2].torch().unbind()), rows[::2])
    images = [_of(dtype, 2, n, 3, seed=n).transpose(0, 1) for n in (3, 0, 5)]
    assert same(list(column(images).torch().unbind()), [image.contiguous() for image in images])
    varied = [_of(dtype, n, 2, n + 1, seed=n) for n in (3, 1)]
    assert same(column(varied).torch(), varied)
    assert same(column(list(tensor[0].unbind())).torch(), tensor[0])


def test_changes_to_returned_offsets_do_not_affect_the_column() -> None:
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    held = column(rows)
    _, offsets = held.packed()
    offsets.add_(1)
    held.torch().offsets().sub_(1)
    assert held.to_list() == rows


def test_nested_tensors_of_every_form() -> None:
    rows = [torch.rand(2, 3), torch.rand(4, 3)]
    strided = torch.nested.nested_tensor([row.t() for row in rows], layout=torch.strided)
    assert same(column(strided).torch(), [row.t().contiguous() for row in rows])
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert same(column(jagged.transpose(1, 2)).torch(), [row.t().contiguous() for row in rows])
    padded = torch.nested.narrow(
        torch.arange(12.0).view(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([1, 3, 0]), layout=torch.jagged
    )
    assert column(padded).to_list() == [[0.0], [5.0, 6.0, 7.0], []]
    grad = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    assert same(list(column(grad).torch().unbind()), rows)
    offset = torch.nested.nested_tensor_from_jagged(torch.arange(8), torch.tensor([2, 3, 6]))
    assert column(offset).to_list() == [[2], [3, 4, 5]]


def test_gradients_and_lazy_views_are_resolved() -> None:
    values = torch.randn(4, 3, dtype=torch.complex64)
    for tensor in (values.conj(), values.conj().imag, torch.nn.Parameter(values.real), values.real.requires_grad_()):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert same(column(tensor).torch(), plain)
        assert same(list(column(list(tensor.unbind())).torch().unbind()), list(plain.unbind()))
        found = column(tensor).torch()
        assert not found.requires_grad


@each_case(
    ("make", "found"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse"),
        (lambda: torch.eye(2, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.quint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch calls some of these deprecated or in beta
def test_tensors_without_plain_values_are_refused(make: Any, found: str) -> None:
    for values in (make(), [torch.eye(2), make()], [make()]):
        with pytest.raises(SchemaMismatch) as caught:
            values_of("x", values)
        assert found in caught.value.found or "uint8" in caught.value.found
        assert caught.value.column == "x"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_gpu_tensors_are_copied_into_host_columns() -> None:
    tensor = torch.rand(40, 3)
    assert same(column(tensor.cuda()).torch(), tensor)
    assert same(column(tensor.to(torch.bfloat16).cuda().t()).torch(), tensor.to(torch.bfloat16).t().contiguous())
    rows = [tensor[:n] for n in (3, 0, 5)]
    assert same(list(column([row.cuda() for row in rows]).torch().unbind()), rows)
    assert same(list(column([rows[0], rows[1].cuda(), rows[2]]).torch().unbind()), rows)
    nested = torch.nested.nested_tensor([row.cuda() for row in rows], layout=torch.jagged)
    assert same(list(column(nested).torch().unbind()), rows)
    assert same(column(torch.ones(5, 3).cuda(), dedupe=True).torch(), torch.ones(5, 3))
    assert column([None, tensor.cuda()]).to_list()[1].device.type == "cpu"


# TensorDicts in and out.


def _entries() -> dict[str, Any]:
    return {
        "tokens": torch.nested.nested_tensor([torch.arange(2), torch.arange(4)], layout=torch.jagged),
        "dense": torch.rand(2, 3).to(torch.bfloat16),
        "answer": NonTensorStack("a", "b"),
        "same": NonTensorData("s", batch_size=[2]),
        "images": NonTensorStack(NonTensorData(torch.ones(2, 3)), NonTensorData(torch.ones(1, 4))),
        "inputs": NonTensorStack(NonTensorData({"p": torch.ones(2, 3)}), NonTensorData({"q": 1})),
        "nested": TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 2)}}, batch_size=[2]),
    }


def test_a_batch_round_trips_through_a_tensordict() -> None:
    batch = local_batch(TensorDict(_entries(), batch_size=[2]))
    out = batch.to_tensordict()
    assert isinstance(out, TensorDict)
    assert out.batch_size == torch.Size([2])
    assert same(out["dense"], batch["dense"].torch())
    assert out.get("answer").tolist() == ["a", "b"]
    assert same(out.get("inputs").tolist()[0]["p"], torch.ones(2, 3))
    again = local_batch(out)
    assert {**again.schema, "nested": None} == {**batch.schema, "nested": None}  # a struct comes out as dicts
    assert same(again.to_dict(), batch.to_dict())


def test_a_stack_of_values_supports_tensordict_operations() -> None:
    made = TensorDict({"x": tensordicts.stack_of(list(range(6)))}, batch_size=[6])
    assert [part["x"].tolist() for part in made.chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert made[torch.tensor([3, 1])]["x"].tolist() == [3, 1]
    assert torch.cat([made, made[:1]])["x"].tolist() == [*range(6), 0]
    assert pickle.loads(pickle.dumps(made))["x"].tolist() == copy.deepcopy(made)["x"].tolist() == list(range(6))
    made.lock_()
    assert made.get("x").is_locked
    made.unlock_()
