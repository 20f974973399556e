"""Tensors within dicts, lists and tuples, brought to a device by one thread for the use of another.

A CUDA stream is a thread's own: what the bringing thread copies is ordered in its stream alone. So the thread that uses
the tensors has its current stream wait for the copies (`arrive`), and not for those of what is brought next; and tells
the allocator that it uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dataplane.device.copies import copied, stream_of


class Brought(NamedTuple):
    """What was brought, and the event after which it is there; None where it is."""

    made: Any
    there: Any = None


def brought(made: Any, device: Any) -> Brought:
    """The same with a copy on the device of each tensor; begun when this returns, on the stream of copies: were it
    this thread's own, which is the device's first, whatever computes there would wait for the copies, and they for it.
    """
    if device.type != "cuda":
        return Brought(each_tensor(made, lambda tensor: _copied(tensor, device)))
    import torch

    stream = stream_of(device)
    with torch.cuda.stream(stream):
        return Brought(each_tensor(made, lambda tensor: _copied(tensor, device)), stream.record_event())


def arrive(brought: Brought, device: Any) -> Any:
    """What another thread has brought, for which the current stream of this thread waits."""
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
    """The same with what `change` makes of each tensor, within dicts, lists and tuples."""
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
