"""TensorDicts in and out. Nothing here imports tensordict before somebody brings one or asks for one.

In: every entry is a column; a nested TensorDict is a struct, a stack of what is no tensor a list. The first batch
dimension counts rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.batch import tensors
from dataplane.batch.infer import infer
from dataplane.batch.values import Values, mismatch, struct


def is_tensordict(value: object) -> bool:
    """Whether it is a TensorDict, a tensorclass or a stack of what is no tensor."""
    test = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return test is not None and bool(test(value))


def columns_of(batch: Any, column: str = "") -> Iterator[tuple[str, Values]]:
    """The entries as columns, with their names. Raises SchemaMismatch, also where it has no batch dimension."""
    if not len(batch.batch_size):
        raise mismatch(
            column, "a TensorDict without a batch dimension has no rows", expected="a batch size", found="()"
        )
    for name in batch.keys():  # noqa: SIM118  # iteration over a TensorDict is over its rows
        yield name, values_of(f"{column}.{name}" if column else name, batch.get(name))


def values_of(column: str, entry: Any) -> Values:
    """One entry as a column. Raises SchemaMismatch."""
    if not is_tensordict(entry):
        return tensors.values_of(column, entry)
    if type(entry).__name__ in ("NonTensorData", "NonTensorStack", "MetaData"):
        return infer(column, entry.tolist())
    pairs = list(columns_of(entry, column))
    rows = int(entry.batch_size[0])
    present = [np.ones(rows, np.bool_)] * len(pairs)
    return struct([name for name, _ in pairs], present, [values for _, values in pairs], rows)


def build(tensors: Mapping[str, Any], others: Mapping[str, Sequence[Any]], rows: int) -> Any:
    """A TensorDict of the batch size [rows]: tensors [rows, ...], and lists of a value a row. Imports tensordict."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    stacks = {name: NonTensorStack(*map(NonTensorData, values)) for name, values in others.items()}
    return TensorDict({**tensors, **stacks}, batch_size=[rows])
