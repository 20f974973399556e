"""The devices that callers name, and whether they exist."""

from __future__ import annotations

from typing import Any

from dataplane.errors import Misuse


def device_of(device: Any) -> Any:
    """The `torch.device` of a device or its name, such as "cuda" or "cuda:1". Imports torch.

    Raises Misuse for an invalid name, or a device that this process does not have.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise Misuse(f"{device!r} names no device: {str(error).splitlines()[0][:200]}") from None
    if found.type == "cuda":
        if torch.cuda._is_in_bad_fork():
            raise Misuse(f"{found} can not be used here: this process was forked from one that used CUDA; spawn it")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise Misuse(f"there is no CUDA here, so tensors can not be on {found}")
        if found.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        if found.index >= count:
            raise Misuse(f"there is no {found}: this process has {count} CUDA devices")
    return found
