"""What a process has taken of the machine's memory, and what passes through the controller."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from dataplane.integrations.verl.proto import RemoteProto


def peak_bytes(pid: int | str = "self") -> int:
    """The most that the process had resident, since it began or `forget_peak`."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int | str = "self") -> int:
    """What it has resident."""
    return _status(pid, "VmRSS")


def forget_peak() -> None:
    """Count this process's peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def passed_bytes(value: Any) -> int:
    """The bytes of a value that a controller passes on: of a reference, its own."""
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
