"""The resident memory of a process, and the bytes that pass through the controller."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from dataplane.integrations.verl.proto import RemoteProto


def peak_bytes(pid: int | str = "self") -> int:
    """The peak of the process's resident memory, since its start or `forget_peak`."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int | str = "self") -> int:
    """The process's resident memory now."""
    return _status(pid, "VmRSS")


def forget_peak() -> None:
    """Reset the peak of this process."""
    Path("/proc/self/clear_refs").write_text("5")


def passed_bytes(value: Any) -> int:
    """The bytes of an argument or result in the controller: of a RemoteProto, the reference's own."""
    if isinstance(value, RemoteProto):
        return len(pickle.dumps(value))
    if isinstance(value, DataProto):
        tensors = value.batch.values() if value.batch is not None else ()
        return sum(map(passed_bytes, [*tensors, *value.non_tensor_batch.values()]))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, np.ndarray):
        return sum(map(passed_bytes, value)) if value.dtype == object else value.nbytes
    if isinstance(value, dict):
        return sum(map(passed_bytes, value.values()))
    return len(pickle.dumps(value))


def _status(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
