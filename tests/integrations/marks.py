"""Marks of modules whose tests use Ray, torch or the systems themselves, in this process."""

from __future__ import annotations

from typing import Any

import pytest

KEPT = pytest.mark.leaks(reason="Ray, torch and a process's plane keep threads and descriptors until the process ends")
#: With warnings of what is tested with as errors.
PLANE = [KEPT, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]
#: Those systems warn of what is their own.
SYSTEMS = [KEPT, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def long(*values: Any) -> list[Any]:
    """Parameters that only the long tests run with; a tuple is one of several names."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long) for each in values]
