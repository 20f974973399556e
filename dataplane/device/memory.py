"""Host memory as torch takes it, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class _Lent:
    """Says of read-only memory that it can be written, for torch warns of each array that can not."""

    __slots__ = ("__array_interface__", "keeps")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
        self.keeps = array


def lent(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory, which keeps the array, as an array for torch. Where it is read-only, it is only to be read."""
    return array if array.flags.writeable or not array.size else np.asarray(_Lent(array))


def bytes_tensor(data: npt.NDArray[np.uint8]) -> Any:
    """A uint8 tensor over the bytes, which it keeps. Where they are read-only, it is only to be read."""
    import torch

    return torch.from_numpy(lent(data) if data.size else data.copy())
