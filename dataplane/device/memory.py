"""Host memory as torch tensors, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse


class _Lent:
    """Presents read-only memory as writable, because torch warns of each read-only array."""

    __slots__ = ("__array_interface__", "keeps")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
        self.keeps = array


def lent(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array for torch over the same memory, which it keeps alive. Read-only memory must not be written to."""
    return array if array.flags.writeable or not array.size else np.asarray(_Lent(array))


def bytes_tensor(data: npt.NDArray[np.uint8]) -> Any:
    """A uint8 tensor over the bytes, which it keeps alive. Read-only bytes must not be written to."""
    import torch

    return torch.from_numpy(lent(data) if data.size else data.copy())


# The devices that callers name, and whether they exist.


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
