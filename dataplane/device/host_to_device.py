"""Tensors within dicts, lists and tuples, copied to a device by one thread for the use of another.

A CUDA stream belongs to a thread, so the copies are ordered in the stream of the thread that makes them only.
Therefore the thread that uses the tensors makes its current stream wait for the copies (`arrive`), but not for later
ones, and tells the allocator that it uses the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dataplane.device.copies import copied, stream_of


class DeviceCopies(NamedTuple):
    """The copies, and the event that marks their completion; None on the host."""

    made: Any
    there: Any = None


def brought(made: Any, device: Any) -> DeviceCopies:
    """The same value with a copy of each tensor on the device. The copies have begun when this returns, on the
    stream of copies: on the default stream of this thread, computations of the device would wait for the copies, and
    vice versa."""
    if device.type != "cuda":
        return DeviceCopies(each_tensor(made, lambda tensor: _copied(tensor, device)))
    import torch

    stream = stream_of(device)
    with torch.cuda.stream(stream):
        return DeviceCopies(each_tensor(made, lambda tensor: _copied(tensor, device)), stream.record_event())


def arrive(brought: DeviceCopies, device: Any) -> Any:
    """The copies of another thread, after the current stream of this thread was made to wait for them."""
    made, there = brought
    if there is None:
        return made
    import torch

    current = torch.cuda.current_stream(device)
    current.wait_event(there)

    def used(tensor: Any) -> Any:
        for part in (tensor.values(), tensor.offsets()) if tensor.is_nested else (tensor,):
            part.record_stream(current)
        return tensor

    each_tensor(made, used)
    return made


def each_tensor(made: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of `made` in which each tensor, also within nested dicts, lists and tuples, is replaced by
    `change(tensor)`."""
    import torch

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, dict):
            return {key: changed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        if isinstance(value, tuple):
            values = [changed(each) for each in value]
            return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
        return value

    return changed(made)


def _copied(tensor: Any, device: Any) -> Any:
    if not tensor.is_nested:
        return copied(tensor, device) if tensor.device.type == "cpu" else tensor.to(device)
    import torch

    offsets = tensor.offsets()
    lengths = offsets.diff()
    bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
    return torch.nested.nested_tensor_from_jagged(copied(tensor.values(), device), copied(offsets, device), **bounds)
