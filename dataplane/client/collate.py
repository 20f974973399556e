"""Converts a batch for a training loop to a dict of tensors, with ragged columns jagged or padded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from dataplane.batch import tensors, views
from dataplane.batch.batch import Batch, Column
from dataplane.device.host_to_device import each_tensor
from dataplane.errors import Misuse

MASK = "_mask"
"""The suffix of the name of a padded column's mask."""


def named(how: Any, padding_value: Any, columns: Collection[str]) -> Callable[[Batch], Any]:
    """The function of this name, or the function itself, for batches of these columns. Raises Misuse."""
    if isinstance(padding_value, Mapping) and (unknown := [name for name in padding_value if name not in (*columns,)]):
        raise Misuse(f"padding_value names {unknown[0]!r}, and the columns are {', '.join(map(str, columns))}")
    if how == "jagged":
        return jagged
    if how == "padded":
        return partial(padded, padding_value=padding_value)
    if not callable(how):
        raise Misuse(f'collate is "jagged", "padded" or a function, not {how!r}')
    function: Callable[[Batch], Any] = how
    return function


def jagged(batch: Batch) -> dict[str, Any]:
    """Convert dense columns to tensors, ragged columns to nested tensors, and other columns to lists. Tensors of
    contiguous rows are not copied."""
    return {name: _ragged(column) if column.kind == "ragged" else _plain(column) for name, column in batch.items()}


def padded(batch: Batch, padding_value: Any = 0) -> dict[str, Any]:
    """Convert as `jagged`, but pad ragged columns to the longest row, each with a mask of its values. Raises Misuse if
    a column has the name of a mask."""
    made: dict[str, Any] = {}
    for name, column in batch.items():
        if column.kind != "ragged":
            made[name] = _plain(column)
            continue
        if name + MASK in batch:
            raise Misuse(f"the mask of {name!r} would take the place of the column {name + MASK!r}; rename that")
        value = padding_value.get(name, 0) if isinstance(padding_value, Mapping) else padding_value
        made[name], made[name + MASK] = views.padded(column, value)
    return made


def pinned(made: Any, device: int) -> Any:
    """Return a copy of the argument with each tensor, also within dicts, lists and tuples, in page-locked memory.
    device: the CUDA device to use in this thread. A new thread would use device 0, and create a context there."""
    import torch

    torch.cuda.set_device(device)
    return each_tensor(made, lambda tensor: tensor.pin_memory())


def _plain(column: Column) -> Any:
    return column.torch() if column.kind in ("dense", "struct") else column.to_list()


def _ragged(column: Column) -> Any:
    if column.field.varying > 1:
        return column.torch()
    return tensors.jagged(*column.packed())  # not `torch()`, whose tensor is cached: this one may be copied by pinning
