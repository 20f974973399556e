"""Host memory as torch tensors, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
